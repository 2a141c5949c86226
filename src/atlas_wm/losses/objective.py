"""The training objective as one weighted sum: L = L_pred + λ·L_WEM + μ·L_OOD, its ablations and baselines."""

from collections.abc import Callable
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atlas_wm.config import ObjectiveConfig
from atlas_wm.errors import UserError, user_code_location
from atlas_wm.losses.prediction import prediction
from atlas_wm.losses.relational import relational
from atlas_wm.losses.sigreg import sigreg
from atlas_wm.losses.variance import centred, cov, std, temporal
from atlas_wm.losses.wemreg import wemreg
from atlas_wm.plugins import import_named


class ClipLatents(NamedTuple):
    """What the model makes of a batch of clips: B clips, T frames."""

    z: Tensor  # (B, T, …) planning latents
    anchor: Tensor  # (B, T, w) mean final-layer patch token
    predicted: Tensor  # (B, T-1, …) ẑ_2..ẑ_T
    actions: Tensor  # (B, T-1, frameskip·A) standardised
    inverse: Tensor | None = None  # (B, T-1, frameskip·A) the actions, told from neighbouring latents


class Progress(NamedTuple):
    """How far training has come. Tensors: a CUDA graph reads them anew at every step, and would keep a number."""

    step: Tensor  # () float32, 1 in the first update and total in the last
    total: Tensor  # () float32

    @classmethod
    def at(cls, step: int, total: int, device: torch.device | str = "cpu") -> "Progress":
        return cls(*(torch.tensor(float(n), device=device) for n in (step, total)))


class Losses(NamedTuple):
    total: Tensor
    terms: dict[str, Tensor]  # unweighted


Draw = torch.Generator | Tensor | None  # draws the directions, or they themselves: (d, L)
Term = Callable[[ClipLatents, ObjectiveConfig, Draw], Tensor]


def _inverse(clips: ClipLatents) -> Tensor:
    assert clips.inverse is not None  # RunConfig sees to it
    return prediction(clips.inverse, clips.actions)


def _directions(config: ObjectiveConfig, draw: Draw) -> tuple[int | Tensor, torch.Generator | None]:
    return (draw, None) if isinstance(draw, Tensor) else (config.directions, draw)


# The marginal regularisers treat each time step as a statistic over the batch, so time leads: (T, B, d).
TERMS: dict[str, Term] = {
    "prediction": lambda c, _o, _g: prediction(c.predicted, c.z[:, 1:]),
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


@torch.compiler.disable  # it may do what the compiler cannot, and is part of a captured graph all the same
def own_term(name: str, clips: ClipLatents, progress: Progress | None = None) -> Tensor:
    """The value of the function that ``module:function`` names: of the clips, and of the progress if it has a
    parameter of that name. What is wrong with it is the user's to mend."""
    function = import_named("loss term", name)
    wanted = {"progress": progress} if _takes_progress(name, function) else {}
    if wanted and progress is None:
        raise UserError(f"loss term {name} takes progress: call objective(…, progress=Progress.at(step, total))")
    try:
        value = function(clips, **wanted)
    except Exception as error:
        place = user_code_location(error) or "its call"
        raise UserError(f"loss term {name} failed at {place}: {type(error).__name__}: {error}") from error
    if not isinstance(value, Tensor) or value.ndim:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise UserError(f"loss term {name} must return a tensor with one number, not {found}")
    return value


_signatures: dict[str, tuple[Any, bool]] = {}  # by name: the function that was looked at, and what was found


def _takes_progress(name: str, function: Any) -> bool:
    """Whether it has a parameter ``progress``. Told once for a function: terms are called at every step."""
    known, takes = _signatures.get(name, (None, False))
    if known is not function:
        try:
            takes = "progress" in signature(function).parameters
        except (TypeError, ValueError):  # no function, or one of C without a signature
            takes = False
        _signatures[name] = (function, takes)
    return takes


def objective(
    clips: ClipLatents, config: ObjectiveConfig, draw: Draw = None, progress: Progress | None = None
) -> Losses:
    """The weighted sum over the terms of the config. ``draw``: a generator of directions, or directions (d, L).
    ``progress``: for terms of one's own that ask for it."""
    weights = config.weights
    terms = {
        name: TERMS[name](clips, config, draw) if name in TERMS else own_term(name, clips, progress)
        for name in weights
    }
    total = torch.stack([weights[name] * value for name, value in terms.items()]).sum()
    return Losses(total, terms)
