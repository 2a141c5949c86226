"""What a search looked at: for pages that show it."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from atlas_wm.plan.planner import Planner
from atlas_wm.plan.solver import Solution, Solver


class TracedSolver(Solver):
    """A solver that remembers the candidates of its last search and their costs. The plan is the same."""

    def __init__(self, solver: Solver):
        super().__init__(solver.config)
        self.solver = solver
        self.takes_proposals, self.needs_gradients = solver.takes_proposals, solver.needs_gradients
        self.candidates: list[Tensor] = []  # of each iteration, the first episode's: (S, H, D) standardised
        self.costs: list[Tensor] = []  # the same: (S,)
        self.means: list[float] = []  # Solution.costs of the first episode

    def __call__(
        self,
        cost: Callable[[Tensor], Tensor],
        start: Tensor,
        rngs: Sequence[torch.Generator],
        proposals: Tensor | None = None,
    ) -> Solution:
        self.candidates, self.costs = [], []

        def seen(candidates: Tensor) -> Tensor:
            costs = cost(candidates)
            self.candidates.append(candidates[0].detach().cpu())
            self.costs.append(costs[0].detach().cpu())
            return costs

        solution = self.solver(seen, start, rngs, *(() if proposals is None else (proposals,)))
        self.means = solution.costs[:, 0].tolist()
        return solution


def traced(planner: Planner) -> TracedSolver:
    """Let the planner's solver remember its searches. CUDA graphs have no solver: use ``plain`` there."""
    planner.solver = TracedSolver(planner.solver)
    return planner.solver
