"""How many model steps a latent is away from another one: a small head on frozen latents (`atlas head`)."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, softplus

GROUPS, SIZE = 8, 8  # of the embedding: terms of the sum, coordinates of each


@dataclass(frozen=True)
class TemporalHead:
    """d(x, y) = Σ_g s_g max_i (φ_gi(x) − φ_gi(y))⁺, with an MLP φ of the standardised point and s > 0.

    Whatever the weights, d is a quasimetric: d ≥ 0, d(x, x) = 0 and d(x, y) ≤ d(x, w) + d(w, y), but d(x, y) and
    d(y, x) may differ. The point of a latent is that of the latent bank: the latent, or the mean of its patch
    tokens.

    d is good far away and coarse nearby, ‖x − y‖ the other way round. ``distance`` is their mean in model steps, a
    quasimetric too.
    """

    mean: Tensor  # (m,) of the training points
    std: Tensor  # (m,)
    first: Tensor  # (hidden, m)
    first_bias: Tensor  # (hidden,)
    second: Tensor  # (hidden, hidden)
    second_bias: Tensor  # (hidden,)
    last: Tensor  # (GROUPS·SIZE, hidden); a bias would cancel
    scale: Tensor  # (GROUPS,) s = softplus(scale)
    step: Tensor  # () mean ‖x − y‖ of points one model step apart

    @staticmethod
    def shapes(width: int) -> dict[str, tuple[int, ...]]:
        """Of the fields, for points of ``width`` coordinates."""
        hidden = 64 if width <= 64 else 256
        sizes = ((width,), (width,), (hidden, width), (hidden,), (hidden, hidden), (hidden,))
        last: tuple[tuple[int, ...], ...] = ((GROUPS * SIZE, hidden), (GROUPS,), ())
        return dict(zip([f.name for f in fields(TemporalHead)], (*sizes, *last), strict=True))

    @classmethod
    def initial(cls, points: Tensor, rng: torch.Generator, step: float = 1.0) -> "TemporalHead":
        """Before it is fitted to points (N, m), whose mean step has this length. The rng is one of the CPU."""
        parts = {name: torch.zeros(shape) for name, shape in cls.shapes(points.shape[1]).items()}
        for name in ("first", "second", "last"):
            bound = parts[name].shape[1] ** -0.5
            parts[name].uniform_(-bound, bound, generator=rng)
        parts["scale"] += 2.0
        parts["step"] += max(step, 1e-6)
        parts["mean"], parts["std"] = points.mean(dim=0), points.std(dim=0) + 1e-6
        return cls(**{name: tensor.to(points.device) for name, tensor in parts.items()})

    @property
    def fitted(self) -> list[Tensor]:
        """What training changes."""
        return [tensor for name, tensor in vars(self).items() if name not in ("mean", "std", "step")]

    def to(self, device: torch.device | str) -> "TemporalHead":
        return TemporalHead(**{name: tensor.detach().to(device) for name, tensor in vars(self).items()})

    def embed(self, points: Tensor) -> Tensor:
        """φ: (…, m) → (…, GROUPS, SIZE)"""
        x = (points.float() - self.mean) / self.std
        x = gelu(linear(x, self.first, self.first_bias))
        x = gelu(linear(x, self.second, self.second_bias))
        return linear(x, self.last).unflatten(-1, (GROUPS, SIZE))

    def between(self, start: Tensor, end: Tensor) -> Tensor:
        """d of embeddings: (…, GROUPS, SIZE) twice → (…)"""
        return ((start - end).amax(dim=-1).relu() * softplus(self.scale)).sum(dim=-1)

    def __call__(self, points: Tensor, others: Tensor) -> Tensor:
        """d: (…, m) twice → (…)"""
        return self.between(self.embed(points), self.embed(others))

    def straight(self, points: Tensor, others: Tensor) -> Tensor:
        """‖x − y‖ in mean steps: (…, m) twice → (…)"""
        return (points.float() - others.float()).norm(dim=-1) / self.step

    def distance(self, points: Tensor, others: Tensor) -> Tensor:
        """Model steps from the first to the second, the mean of both estimates: (…, m) twice → (…)"""
        return (self(points, others) + self.straight(points, others)) / 2
