"""How sure a success rate is, and the difference of two policies on the same episodes."""

from collections.abc import Iterator, Mapping
from math import sqrt
from typing import Any, NamedTuple

import numpy as np

from atlas_wm.runs.results import EpisodeResult, EvaluationResult

RESAMPLES = 1000


def wilson(percent: float | None, count: int) -> tuple[float | None, float | None, float | None]:
    """A share of ``count`` in percent, with the ends of its 95 % interval."""
    if percent is None or not count:
        return None, None, None
    z, p = 1.96, percent / 100
    centre = (p + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z * sqrt(p * (1 - p) / count + (z / (2 * count)) ** 2) / (1 + z**2 / count)
    return percent, 100 * (centre - half), 100 * (centre + half)


def success_interval(result: EvaluationResult) -> tuple[float | None, float | None, float | None]:
    """Of the model, in percent, with the ends of its 95 % interval."""
    counted = [episode.success for _, episode in _counted(result)]
    return wilson(100 * sum(counted) / len(counted) if counted else None, len(counted))


class Difference(NamedTuple):
    """In success, in points of percent. The interval is of a bootstrap over demonstrations: episodes of one
    demonstration overlap and fail together."""

    points: float
    low: float
    high: float
    won: int  # episodes that only the first policy solves
    lost: int  # that only the second does
    by_run: tuple[float, ...]  # points of each pair of runs

    @property
    def text(self) -> str:
        return f"{self.points:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"

    @property
    def range_text(self) -> str:
        """Over pairs of runs; empty for one pair."""
        return f"{min(self.by_run):+.1f} to {max(self.by_run):+.1f}" if len(self.by_run) > 1 else ""


def paired(first: Mapping[Any, EvaluationResult], second: Mapping[Any, EvaluationResult]) -> Difference | None:
    """The models with the same key are compared, over the episodes that count for both; None without any."""
    outcomes = [_outcomes(first[key], second[key]) for key in first if key in second]
    outcomes = [each for each in outcomes if len(each)]
    if not outcomes:
        return None
    demonstration, change = np.concatenate(outcomes).T  # (N,) twice; the change is −1, 0 or 1
    _, cluster = np.unique(demonstration, return_inverse=True)
    sums, counts = np.bincount(cluster, change), np.bincount(cluster)
    drawn = np.random.default_rng(0).integers(len(counts), size=(RESAMPLES, len(counts)))
    low, high = np.percentile(100 * sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1), [2.5, 97.5])
    return Difference(
        points=100 * float(change.mean()),
        low=float(low),
        high=float(high),
        won=int((change > 0).sum()),
        lost=int((change < 0).sum()),
        by_run=tuple(100 * float(each[:, 1].mean()) for each in outcomes),
    )


def _outcomes(first: EvaluationResult, second: EvaluationResult) -> np.ndarray:
    """(n, 2): the demonstration of each common episode, and the success of the first less that of the second."""
    mine, theirs = ({(seed, e.row): e for seed, e in _counted(result)} for result in (first, second))
    common = [(e.episode, e.success - theirs[key].success) for key, e in mine.items() if key in theirs]
    return np.array(common, dtype=np.int64).reshape(-1, 2)


def _counted(result: EvaluationResult) -> Iterator[tuple[str, EpisodeResult]]:
    """The model's episodes that success rates count, each with its evaluation seed."""
    for seed, episodes in result.model.episodes.items():
        for episode in episodes:
            if not (result.protocol.leave_out_solved and episode.solved_at_start):
                yield seed, episode
