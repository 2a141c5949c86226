"""The training objective as one weighted sum: L = L_pred + λ·L_WEM + μ·L_OOD, and its ablations."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from atlas_wm.config import ObjectiveConfig
from atlas_wm.losses.prediction import prediction
from atlas_wm.losses.relational import relational
from atlas_wm.losses.sigreg import sigreg
from atlas_wm.losses.wemreg import wemreg


class ClipLatents(NamedTuple):
    """What the model makes of a batch of clips: B clips, T frames."""

    z: Tensor  # (B, T, d) planning latents
    anchor: Tensor  # (B, T, w) mean final-layer patch token
    predicted: Tensor  # (B, T-1, d) ẑ_2..ẑ_T


class Losses(NamedTuple):
    total: Tensor
    terms: dict[str, Tensor]  # unweighted


Term = Callable[[ClipLatents, ObjectiveConfig, torch.Generator | None], Tensor]

# The marginal regularisers treat each time step as a statistic over the batch, so time leads: (T, B, d).
TERMS: dict[str, Term] = {
    "prediction": lambda c, _o, _g: prediction(c.predicted, c.z[:, 1:]),
    "wemreg": lambda c, o, g: wemreg(c.z.transpose(0, 1), o.directions, g),
    "sigreg": lambda c, o, g: sigreg(c.z.transpose(0, 1), o.directions, g),
    "relational": lambda c, _o, _g: relational(c.z, c.anchor),
}


def objective(clips: ClipLatents, config: ObjectiveConfig, generator: torch.Generator | None = None) -> Losses:
    """The weighted sum over the terms of the config; ``generator`` draws the directions."""
    terms = {name: TERMS[name](clips, config, generator) for name in config.terms}
    total = torch.stack([getattr(config, name) * value for name, value in terms.items()]).sum()
    return Losses(total, terms)
