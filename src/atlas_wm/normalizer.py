"""Standardisation of actions, and their bounds: fitted on the training split, saved with the model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atlas_wm.errors import UserError, short

Bounds = Sequence[tuple[float, float]]  # lowest and highest value of each action coordinate


@dataclass(frozen=True)
class Normalizer:
    """(a − mean) / std for each of the A action coordinates, and the bounds that plans are clipped to."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    low: tuple[float, ...] | None = None
    """Bounds in the environment's units; None in runs of older versions, which did not store them."""
    high: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.mean:
            raise UserError("a normaliser needs one mean and one std per action coordinate")
        if not all(math.isfinite(v) for v in (*self.mean, *self.std)) or min(self.std) <= 0:
            raise UserError("a normaliser needs finite means and positive, finite standard deviations")
        if (self.low is None) != (self.high is None):
            raise UserError("action bounds need both low and high")
        if self.low is not None and self.high is not None:
            if not len(self.low) == len(self.high) == self.size:
                raise UserError("action bounds need one low and one high per action coordinate")
            if not all(math.isfinite(v) for v in (*self.low, *self.high)):
                raise UserError("action bounds must be finite")
            if any(low > high for low, high in zip(self.low, self.high, strict=True)):
                raise UserError("action bounds need low <= high in every coordinate")

    @classmethod
    def fit(cls, actions: np.ndarray, bounds: Bounds | None = None) -> "Normalizer":
        """From raw actions (N, A), without rows that have NaN (episode ends). Coordinates without finite bounds get
        the smallest and the largest action instead."""
        rows = np.asarray(actions, dtype=np.float64)
        finite = np.isfinite(rows)
        rows = rows if finite.all() else rows[finite.all(axis=1)]
        if len(rows) == 0:
            raise UserError("the training split has no finite action to compute mean and standard deviation from")
        # A constant coordinate is not scaled. Rounding may give it a positive std, but not a positive range.
        seen = np.array([[column.min(), column.max()] for column in rows.T]).T  # (2, A)
        std = np.where(seen[1] > seen[0], rows.std(axis=0), 1.0)
        known = seen if bounds is None else np.asarray(bounds, np.float64).T
        if known.shape != seen.shape:
            raise UserError(f"action_bounds must be {rows.shape[1]} pairs (low, high), not {short(bounds)}")
        low, high = np.where(np.isfinite(known), known, seen)
        return cls(*(tuple(values.tolist()) for values in (rows.mean(axis=0), std, low, high)))

    @property
    def size(self) -> int:
        return len(self.mean)

    def apply(self, actions: Tensor) -> Tensor:
        """(..., A) raw → standardised, NaN → 0."""
        mean, std = self._like(actions)
        return torch.nan_to_num((actions - mean) / std, nan=0.0)

    def invert(self, actions: Tensor) -> Tensor:
        """(..., A) standardised → raw."""
        mean, std = self._like(actions)
        return actions * std + mean

    def clip(self, actions: Tensor) -> Tensor:
        """(..., A) raw → raw, clipped to the bounds if there are any."""
        if self.low is None or self.high is None:
            return actions
        return actions.clamp(actions.new_tensor(self.low), actions.new_tensor(self.high))

    def outside(self, actions: np.ndarray) -> float:
        """The fraction of raw actions (N, A) with a coordinate out of bounds."""
        if self.low is None or self.high is None:
            return 0.0
        low, high = (np.asarray(bound, actions.dtype) for bound in (self.low, self.high))
        return float(((actions < low) | (actions > high)).any(axis=1).mean())

    def _like(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        if actions.shape[-1] != self.size:
            raise UserError(f"actions have {actions.shape[-1]} coordinates, the model was trained on {self.size}")
        return actions.new_tensor(self.mean), actions.new_tensor(self.std)

    def to_dict(self) -> dict[str, Any]:
        bounds = {} if self.low is None or self.high is None else {"low": list(self.low), "high": list(self.high)}
        return {"action": {"mean": list(self.mean), "std": list(self.std), **bounds}}

    @classmethod
    def from_dict(cls, data: Any) -> "Normalizer":
        def numbers(key: str) -> tuple[float, ...]:
            values: Sequence[Any] = data["action"][key]
            if not isinstance(values, list) or not all(type(v) in (int, float) for v in values):
                raise TypeError(key)
            return tuple(float(v) for v in values)

        try:
            bounds = [numbers(key) if key in data["action"] else None for key in ("low", "high")]
            return cls(numbers("mean"), numbers("std"), *bounds)
        except (KeyError, TypeError, OverflowError) as error:
            raise UserError(
                "normalizer.json must hold {'action': {'mean': [numbers], 'std': [numbers]}}, and may hold 'low' "
                "and 'high'"
            ) from error
