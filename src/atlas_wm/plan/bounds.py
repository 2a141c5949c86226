"""Action bounds of a plan: the answer of a search is clipped, its candidates are not.

Clipping the candidates too made plans worse (docs/deviations.md). The answer is clipped before it is rolled out:
the cost, latents and novelty of a plan are those of the clipped actions.
"""

from torch import Tensor, tensor

from atlas_wm.config import PlanConfig
from atlas_wm.models.world_model import WorldModel


def clip_limits(config: PlanConfig, model: WorldModel) -> tuple[Tensor, Tensor] | None:
    """The lowest and highest standardised action chunk, (frameskip·A,) each; None: no clipping."""
    normalizer = model.normalizer
    if not config.clip_actions or normalizer.low is None or normalizer.high is None:
        return None
    device = next(model.parameters()).device
    low, high = (
        normalizer.apply(tensor(bound)).repeat(model.config.frameskip).to(device)
        for bound in (normalizer.low, normalizer.high)
    )
    return low, high
