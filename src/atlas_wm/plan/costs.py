"""What a candidate costs. Your own cost is a subclass of :class:`Cost` (docs/guides/own-model.md).

A plan may be replaced before it is used up. With ``terminal`` the goal is always a whole horizon away, so every
new plan may postpone the arrival. With ``nearest`` a plan may arrive at any of its steps, and a search starts with
the rest of the last plan, so that a new plan continues the old one unless it finds something better. ``temporal``
does the same with another distance: the model steps that a head of the run expects (models/temporal_head.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atlas_wm.config import PlanConfig
from atlas_wm.errors import UserError
from atlas_wm.models.bank import flat
from atlas_wm.models.predictors import Dynamics
from atlas_wm.models.world_model import WorldModel
from atlas_wm.plugins import build


class Imagined(NamedTuple):
    """S candidates for each of B episodes, and what the model imagines of them. H is the horizon."""

    model: WorldModel
    start: Tensor  # (B, …) latents of the current frames
    goal: Tensor  # (B, …) latents of the goal images
    actions: Tensor  # (B, S, H, frameskip·A) standardised action chunks
    latents: Tensor  # (B, S, H, …) after each chunk; for a cost with ``ends_only`` the last alone: (B, S, 1, …)

    @property
    def distances(self) -> Tensor:
        """Of the latents from the goal, ‖ẑ_h − z_g‖²: (B, S, H), or (B, S, 1)"""
        return self.model.distance(self.latents, self.goal[:, None, None])


class Cost(ABC):
    """What ``plan.cost`` names: built from the plan's config, gives each candidate a number."""

    ends_only = False  # reads only the last latent: the planner may skip those before it
    warm_start = False  # a search starts with the unused rest of the last plan, not at zero

    def __init__(self, config: PlanConfig):
        self.config = config

    def prepare(self, model: WorldModel) -> None:  # noqa: B027
        """Once, before the first search: take what the cost needs of the model besides its latents."""

    @abstractmethod
    def __call__(self, imagined: Imagined) -> Tensor:
        """(B, S): the smaller the better"""

    def distance(self, model: WorldModel, latents: Tensor, goal: Tensor) -> Tensor:
        """Of latents from the goal: (…, …) twice → (…). A plan reports that of its start as ``start_cost``."""
        return model.distance(latents, goal)

    def near(self, model: WorldModel) -> float:
        """The distance within which the agent counts as there; 0 where nothing is known of it.

        Default: how far 99 % of the training latents are at most from their nearest other one. Of patch tokens the
        bank holds the means, whose mean squared distance is at most that of the tokens, so this is a lower bound. A
        cost with its own distance needs its own.
        """
        if model.bank is None or type(self).distance is not Cost.distance:
            return 0.0
        square = float(model.bank.spacing.quantile(0.99)) ** 2
        return square if model.projector is not None else square / model.config.latent_shape[-1]


class Terminal(Cost):
    """‖ẑ_H − z_g‖², the paper's."""

    ends_only = True

    def __call__(self, imagined: Imagined) -> Tensor:
        return imagined.distances[..., -1]


class Nearest(Cost):
    """min_h ‖ẑ_h − z_g‖²"""

    warm_start = True

    def __call__(self, imagined: Imagined) -> Tensor:
        return imagined.distances.amin(dim=-1)


class Temporal(Cost):
    """min_h D(ẑ_h, z_g) + JUMP Σ_{i≤h} (d(ẑ_{i−1}, ẑ_i) − FASTEST)⁺, where d and D count model steps: d is that of
    the temporal head, D its mean with the latent distance.

    The sum makes plans dear in which the model jumps, such as through a wall: by the triangle inequality, who comes
    nearer to the goal than time allows has jumped. The paper's bounds do not cover this cost.
    """

    warm_start = True
    FASTEST = 2.0  # steps of the demonstrations that one step of a plan may be worth
    JUMP = 1.5

    def prepare(self, model: WorldModel) -> None:
        if model.temporal_head is None:
            raise UserError(
                "plan.cost temporal needs a temporal head, and this model has none: `atlas head RUN` adds one to a "
                "run folder, for its final weights; plan.cost nearest needs none"
            )
        self.head = model.temporal_head.to(next(model.parameters()).device)
        self.latent_axes = len(model.config.latent_shape)

    def __call__(self, imagined: Imagined) -> Tensor:
        points = [self._points(z) for z in (imagined.start, imagined.goal[:, None, None], imagined.latents)]
        start, goal, path = (self.head.embed(p) for p in points)
        first = start[:, None, None].expand_as(path[:, :, :1])
        steps = self.head.between(torch.cat([first, path[:, :, :-1]], dim=2), path)  # (B, S, H)
        jumps = (steps - self.FASTEST).relu().cumsum(dim=-1)
        left = (self.head.between(path, goal) + self.head.straight(points[2], points[1])) / 2
        return (left + self.JUMP * jumps).amin(dim=-1)

    def distance(self, model: WorldModel, latents: Tensor, goal: Tensor) -> Tensor:
        return self.head.distance(self._points(latents), self._points(goal))

    def near(self, model: WorldModel) -> float:
        return 1.0  # model step

    def _points(self, latents: Tensor) -> Tensor:
        if self.head.mean.device != latents.device:  # the model was moved
            self.head = self.head.to(latents.device)
        return flat(latents, latents.ndim - self.latent_axes)


COSTS: dict[str, type[Cost]] = {"terminal": Terminal, "nearest": Nearest, "temporal": Temporal}


def make_cost(config: PlanConfig, model: WorldModel) -> Cost:
    cost = build("planning cost", config.cost, COSTS, Cost, config)
    cost.prepare(model)
    return cost


def candidate_costs(
    cost: Cost, model: WorldModel, dynamics: Dynamics, z: Tensor, candidates: Tensor, z_goal: Tensor
) -> Tensor:
    """z and z_goal: (B, …), candidates: (B, S, H, D) → (B, S)"""
    if cost.ends_only:
        latents = dynamics.terminal(z, candidates)[:, :, None]
    else:
        latents = dynamics.rollout(z, candidates)
    costs = cost(Imagined(model, z, z_goal, candidates, latents))
    if costs.shape != candidates.shape[:2]:
        shapes = f"{tuple(costs.shape)}, not (episodes, candidates) = {tuple(candidates.shape[:2])}"
        raise UserError(f"planning cost {type(cost).__name__} returned shape {shapes}")
    return costs


def plan_costs(cost: Cost, model: WorldModel, z: Tensor, mean: Tensor, latents: Tensor, z_goal: Tensor) -> Tensor:
    """Of one plan each: mean (B, H, D), latents (B, H, …) → (B,)"""
    read = latents[:, -1:] if cost.ends_only else latents
    return cost(Imagined(model, z, z_goal, mean[:, None], read[:, None]))[:, 0]


def starts(cost: Cost, action_chunk: int, rests: Sequence[np.ndarray | None]) -> Tensor:
    """Where the searches of B episodes start, (B, H, D). rests: unused chunks of the last plans, (at most H, D)."""
    start = torch.zeros(len(rests), cost.config.horizon, action_chunk)
    if cost.warm_start:
        for mine, rest in zip(start, rests, strict=True):
            if rest is not None:
                mine[: len(rest)] = torch.from_numpy(rest)
    return start
