"""Plans within the action space: what is returned is clipped, what is searched is not.

Clipping the candidates too made plans worse (docs/deviations.md), so only the answer of a search is clipped, before
it is rolled out: the cost, latents and novelty of a plan are those of the clipped actions.
"""

from torch import Tensor, tensor

from atlas_wm.config import PlanConfig
from atlas_wm.models.world_model import WorldModel


def clip_limits(config: PlanConfig, model: WorldModel) -> tuple[Tensor, Tensor] | None:
    """The lowest and the highest block of standardised actions, (frameskip·A,) each; None: nothing is clipped."""
    normalizer = model.normalizer
    if not config.clip_actions or normalizer.low is None or normalizer.high is None:
        return None
    device = next(model.parameters()).device
    low, high = (
        normalizer.apply(tensor(bound)).repeat(model.config.frameskip).to(device)
        for bound in (normalizer.low, normalizer.high)
    )
    return low, high
