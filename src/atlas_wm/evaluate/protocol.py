"""What is evaluated: which starts, which goals, how long."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from atlas_wm.data.clips import held_out_episodes
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.errors import UserError
from atlas_wm.run_folder import RunInfo


@dataclass(frozen=True)
class Protocol:
    """One condition. Start and goal are two rows of one demonstration, ``offset`` apart."""

    offset: int = 50
    budget: int | None = None
    """Environment steps an episode may take; default offset + 25."""
    episodes: int = 200
    """Episodes for each seed."""
    seeds: tuple[int, ...] = (42, 43, 44, 45, 46)
    part: Literal["all", "heldout"] = "all"
    """Draw from all episodes, as the paper does, or only from those that training never saw."""
    leave_out_solved: bool = False
    """Leave episodes that are solved at the start out of the success rates (their records stay)."""

    def __post_init__(self) -> None:
        if self.offset < 1 or self.episodes < 1 or not self.seeds or (self.budget is not None and self.budget < 1):
            raise UserError("--offset, --budget and --episodes must be at least 1, and --seeds not empty")

    @property
    def steps(self) -> int:
        return self.offset + 25 if self.budget is None else self.budget

    @property
    def name(self) -> str:
        unsolved = "_unsolved" if self.leave_out_solved else ""
        return f"{self.part}_offset{self.offset}_budget{self.steps}{unsolved}"


def training_rows(data: EpisodeData, run: RunInfo) -> np.ndarray:
    """Rows of the episodes a run was trained on: all of them unless it held whole episodes of this dataset out."""
    if run.config.train.split != "episodes" or run.data.hash != data.content_hash():
        return np.arange(len(data.actions))
    return np.flatnonzero(~np.repeat(held_out_episodes(len(data.lengths), run.config.train), data.lengths))


def draw_starts(data: EpisodeData, protocol: Protocol, seed: int, run: RunInfo | None = None) -> np.ndarray:
    """Start rows: uniform without replacement over all rows with ``offset`` rows left, sorted."""
    left = (
        np.repeat(data.lengths, data.lengths)
        - 1
        - (np.arange(len(data.actions)) - np.repeat(data.offsets, data.lengths))
    )
    valid = left >= protocol.offset
    if protocol.part == "heldout":
        if run is None or run.config.train.split != "episodes":
            raise UserError(
                "--part heldout needs a run whose split is by episodes (--train.split episodes): "
                "a split by clips holds no episode out"
            )
        if run.data.hash != data.content_hash():
            raise UserError(
                f"--part heldout needs the dataset of the run ({run.data.path}, hash {run.data.hash}); "
                f"{data.path} has hash {data.content_hash()}"
            )
        valid &= np.repeat(held_out_episodes(len(data.lengths), run.config.train), data.lengths)
    rows = np.flatnonzero(valid)
    if len(rows) < protocol.episodes:
        longest = int(data.lengths.max(initial=0))
        if protocol.offset >= longest:
            raise UserError(
                f"{data.path}: the longest episode has {longest} rows, too few for --offset {protocol.offset}: "
                f"lower --offset, or collect longer demonstrations"
            )
        raise UserError(
            f"only {len(rows)} rows of {data.path} ({protocol.part}) have {protocol.offset} rows left in their "
            f"episode, {protocol.episodes} are wanted: lower --episodes or --offset, or collect more"
        )
    return np.sort(np.random.default_rng(seed).choice(rows, protocol.episodes, replace=False))
