"""How sure a success rate is, and the difference of two policies on the same episodes."""

from collections.abc import Iterator, Mapping, Sequence
from math import hypot, sqrt
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import t

from atlas_wm.runs.results import EpisodeResult, EvaluationResult, Half, PolicyResult

RESAMPLES = 1000
Z = 1.96
Interval = tuple[float, float]
Share = tuple[float | None, float | None, float | None]  # in percent, with the ends of its interval


def wilson(percent: float | None, count: float) -> Share:
    """A share of ``count`` in percent, with the ends of its 95 % interval."""
    if percent is None or not count:
        return None, None, None
    z, p = Z, percent / 100
    centre = (p + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z * sqrt(p * (1 - p) / count + (z / (2 * count)) ** 2) / (1 + z**2 / count)
    return percent, 100 * (centre - half), 100 * (centre + half)


def success_interval(results: Sequence[EvaluationResult]) -> Share:
    """Of the models of one condition, in percent, with the ends of its 95 % interval: over runs and demonstrations,
    or over the demonstrations of a single run."""
    models, leave_out_solved = [result.model for result in results], results[0].protocol.leave_out_solved
    if over_runs := success_over_runs(models, leave_out_solved):
        return mean(rate for m in models if (rate := m.success_mean) is not None), *over_runs
    counted = [(e.episode, e.success) for model in models for _, e in _counted(model, leave_out_solved)]
    return clustered_wilson(*np.array(counted).T) if counted else (None, None, None)


def clustered_wilson(demonstration: np.ndarray, success: np.ndarray) -> Share:
    """The share of successes in percent, with Wilson's interval for as many independent episodes as tell as much:
    those of one demonstration overlap and fail together.

    demonstration, success: (N,). That number has the variance of the share over demonstrations; it is smaller where
    these are few, as their variance is uncertain, but never below what they are worth if the episodes of each end
    alike, which is their number if they have equally many.
    """
    share, (_, cluster) = float(success.mean()), np.unique(demonstration, return_inverse=True)
    sums, total = np.bincount(cluster, success - share), len(success)  # (K,)
    least = independent = total**2 / np.square(np.bincount(cluster)).sum()
    if len(sums) > 1 and 0 < share < 1:
        variance = max(np.square(sums).sum() / total**2, 1e-12)
        independent = max(least, share * (1 - share) / variance / _few(len(sums)) ** 2)
    return wilson(100 * share, min(total, independent))


def _few(count: int) -> float:
    """How much wider an interval is because its variance is known from ``count`` demonstrations: 1.02 for 100."""
    return float(t.ppf(0.975, count - 1)) / Z * sqrt(count / (count - 1))


def with_seeds(value: float, by_run: Sequence[float], low: float, high: float) -> Interval:
    """The 95 % interval of a mean over runs, for other training seeds and other demonstrations.

    ``by_run``: the value of each run, at least two; ``low``, ``high``: of their mean, over demonstrations alone. On
    each side the root of two squares: of this distance, and of the half width of the t interval of the runs, n − 1
    degrees of freedom. Runs that agree leave the first, countless demonstrations the second.
    """
    half = float(t.ppf(0.975, len(by_run) - 1)) * stdev(by_run) / sqrt(len(by_run))
    return value - hypot(half, value - low), value + hypot(half, high - value)


def success_over_runs(runs: Sequence[PolicyResult], leave_out_solved: bool, half: Half = "") -> Interval | None:
    """The 95 % interval of the mean success of several runs, in percent; None for one."""
    rates = [rate for run in runs if (rate := run.rates(half).mean) is not None]
    counted = [
        np.array([(e.episode, e.success) for _, e in _counted(run, leave_out_solved) if half in ("", _half(e))])
        for run in runs
    ]
    outcomes = [each for each in counted if len(each)]
    if len(rates) < 2:
        return None
    value = mean(rates)
    low, high = _over_demonstrations(outcomes) if outcomes else (value, value)
    low, high = with_seeds(value, rates, low, high)
    return max(low, 0.0), min(high, 100.0)


def _possible(low: float, high: float) -> Interval:
    """Ends of a difference."""
    return max(low, -100.0), min(high, 100.0)


class Difference(NamedTuple):
    """In success, in points of percent. ``low`` and ``high`` are of a bootstrap over demonstrations: the episodes
    of one demonstration overlap and fail together, in all runs. They hold for these runs; ``seeds_low`` and
    ``seeds_high`` for other training seeds, too (:func:`with_seeds`)."""

    points: float
    low: float
    high: float
    seeds_low: float | None  # None for one pair of runs
    seeds_high: float | None
    won: int  # episodes that only the first policy solves
    lost: int  # that only the second does
    by_run: tuple[float, ...]  # points of each pair of runs

    @property
    def interval(self) -> Interval:
        """With training seeds, if there are several."""
        if self.seeds_low is None or self.seeds_high is None:
            return self.low, self.high
        return self.seeds_low, self.seeds_high

    @property
    def text(self) -> str:
        low, high = self.interval
        return f"{self.points:+.1f} [{low:+.1f}, {high:+.1f}]"

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
    change = np.concatenate(outcomes)[:, 1]  # −1, 0 or 1
    points, (low, high) = 100 * float(change.mean()), _possible(*_over_demonstrations(outcomes))
    by_run = tuple(100 * float(each[:, 1].mean()) for each in outcomes)
    seeds_low, seeds_high = None, None
    if len(by_run) > 1:
        seeds_low, seeds_high = _possible(*with_seeds(points, by_run, low, high))
    won, lost = int((change > 0).sum()), int((change < 0).sum())
    return Difference(points, low, high, seeds_low, seeds_high, won, lost, by_run)


def _over_demonstrations(outcomes: Sequence[np.ndarray]) -> Interval:
    """The 95 % interval of the mean, in percent, of a bootstrap that draws demonstrations, with their episodes in
    all runs. outcomes: of each run, (n, 2): demonstration and value. Where all demonstrations agree, which says
    little if they are few, it is as far off as Wilson's for as many successes in a row."""
    demonstration, value = np.concatenate(outcomes).T
    _, cluster = np.unique(demonstration, return_inverse=True)
    sums, counts = np.bincount(cluster, value), np.bincount(cluster)
    drawn = np.random.default_rng(0).integers(len(counts), size=(RESAMPLES, len(counts)))
    low, high = np.percentile(100 * sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1), [2.5, 97.5])
    if low == high:
        _, least, _ = wilson(100.0, len(counts))
        off = 100 - (least or 0.0)
        return float(low) - off, float(high) + off
    centre = 100 * value.mean()
    low, high = centre + _few(len(counts)) * (np.array([low, high]) - centre)
    return float(low), float(high)


def _outcomes(first: EvaluationResult, second: EvaluationResult) -> np.ndarray:
    """(n, 2): the demonstration of each common episode, and the success of the first less that of the second."""
    mine, theirs = (
        {(seed, e.row): e for seed, e in _counted(result.model, result.protocol.leave_out_solved)}
        for result in (first, second)
    )
    common = [(e.episode, e.success - theirs[key].success) for key, e in mine.items() if key in theirs]
    return np.array(common, dtype=np.int64).reshape(-1, 2)


def _half(episode: EpisodeResult) -> Half:
    return "ood" if episode.ood else "id"


def _counted(policy: PolicyResult, leave_out_solved: bool) -> Iterator[tuple[str, EpisodeResult]]:
    """The episodes that success rates count, each with its evaluation seed."""
    for seed, episodes in policy.episodes.items():
        for episode in episodes:
            if not (leave_out_solved and episode.solved_at_start):
                yield seed, episode
