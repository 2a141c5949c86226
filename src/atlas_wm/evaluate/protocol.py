"""Draw the start rows of an evaluation."""

import numpy as np

from atlas_wm.config import RunInfo
from atlas_wm.data.clips import held_out_of
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.errors import UserError
from atlas_wm.runs.results import Protocol


def draw_starts(data: EpisodeData, protocol: Protocol, seed: int, run: RunInfo | None = None) -> np.ndarray:
    """Start rows, uniform without replacement over all rows with ``offset`` rows left in their episode, sorted."""
    left = (
        np.repeat(data.lengths, data.lengths)
        - 1
        - (np.arange(len(data.actions)) - np.repeat(data.offsets, data.lengths))
    )
    valid = left >= protocol.offset
    if protocol.part == "heldout":
        if run is None or run.config.train.split == "clips":
            raise UserError(
                "--part heldout needs a run whose split is by episodes or groups (--train.split episodes): "
                "a split by clips holds no episode out"
            )
        if run.data.hash != data.content_hash():
            raise UserError(
                f"--part heldout needs the dataset of the run ({run.data.path}, hash {run.data.hash}); "
                f"{data.path} has hash {data.content_hash()}"
            )
        valid &= np.repeat(held_out_of(run, len(data.lengths)), data.lengths)
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
            f"episode, {protocol.episodes} are wanted: lower --episodes (--queries for `atlas diagnose`) or "
            f"--offset, or collect more"
        )
    return np.sort(np.random.default_rng(seed).choice(rows, protocol.episodes, replace=False))
