"""The cross-entropy method: refine a Gaussian over action sequences toward the cheapest ones."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atlas_wm.config import PlanConfig


class Solution(NamedTuple):
    mean: Tensor  # (B, H, D) the answer: the final mean
    cost: Tensor  # (B,) mean cost of the last elites
    costs: Tensor  # (iterations, B) the same in each iteration


def cem(
    cost: Callable[[Tensor], Tensor], start: Tensor, config: PlanConfig, rngs: Sequence[torch.Generator]
) -> Solution:
    """Minimise ``cost``, (B, S, H, D) → (B, S), for B = len(rngs) episodes at once.

    Starts from N(start, 1), start: (B, H, D), 0 in the paper; candidate 0 is always the current mean; mean and
    deviation of the elites are the next distribution. Episode b draws all its noise from rngs[b], so it does not
    matter who shares its batch.
    """
    shape = (config.candidates, *start.shape[1:])
    mean, std = start, torch.ones_like(start)
    costs = []
    for _ in range(config.iterations):
        noise = torch.stack([torch.randn(shape, generator=g) for g in rngs]).to(start.device)
        candidates = mean[:, None] + std[:, None] * noise
        candidates[:, 0] = mean
        cheapest = cost(candidates).topk(config.elites, dim=1, largest=False)
        elites = candidates.gather(1, cheapest.indices[..., None, None].expand(-1, -1, *shape[1:]))
        mean, std = elites.mean(dim=1), elites.std(dim=1)
        costs.append(cheapest.values.mean(dim=1))
    return Solution(mean, costs[-1], torch.stack(costs))
