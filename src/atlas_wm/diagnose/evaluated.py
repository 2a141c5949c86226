"""The episodes of a run's evaluation: two diagnostics look at them again."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from atlas_wm.config import PlanConfig
from atlas_wm.errors import UserError
from atlas_wm.runs.results import EpisodeResult, EvaluationResult, read_results


@dataclass(frozen=True)
class Evaluated:
    """One evaluation seed at one offset."""

    seed: int
    budget: int
    plan: PlanConfig
    precision: str  # as --precision has it
    plain: bool
    episodes: list[EpisodeResult]

    @property
    def key(self) -> str:
        """Another one if anything went, or was planned, otherwise."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def find_evaluated(run: Path, offset: int, data: str, beside: Sequence[Path] = ()) -> Evaluated | None:
    """The first seed of the run's largest evaluation at this offset on the dataset with this hash.

    Where runs are compared (``beside``), it is the largest that all of them have. Among equals the paper's counts:
    its budget, starts from all episodes, none of them left out; then the newest.
    """
    fitting = _fitting(run, offset, data)
    if not fitting:
        return None
    others = [found for other in beside if (found := _fitting(other, offset, data))]
    shared = [r for r in fitting if all(r.protocol in [o.protocol for o in other] for other in others)]

    def fits(result: EvaluationResult) -> tuple[int, bool, bool, bool, str]:
        p = result.protocol
        return p.episodes, p.budget == offset + 25, p.part == "all", not p.leave_out_solved, result.written

    best = max(shared or fitting, key=fits)
    seed = best.protocol.seeds[0]
    # What an environment failed over says nothing about the model.
    episodes = [e for e in best.model.episodes[str(seed)] if e.error is None]
    precision = best.precision if best.precision in ("bf16", "float32") else "auto"
    return Evaluated(seed, best.protocol.steps, best.plan, precision, bool(best.plain), episodes)


def _fitting(run: Path, offset: int, data: str) -> list[EvaluationResult]:
    """Of the final weights, which the diagnostics look at."""
    results = [r for r in read_results(run).values() if r.weights is None]
    return [r for r in results if r.protocol.offset == offset and r.data.hash == data and r.task == r.trained_task]


def evaluated(run: Path, offset: int, data: str, beside: Sequence[Path] = ()) -> Evaluated:
    found = find_evaluated(run, offset, data, beside)
    if found is None:
        raise UserError(
            f"{run} has no evaluation at offset {offset} on this dataset: "
            f"run `atlas eval {run} --offset {offset}` first"
        )
    return found
