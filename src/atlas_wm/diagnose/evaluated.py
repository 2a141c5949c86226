"""The evaluated episodes of a run that probe, cases and imagined use."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from atlas_wm.config import PlanConfig
from atlas_wm.errors import UserError
from atlas_wm.runs.results import EpisodeResult, EvaluationResult, Protocol, read_results


@dataclass(frozen=True)
class Evaluated:
    """One evaluation seed at one offset."""

    seed: int
    budget: int
    plan: PlanConfig
    precision: str  # a value of --precision
    plain: bool
    episodes: list[EpisodeResult]

    @property
    def key(self) -> str:
        """A hash of all fields."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def find_evaluated(run: Path, offset: int, data: str, compared: Sequence[Path] = ()) -> Evaluated | None:
    """The first seed of the run's largest evaluation at this offset on the dataset with this hash.

    If runs are compared, it is the largest that all of them have, with the same planner if there is one. Ties go to
    the paper's protocol (its budget, starts from all episodes, none left out), then to the newest.
    """
    return _largest(_matching(run, offset, data), [_matching(other, offset, data) for other in compared], offset)


def find_each_evaluated(runs: Sequence[Path], offset: int, data: str) -> list[Evaluated | None]:
    """The same for each of the runs, compared with the others. The files are read once."""
    matching = [_matching(run, offset, data) for run in runs]
    return [_largest(candidates, matching, offset) for candidates in matching]


def _largest(
    candidates: list[EvaluationResult], compared: list[list[EvaluationResult]], offset: int
) -> Evaluated | None:
    if not candidates:
        return None
    everyone = [results for results in (candidates, *compared) if results]

    def shared(what: Callable[[EvaluationResult], object]) -> list[EvaluationResult]:
        return [r for r in candidates if all(what(r) in map(what, results) for results in everyone)]

    def preference(result: EvaluationResult) -> tuple[Any, ...]:
        p, own = result.protocol, _protocol_and_plan(result)
        usual = p.budget == offset + 25, p.part == "all", not p.leave_out_solved
        # Over all runs: by its own times, each could choose another planner.
        newest = max(r.written for results in everyone for r in results if _protocol_and_plan(r) == own)
        return p.episodes, *usual, newest, repr(own), result.written

    best = max(shared(_protocol_and_plan) or shared(lambda r: r.protocol) or candidates, key=preference)
    seed = best.protocol.seeds[0]
    # An error of the environment says nothing about the model.
    episodes = [e for e in best.model.episodes[str(seed)] if e.error is None]
    precision = best.precision if best.precision in ("bf16", "float32") else "auto"
    return Evaluated(seed, best.protocol.steps, best.plan, precision, bool(best.plain), episodes)


def _protocol_and_plan(result: EvaluationResult) -> tuple[Protocol, PlanConfig]:
    return result.protocol, replace(result.plan, candidate_chunk=None)  # which bounds memory


def _matching(run: Path, offset: int, data: str) -> list[EvaluationResult]:
    """Of the final weights in the plain environment, which the diagnostics measure."""
    results = [r for r in read_results(run).values() if r.weights is None and not r.variation]
    return [r for r in results if r.protocol.offset == offset and r.data.hash == data and r.task == r.trained_task]


def evaluated(run: Path, offset: int, data: str, compared: Sequence[Path] = ()) -> Evaluated:
    found = find_evaluated(run, offset, data, compared)
    if found is None:
        raise UserError(
            f"{run} has no evaluation at offset {offset} on this dataset: "
            f"run `atlas eval {run} --offset {offset}` first"
        )
    return found
