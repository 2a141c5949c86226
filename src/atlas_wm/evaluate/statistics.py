"""Success rates over the episodes of one policy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import numpy as np
from scipy.stats import mannwhitneyu

from atlas_wm.runs.results import EpisodeRecord, EpisodeResult, PolicyResult

FEWEST = 10  # failures, and successes, of an AUROC that an evaluation reports
Episodes = dict[str, list[EpisodeResult]]  # by evaluation seed


def summarise(
    records: Mapping[int, Sequence[EpisodeRecord]],
    novelty: Mapping[int, Mapping[int, tuple[float, bool]]],
    leave_out_solved: bool,
    wall_seconds: float,
    **planning: Any,
) -> PolicyResult:
    """Success in percent per seed and over all seeds, for all episodes and by ID/OOD half, with every record.

    An episode that ended with an error counts as failed; ``errors`` is their number.

    records: by evaluation seed. novelty: by evaluation seed, for each start row its score and whether it is OOD.
    planning: the fields of a policy that plans.
    """
    by_seed: Episodes = {
        str(seed): [
            EpisodeResult(**asdict(e), novelty=novelty[seed][e.row][0], ood=novelty[seed][e.row][1]) for e in mine
        ]
        for seed, mine in records.items()
    }

    def counts(episode: EpisodeResult) -> bool:
        return not (leave_out_solved and episode.solved_at_start)

    episodes = [e for mine in by_seed.values() for e in mine]
    return PolicyResult(
        **_over_seeds("success", by_seed, counts),
        **_over_seeds("success_id", by_seed, lambda e: counts(e) and not e.ood),
        **_over_seeds("success_ood", by_seed, lambda e: counts(e) and e.ood),
        solved_at_start=100 * float(np.mean([e.solved_at_start for e in episodes])),
        success_without_solved=_percent([e.success for e in episodes if not e.solved_at_start]),
        plans=sum(e.plans for e in episodes),
        errors=sum(e.error is not None for e in episodes),
        wall_seconds=wall_seconds,
        episodes=by_seed,
        **planning,
    )


def failure_auroc(result: PolicyResult, number: Literal["remaining", "risk"]) -> float | None:
    """How well a number of the first plan predicts failure, over episodes not solved at the start.

    None with fewer than 10 failures or 10 successes, or where it was not recorded.
    """
    unsolved = [e for mine in result.episodes.values() for e in mine if not e.solved_at_start]
    known = [(value, not e.success) for e in unsolved if (value := getattr(e, number)) is not None]
    failed = np.array([fails for _, fails in known], bool)
    if min(failed.sum(), (~failed).sum()) < FEWEST:
        return None
    return auroc(np.array([value for value, _ in known]), failed)


def auroc(scores: np.ndarray, failed: np.ndarray) -> float | None:
    """The chance that a failed episode scores higher than a successful one; ties count half.

    None if there are no failures, no successes, or a score that is not finite.
    """
    if failed.all() or not failed.any() or not np.isfinite(scores).all():
        return None
    bad, good = scores[failed], scores[~failed]
    return float(mannwhitneyu(bad, good).statistic / (bad.size * good.size))


def _over_seeds(name: str, by_seed: Episodes, counts: Callable[[EpisodeResult], bool]) -> dict[str, Any]:
    """Mean and standard deviation over the seeds of the success of the episodes that count."""
    rates = {seed: _percent([e.success for e in mine if counts(e)]) for seed, mine in by_seed.items()}
    known = [rate for rate in rates.values() if rate is not None]
    return {
        f"{name}_mean": float(np.mean(known)) if known else None,
        f"{name}_std": float(np.std(known)) if known else None,
        f"{name}_by_seed": rates,
    }


def _percent(outcomes: list[bool]) -> float | None:
    return 100 * float(np.mean(outcomes)) if outcomes else None
