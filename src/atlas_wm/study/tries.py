"""Which try of each method has the best planning score: its weight is that of the runs."""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atlas_wm.errors import UserError
from atlas_wm.runs.files import write_atomically
from atlas_wm.runs.folder import METRICS
from atlas_wm.study.records import Records
from atlas_wm.study.schedule import OVER, Progress, progress_of
from atlas_wm.study.study import Study
from atlas_wm.study.tuning import Tuned, all_tuned, weights
from atlas_wm.study.units import TUNING, Unit, units_of


@dataclass(frozen=True)
class Try:
    of: Tuned
    factor: float
    weights: Mapping[str, float]
    state: str
    score: float | None
    minutes: float
    chosen: bool

    @property
    def row(self) -> dict[str, Any]:
        weights = ", ".join(f"{name} {weight:g}" for name, weight in self.weights.items())
        facts = {"factor": self.factor, "weights": weights, "state": self.state, "score": self.score}
        return self.of._asdict() | facts | {"minutes": round(self.minutes, 2), "chosen": self.chosen}


def start(study: Study, out: Path, records: Records) -> dict[str, Progress]:
    """What is done of a study and what has to run."""
    progress = progress_of(units_of(study, out).values(), records)
    chosen = _choices(read_tries(study, progress))
    return progress_of(units_of(study, out, chosen).values(), records) if chosen else progress


def after_tries(study: Study, out: Path, progress: Mapping[str, Progress]) -> dict[str, Unit]:
    """The units with the weights that are known now. Writes the table of tries."""
    tries = read_tries(study, progress)
    if tries:
        with write_atomically(out / TUNING) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(tries[0].row))
            writer.writeheader()
            writer.writerows(one.row for one in tries)
    return units_of(study, out, _choices(tries))


def read_tries(study: Study, progress: Mapping[str, Progress]) -> list[Try]:
    """Every try, and which are chosen: the best of those that finished, once all are over."""
    found = []
    for one in all_tuned(study):
        units = {factor: progress[f"try {one.try_name(factor)}"] for factor in study.tries}
        scores = {f: last_score(p.unit.makes.parent) for f, p in units.items() if p.state == "done"}
        known = {factor: score for factor, score in scores.items() if score is not None}
        over = all(p.state in OVER for p in units.values())
        if over and scores and not known:
            raise UserError(
                f"no try of {one.method} on {one.task} has a planning score, by which weights are chosen: "
                f"collect episodes longer than plan.horizon action chunks, or leave {one.recipe} out"
            )
        best = max(known, key=lambda factor: known[factor]) if over and known else None
        for factor, p in units.items():
            tried, score = weights(study, one, factor), known.get(factor)
            found.append(Try(one, factor, tried, p.state, score, p.seconds / 60, chosen=factor == best))
    return found


def _choices(tries: Sequence[Try]) -> dict[Tuned, float]:
    return {one.of: one.factor for one in tries if one.chosen}


def last_score(run: Path) -> float | None:
    """Of the last validation, on held-out episodes; None where episodes are too short for a planning score."""
    with (run / METRICS).open(newline="") as file:
        scores = [float(row["val_score"]) for row in csv.DictReader(file) if row.get("val_score")]
    return scores[-1] if scores and math.isfinite(scores[-1]) else None
