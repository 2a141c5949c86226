"""The cross-entropy method: refine a Gaussian over action sequences toward the cheapest ones."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from atlas_wm.config import PlanConfig
from atlas_wm.plan.solver import Solution, Solver
from atlas_wm.plugins import build


class CEM(Solver):
    """Starts from N(start, 1). Candidate 0 is always the current mean. Mean and standard deviation of the elites
    give the next distribution. Proposals, one of which is the start, replace the first candidates of the first
    iteration."""

    takes_proposals = True

    def __call__(
        self,
        cost: Callable[[Tensor], Tensor],
        start: Tensor,
        rngs: Sequence[torch.Generator],
        proposals: Tensor | None = None,
    ) -> Solution:
        shape = (self.config.candidates, *start.shape[1:])
        mean, std = start, torch.ones_like(start)
        costs = []
        for iteration in range(self.config.iterations):
            noise = torch.stack([torch.randn(shape, generator=g) for g in rngs]).to(start.device)
            candidates = mean[:, None] + std[:, None] * noise
            candidates[:, 0] = mean
            if proposals is not None and iteration == 0:
                candidates[:, : proposals.shape[1]] = proposals
            cheapest = cost(candidates).topk(self.config.elites, dim=1, largest=False)
            elites = candidates.gather(1, cheapest.indices[..., None, None].expand(-1, -1, *shape[1:]))
            mean, std = elites.mean(dim=1), elites.std(dim=1)
            costs.append(cheapest.values.mean(dim=1))
        return Solution(mean, torch.stack(costs))


SOLVERS: dict[str, type[Solver]] = {"cem": CEM}


def make_solver(config: PlanConfig) -> Solver:
    return build("solver", config.solver, SOLVERS, Solver, config)
