"""Demonstrations to start a search from: those that began near the current latent and came near the goal."""

import torch
from torch import Tensor

from atlas_wm.config import PlanConfig
from atlas_wm.errors import UserError
from atlas_wm.models.bank import flat
from atlas_wm.models.world_model import WorldModel

NEAREST = 64  # starts that are ranked, also by how near they come to the goal
MOST_PROPOSALS = 16  # retrieved sequences that compete as candidates
NONE = -1  # no group of demonstrations, which are numbered from 0


class Retrieval:
    """``retrieval(z, z_goal, left_out)``: action sequences of demonstrations, the best match first.

    Of all points with ``horizon`` action chunks after them, the ``NEAREST`` to z are ranked by ‖x_0 − z‖² +
    ‖x_h − z_g‖², where h is the horizon (``ends_only``), or the step that comes nearest to the goal. Over all
    points this sum would give up the start for a far goal.

    Demonstrations of one group are left out together. At first every episode is a group of its own, with its number
    in the dataset.
    """

    def __init__(self, model: WorldModel, config: PlanConfig, ends_only: bool):
        known, horizon = model.demonstrations, config.horizon
        if known is None:
            raise UserError(
                "plan.start retrieval needs demonstrations, and this model has none: `atlas bank RUN` adds them to "
                "a run folder, for its final weights; plan.start zero needs none"
            )
        complete = known.episodes[horizon:] == known.episodes[:-horizon]
        if not complete.any():
            raise UserError(
                f"plan.start retrieval: no stored demonstration has plan.horizon {horizon} action chunks: lower "
                f"the horizon, or use plan.start zero"
            )
        device = next(model.parameters()).device
        points = known.points.float()
        self.centre = points.mean(dim=0).to(device)  # subtracted, so that products do not round distances away
        self.points = points.to(device) - self.centre  # (M, m)
        self.squares = self.points.square().sum(dim=1)
        self.actions = known.actions.to(device)
        self.starts = complete.nonzero()[:, 0].to(device)  # (N,) which points have a whole sequence after them
        self.groups = self.episodes = known.episodes.to(device)[self.starts]  # (N,)
        self.chunks = torch.arange(horizon, device=device)
        self.compared = self.chunks[-1:] + 1 if ends_only else self.chunks + 1  # chunks after a start
        self.nearest = min(NEAREST, len(self.starts))
        self.count = min(MOST_PROPOSALS, config.candidates - 1, self.nearest)

    def group_by(self, groups: Tensor) -> None:
        """groups: (E,) int64, the group of each episode of the dataset. Before the first search."""
        if not 0 <= int(self.episodes.min()) <= int(self.episodes.max()) < len(groups):
            raise UserError(
                f"the stored demonstrations name episodes that the dataset, of {len(groups)}, does not have: "
                f"`atlas bank RUN` writes them again"
            )
        self.groups = groups.to(self.episodes.device)[self.episodes]

    def __call__(self, z: Tensor, z_goal: Tensor, left_out: Tensor | None = None) -> Tensor:
        """(B, …) twice → (B, count, H, frameskip·A)

        left_out: (B,) int64, the group of demonstrations that each episode must not retrieve, or NONE. Where fewer
        than ``count`` sequences remain, zero stands for the others.
        """
        queries = flat(torch.cat([z, z_goal])).float() - self.centre
        distances = self.squares - 2 * queries @ self.points.T  # ‖x − q‖² less ‖q‖², the same for all x
        from_start, from_goal = distances.split(len(z))
        from_start = from_start[:, self.starts]
        if left_out is not None:
            from_start = from_start.masked_fill(self.groups == left_out[:, None], torch.inf)
        near = from_start.topk(self.nearest, dim=1, largest=False)
        starts = self.starts[near.indices]  # (B, nearest)
        later = starts[..., None] + self.compared
        gaps = from_goal.gather(1, later.flatten(1)).unflatten(1, later.shape[1:]).amin(dim=-1)
        best = (near.values + gaps).topk(self.count, dim=1, largest=False)
        found = self.actions[starts.gather(1, best.indices)[..., None] + self.chunks]
        return found.masked_fill(best.values.isposinf()[..., None, None], 0)

    def proposals(self, start: Tensor, z: Tensor, z_goal: Tensor, left_out: Tensor | None = None) -> Tensor:
        """The start without retrieval, and the retrieved sequences: (B, 1 + count, H, D)"""
        return torch.cat([start[:, None], self(z, z_goal, left_out)], dim=1)


def cheapest(costs: Tensor, candidates: Tensor) -> Tensor:
    """Of S candidates for each of B episodes: (B, S) and (B, S, H, D) → (B, H, D)"""
    return candidates.take_along_dim(costs.argmin(dim=1)[:, None, None, None], dim=1)[:, 0]
