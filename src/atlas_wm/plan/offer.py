"""The fast rollout that a predictor offers, compared with the model's rollout before it is used."""

import torch

from atlas_wm.errors import UserError
from atlas_wm.models.predictors import Dynamics
from atlas_wm.models.world_model import WorldModel
from atlas_wm.rng import make_rng

TOLERANCE, LOW_TOLERANCE = 1e-3, 0.1  # relative errors of latents; measured: 1e-6 in float32, 1e-2 in bfloat16
STEPS = 2  # rolled out after the history is full, when windows slide


class NoFastRollout(UserError):
    """The predictor offers none."""


def fast_rollout(model: WorldModel, dtype: torch.dtype, *, capturable: bool = False) -> Dynamics:
    """The checked offer; a UserError says why there is none. ``capturable``: for a CUDA graph."""
    name = type(model.predictor).__name__
    offer = getattr(model.predictor, "fast_rollout", None)  # a predictor need not be a Predictor
    fast = offer and offer(dtype, capturable)
    if fast is None:
        raise NoFastRollout(f"{name} has no fast rollout")
    error = rollout_error(model, fast)
    if not error <= (LOW_TOLERANCE if dtype.itemsize < 4 else TOLERANCE):  # also refuses NaN
        raise UserError(f"the fast rollout of {name} differs from its plain one by {error:.1e}")
    return fast


@torch.inference_mode()
def rollout_error(model: WorldModel, fast: Dynamics) -> float:
    """Relative error of the latents along a few random action sequences; the model is in eval mode."""
    device = next(model.parameters()).device
    z = torch.randn(2, *model.config.latent_shape, generator=make_rng(0)).to(device)
    steps, size = model.config.history + STEPS, model.config.frameskip * model.action_size
    actions = torch.randn(2, 2, steps, size, generator=make_rng(1)).to(device)
    pairs = [(world.rollout(z, actions), world.terminal(z, actions)) for world in (fast, model)]
    errors = [(got - plain).norm() / plain.norm() for got, plain in zip(*pairs, strict=True)]
    return float(torch.stack(errors).max())
