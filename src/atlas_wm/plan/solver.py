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

    takes_proposals = False  # compares the proposals of plan.start, too; else it gets the cheapest as its start
    needs_gradients = False  # of the cost in the candidates: the planner then leaves out fast paths without them

    def __init__(self, config: PlanConfig):
        self.config = config

    @abstractmethod
    def __call__(
        self,
        cost: Callable[[Tensor], Tensor],
        start: Tensor,
        rngs: Sequence[torch.Generator],
        proposals: Tensor | None = None,
    ) -> Solution:
        """Minimise ``cost``, (B, S, H, D) → (B, S) for any S, for B = len(rngs) episodes at once.

        start: (B, H, D) standardised action chunks to start from. Draw all noise of episode b from rngs[b], so that
        its plan does not depend on the other episodes in the batch. proposals: (B, P, H, D), at most as many as
        candidates, sequences to compare with the first candidates; ``start`` is the cheapest of them. They are only
        passed to a solver that sets ``takes_proposals``.
        """
