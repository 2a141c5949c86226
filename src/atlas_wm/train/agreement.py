"""Compare the fused kernels with the plain module on one small batch, before training uses them.

:mod:`atlas_wm.models.structure` finds modules that are built differently. This finds results that differ by more
than bf16 rounding.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atlas_wm.models.world_model import WorldModel
from atlas_wm.rng import make_rng

FRAMES, CLIPS = 16, 16  # multiples of 16, as batches are: Triton specialises kernels on that
TOLERANCE = 5e-2  # relative error of an output or a gradient against float32; measured: 1.5e-2 at most
MARGIN = 4  # times the error of autocast, if that is more: some gradients are small differences of large numbers


class Difference(NamedTuple):
    where: str
    error: float
    allowed: float


def disagreement(model: WorldModel, part: str) -> str:
    """Where and by how much the fused encoder or predictor differs from the plain one; "" where it does not.

    The model, its gradients and torch's random state do not change.
    """
    try:
        where, error, allowed = encoder_difference(model) if part == "encoder" else predictor_difference(model)
    except Exception as failure:  # of a compiler, a driver, or for lack of memory
        return f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
    if error <= allowed:
        return ""
    return f"fused and plain differ by {error:.1e} in {where}, where bf16 explains {allowed:.1e}"


def encoder_difference(model: WorldModel) -> Difference:
    device, size = next(model.parameters()).device, model.config.encoder.image_size
    frames = torch.randint(0, 256, (FRAMES, 3, size, size), dtype=torch.uint8, generator=make_rng(0)).to(device)

    def run(encoder: Any) -> dict[str, Tensor]:
        tokens = encoder(frames)
        return {"cls": tokens.cls, "patches": tokens.patches}

    return worst_difference(_perturbed(model.encoder), run)


def predictor_difference(model: WorldModel) -> Difference:
    config, device = model.config, next(model.parameters()).device
    sizes = {"z": config.latent, "actions": config.frameskip * model.action_size}
    draw = make_rng(0)
    given = {
        name: torch.randn(CLIPS, config.history, size, generator=draw).to(device).requires_grad_()
        for name, size in sizes.items()
    }
    predictor = _perturbed(model.predictor)
    for module in predictor.modules():
        if isinstance(module, nn.Dropout):  # the kernels draw their own masks
            module.p = 0.0
    return worst_difference(predictor, lambda predictor: {"latents": predictor.predict(**given)}, given)


def worst_difference(
    module: nn.Module, run: Callable[[Any], dict[str, Tensor]], given: dict[str, Tensor] | None = None
) -> Difference:
    """Compare the tensors that ``run(module)`` returns, and their gradients with respect to weights and ``given``,
    with ``module.fused`` on and off. Returns the largest difference relative to what bf16 allows."""
    names = {**(given or {}), **{name: p for name, p in module.named_parameters() if p.requires_grad}}
    device = next(module.parameters()).device

    def quantities(fused: bool, autocast: bool) -> dict[str, Tensor]:
        module.fused = fused  # type: ignore[assignment]
        found = {}
        # Every run starts from the same random state and restores it.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                outputs = run(module)
            for label, output in outputs.items():
                found[label] = output.detach().float()
                direction = torch.randn(output.shape, generator=make_rng(1)).to(device)
                total, weights = (output.float() * direction).sum(), list(names.values())
                gradients = torch.autograd.grad(total, weights, retain_graph=True, materialize_grads=True)
                found |= {f"d {label} / d {name}": g for name, g in zip(names, gradients, strict=True)}
        return found

    exact, rough, fused = quantities(False, False), quantities(False, True), quantities(True, True)
    differences = []
    for where, value in exact.items():
        size = value.norm().clamp_min(torch.finfo(torch.float32).tiny)
        error, rounding = (float((other[where] - value).norm() / size) for other in (fused, rough))
        error = math.inf if math.isnan(error) else error
        differences.append(Difference(where, error, max(TOLERANCE, MARGIN * rounding)))
    return max(differences, key=lambda d: d.error / d.allowed)


@torch.no_grad()
def _perturbed(module: nn.Module) -> nn.Module:
    """A copy in training mode with no constant weights: a gate at zero would hide everything behind it.

    BatchNorm, which no kernel replaces, uses its running statistics.
    """
    copy, draw = deepcopy(module).train(), make_rng(2)
    for part in copy.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.eval()
    for parameter in copy.parameters():
        if (parameter == parameter.flatten()[0]).all():
            scale = 0.3 * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.add_(scale * torch.randn(parameter.shape, generator=draw).to(parameter.device))
    return copy
