"""The training objective as one weighted sum: L = L_pred + λ·L_WEM + μ·L_OOD, its ablations and baselines."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from atlas_wm.config import ObjectiveConfig
from atlas_wm.errors import UserError
from atlas_wm.losses.own_terms import own_term
from atlas_wm.losses.prediction import prediction
from atlas_wm.losses.relational import relational
from atlas_wm.losses.sigreg import sigreg
from atlas_wm.losses.variance import centred, cov, std, temporal
from atlas_wm.losses.wemreg import wemreg


class ClipLatents(NamedTuple):
    """What the model makes of a batch of clips: B clips, T frames."""

    z: Tensor  # (B, T, …) planning latents
    anchor: Tensor  # (B, T, w) mean final-layer patch token
    predicted: Tensor  # (B, T-1, …) ẑ_2..ẑ_T
    actions: Tensor  # (B, T-1, frameskip·A) standardised
    inverse: Tensor | None = None  # (B, T-1, frameskip·A) actions predicted from neighbouring latents
    target: Tensor | None = None  # (B, T-1, …) latents 2..T of the EMA target, without gradient


class Progress(NamedTuple):
    """How far training has come. These are tensors because a captured CUDA graph reads tensors at every replay, but
    fixes Python numbers."""

    step: Tensor  # () float32, 1 in the first update and total in the last
    total: Tensor  # () float32

    @classmethod
    def at(cls, step: int, total: int, device: torch.device | str = "cpu") -> "Progress":
        return cls(*(torch.tensor(float(n), device=device) for n in (step, total)))


class Losses(NamedTuple):
    total: Tensor
    terms: dict[str, Tensor]  # unweighted


Draw = torch.Generator | Tensor | None  # a generator of directions, or the directions (d, L)
Term = Callable[[ClipLatents, ObjectiveConfig, Draw], Tensor]


def _target(clips: ClipLatents, config: ObjectiveConfig) -> Tensor:
    """(B, T-1, …) what predictions are compared with"""
    if config.target == "ema":
        if clips.target is None:
            raise UserError("objective.target ema: call model.prepare_training(config.objective) first")
        return clips.target
    return clips.z[:, 1:] if config.target == "online" else clips.z[:, 1:].detach()


def _inverse(clips: ClipLatents) -> Tensor:
    assert clips.inverse is not None  # RunConfig checks it
    return prediction(clips.inverse, clips.actions)


def _directions(config: ObjectiveConfig, draw: Draw) -> tuple[int | Tensor, torch.Generator | None]:
    return (draw, None) if isinstance(draw, Tensor) else (config.directions, draw)


# The marginal regularisers treat each time step as a statistic over the batch, so time leads: (T, B, d).
TERMS: dict[str, Term] = {
    "prediction": lambda c, o, _g: prediction(c.predicted, _target(c, o)),
    "wemreg": lambda c, o, g: wemreg(c.z.transpose(0, 1), *_directions(o, g)),
    "sigreg": lambda c, o, g: sigreg(c.z.transpose(0, 1), *_directions(o, g)),
    "relational": lambda c, _o, _g: relational(c.z, c.anchor),
    "std": lambda c, _o, _g: std(centred(c.z)),
    "std_t": lambda c, _o, _g: std(centred(c.z).transpose(0, 1)),
    "cov": lambda c, _o, _g: cov(centred(c.z)),
    "cov_t": lambda c, _o, _g: cov(centred(c.z).transpose(0, 1)),
    "temporal": lambda c, _o, _g: temporal(c.z),
    "inverse": lambda c, _o, _g: _inverse(c),
}


def objective(
    clips: ClipLatents,
    config: ObjectiveConfig,
    draw: Draw = None,
    progress: Progress | None = None,
    terms: nn.ModuleDict | None = None,
) -> Losses:
    """The weighted sum of the terms in the config.

    ``draw``: a generator of directions, or the directions (d, L). For the user's own terms: the ``progress`` of
    training, and the ``terms`` that are modules (``model.terms``).
    """
    weights = config.weights
    values = {
        name: TERMS[name](clips, config, draw) if name in TERMS else own_term(name, clips, progress, terms)
        for name in weights
    }
    total = torch.stack([weights[name] * value for name, value in values.items()]).sum()
    return Losses(total, values)
