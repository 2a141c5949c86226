"""Standardisation of actions: fitted on the training part, travels with the model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atlas_wm.errors import UserError


@dataclass(frozen=True)
class Normalizer:
    """(a − mean) / std for each of the A action coordinates."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.mean:
            raise UserError("a normaliser needs one mean and one std per action coordinate")
        if not all(math.isfinite(v) for v in (*self.mean, *self.std)) or min(self.std) <= 0:
            raise UserError("a normaliser needs finite means and positive, finite deviations")

    @classmethod
    def fit(cls, actions: np.ndarray) -> "Normalizer":
        """From raw actions (N, A); rows with NaN (episode ends) are left out."""
        rows = np.asarray(actions, dtype=np.float64)
        rows = rows[np.isfinite(rows).all(axis=1)]
        if len(rows) == 0:
            raise UserError("no finite action in the training part: nothing to standardise with")
        # A coordinate that never moves keeps its scale. Its deviation may be off 0 by rounding, its range is not.
        std = np.where(np.ptp(rows, axis=0) > 0, rows.std(axis=0), 1.0)
        return cls(tuple(rows.mean(axis=0).tolist()), tuple(std.tolist()))

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

    def _like(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        if actions.shape[-1] != self.size:
            raise UserError(f"actions have {actions.shape[-1]} coordinates, the model was trained on {self.size}")
        return actions.new_tensor(self.mean), actions.new_tensor(self.std)

    def to_dict(self) -> dict[str, Any]:
        return {"action": {"mean": list(self.mean), "std": list(self.std)}}

    @classmethod
    def from_dict(cls, data: Any) -> "Normalizer":
        def numbers(key: str) -> tuple[float, ...]:
            values: Sequence[Any] = data["action"][key]
            if not isinstance(values, list) or not all(type(v) in (int, float) for v in values):
                raise TypeError(key)
            return tuple(float(v) for v in values)

        try:
            return cls(numbers("mean"), numbers("std"))
        except (KeyError, TypeError, OverflowError) as error:
            raise UserError(
                "normalizer.json must hold {'action': {'mean': [numbers], 'std': [numbers]}}"
            ) from error
