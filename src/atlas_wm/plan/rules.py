"""What a candidate costs, and what a search begins with: the paper's rule, and one for which replanning pays.

A plan may be made anew before it is used up. With the cost of its end alone, and that end always as far away, every
new plan may put the arrival off. The rule ``nearest`` lets a plan arrive at any of its steps, and begins with what
the last plan left over, so that a new plan continues the old one where nothing better is found.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from atlas_wm.config import PlanConfig
from atlas_wm.models.predictors import Dynamics
from atlas_wm.models.world_model import WorldModel


def cost(
    config: PlanConfig, model: WorldModel, dynamics: Dynamics, z: Tensor, candidates: Tensor, z_goal: Tensor
) -> Tensor:
    """z and z_goal: (B, …), candidates: (B, S, H, D) → (B, S)"""
    if config.rule == "terminal":  # no step between is needed
        return model.distance(dynamics.terminal(z, candidates), z_goal[:, None])
    return judge(config, model.distance(dynamics.rollout(z, candidates), z_goal[:, None, None]))


def judge(config: PlanConfig, distances: Tensor) -> Tensor:
    """Of the distances d_h = ‖ẑ_h − z_g‖² of the steps of plans, (…, H) → (…): d_H, or the smallest of them."""
    return distances[..., -1] if config.rule == "terminal" else distances.amin(dim=-1)


def starts(config: PlanConfig, action_block: int, rests: Sequence[np.ndarray | None]) -> Tensor:
    """Where the searches of B episodes begin, (B, H, D). rests: blocks the last plan left over, (at most H, D)."""
    start = torch.zeros(len(rests), config.horizon, action_block)
    if config.rule == "nearest":
        for mine, rest in zip(start, rests, strict=True):
            if rest is not None:
                mine[: len(rest)] = torch.from_numpy(rest)
    return start
