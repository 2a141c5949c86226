"""How well a model should plan, from recorded episodes alone, without an environment (docs/notes/score.md)."""

from typing import NamedTuple

import torch
from torch import Tensor

from atlas_wm.models.world_model import WorldModel

ROLLOUTS = 2048  # action sequences that are rolled out at once


class Episodes(NamedTuple):
    """Recorded episodes in order, frames one action chunk apart: N frames."""

    z: Tensor  # (N, …)
    actions: Tensor  # (N, frameskip·A) standardised: the chunk after each frame, anything after the last one
    episode: Tensor  # (N,) number of the episode

    def windows(self, chunks: int) -> Tensor:
        """(n,) first frames of all windows of ``chunks`` chunks within an episode."""
        return (self.episode[: max(0, len(self.z) - chunks)] == self.episode[chunks:]).nonzero()[:, 0]


def planning_score(
    model: WorldModel,
    recorded: Episodes,
    horizon: int,
    rng: torch.Generator,
    windows: int = 256,
    others: int = 16,
) -> float:
    """Do the recorded actions bring the model nearer to a goal than other actions do?

    The goal of frame t is a later frame of its episode: ``horizon`` chunks later, which a plan reaches, or twice as
    many, to which it has to make progress. The model imagines ``horizon`` chunks, those recorded after t and those
    recorded after ``others`` random frames. The score is the share of the others that end farther from the goal, by
    the planner's distance: 1 if the recorded actions always look best, 0.5 if the model cannot tell. A mean over at
    most ``windows`` starts for each of the two gaps; over one gap if no episode is long enough for the other, NaN
    without any.
    """
    shares = [
        _nearer(model, recorded, horizon, gap, rng, windows, others)
        for gap in (horizon, 2 * horizon)
        if len(recorded.windows(gap))
    ]
    return sum(shares) / len(shares) if shares else float("nan")


def _nearer(
    model: WorldModel,
    recorded: Episodes,
    horizon: int,
    gap: int,
    rng: torch.Generator,
    windows: int,
    others: int,
) -> float:
    starts, pool = recorded.windows(gap), recorded.windows(horizon)
    starts = starts[torch.randperm(len(starts), generator=rng)[:windows].to(starts.device)]
    drawn = pool[torch.randint(len(pool), (len(starts), others), generator=rng).to(pool.device)]
    steps = torch.arange(horizon, device=starts.device)
    sequences = torch.cat([starts[:, None], drawn], dim=1)[..., None] + steps  # (Q, 1 + others, H) frames
    shares = []
    at_once = max(1, ROLLOUTS // (1 + others))
    for some, rows in zip(starts.split(at_once), sequences.split(at_once), strict=True):
        ends = model.terminal(recorded.z[some], recorded.actions[rows])  # (q, 1 + others, …)
        costs = model.distance(ends, recorded.z[some + gap][:, None])
        mine, theirs = costs[:, :1], costs[:, 1:]
        shares.append(((theirs > mine).float() + (theirs == mine).float() / 2).mean(dim=1))
    return float(torch.cat(shares).mean())


def saturation(model: WorldModel, recorded: Episodes, chunks: int) -> float:
    """Mean distance of frames ``chunks`` apart, as a share of that between frames of different episodes: near 1 the
    distance no longer tells how far away a goal is. NaN without such frames."""
    near = recorded.windows(chunks)
    others = torch.arange(len(recorded.z), device=recorded.z.device).roll(len(recorded.z) // 2)
    apart = (recorded.episode != recorded.episode[others]).nonzero()[:, 0]
    if not len(near) or not len(apart):
        return float("nan")

    def distance(a: Tensor, b: Tensor) -> Tensor:
        return model.distance(recorded.z[a], recorded.z[b]).sqrt().mean()

    return float(distance(near, near + chunks) / distance(apart, others[apart]).clamp_min(1e-12))
