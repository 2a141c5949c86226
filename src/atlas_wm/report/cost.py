"""What a run took: its training steps, and the commands of the study that trained and evaluated it."""

import math
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from atlas_wm.errors import UserError
from atlas_wm.report.runs import Run
from atlas_wm.runs.files import read_json
from atlas_wm.runs.results import EvaluationResult

UNITS = "units"  # of a study's folder: a record of each of its commands


def minutes(runs: Sequence[Run], condition: str) -> dict[str, float | None]:
    """Means over runs; None: not known. ``steps_minutes``: of training steps alone. ``commands_minutes``: of the
    study's commands, training with its start and validations, and the evaluation of this condition."""
    steps = [m for run in runs if (m := step_minutes(run)) is not None]
    here = [(run, run.evaluations[condition].result) for run in runs if condition in run.evaluations]
    commands = [m for run, result in here if (m := command_minutes(run.folder, result)) is not None]
    return {
        "steps_minutes": round(mean(steps), 2) if steps else None,
        "commands_minutes": round(mean(commands), 2) if commands and len(commands) == len(here) else None,
    }


def step_minutes(run: Run) -> float | None:
    """By the speed in metrics.csv."""
    batch = run.config["config"]["train"].get("batch")
    steps, speeds = run.metrics.get("clips_per_second", ([], []))
    if not isinstance(batch, int) or not speeds or not all(speed > 0 for speed in speeds):
        return None
    taken = (b - a for a, b in pairwise([0.0, *steps]))
    return sum(count * batch / speed for count, speed in zip(taken, speeds, strict=True)) / 60


def command_minutes(folder: Path, result: EvaluationResult) -> float | None:
    """All attempts of the commands that are done, by the records of the study in whose folder the run lies:
    training, the temporal head if the plans use it and training did not fit it, and the evaluation."""
    name = re.sub(r"[^A-Za-z0-9._+=-]+", "_", folder.name)  # as the study names the files
    units = folder.parent / UNITS
    trained = list(_records(units, f"train_{name}.json"))
    of_evaluations = _records(units, f"eval_{name}_*.json")
    tested = [record for record in of_evaluations if record["command"] == [*result.command]]
    head_apart = result.temporal_head is not None and (units / f"head_{name}.json").exists()
    fitted = list(_records(units, f"head_{name}.json")) if head_apart else []
    if not trained or not tested or (head_apart and not fitted):
        return None
    return sum(float(record["seconds"]) for record in (trained[0], tested[0], *fitted)) / 60


def _records(folder: Path, pattern: str) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob(pattern)):
        try:
            record = read_json(path)
            known = record["state"] == "done" and 0 <= record["seconds"] < math.inf and record["command"]
        except (UserError, LookupError, TypeError):  # damaged: what it took is not known
            continue
        if known:
            yield record
