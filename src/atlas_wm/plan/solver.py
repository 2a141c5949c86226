"""A solver minimises a cost over action sequences. Your own is a subclass (docs/guides/own-model.md)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atlas_wm.config import PlanConfig


class Solution(NamedTuple):
    mean: Tensor  # (B, H, D) the answer
    costs: Tensor  # (iterations, B) how the cost falls; CEM: mean cost of the elites of each iteration


class Solver(ABC):
    """What ``plan.solver`` names: built from the plan's config."""

    needs_gradients = False  # of the cost in the candidates: the planner then leaves out fast paths without them

    def __init__(self, config: PlanConfig):
        self.config = config

    @abstractmethod
    def __call__(
        self, cost: Callable[[Tensor], Tensor], start: Tensor, rngs: Sequence[torch.Generator]
    ) -> Solution:
        """Minimise ``cost``, (B, S, H, D) → (B, S) for any S, for B = len(rngs) episodes at once.

        start: (B, H, D) standardised action chunks to start from. Draw all noise of episode b from rngs[b], so that
        its plan does not depend on the other episodes in the batch.
        """
