"""The results of a study: one row for every run and evaluation."""

from collections.abc import Mapping
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from atlas_wm.runs.results import EvaluationResult
from atlas_wm.study.records import results_of
from atlas_wm.study.schedule import Progress
from atlas_wm.study.study import Study
from atlas_wm.study.tries import last_score
from atlas_wm.study.units import RunName


class Evaluated(NamedTuple):
    run: RunName
    file: Path
    result: EvaluationResult


def evaluated(progress: Mapping[str, Progress]) -> list[Evaluated]:
    """What the evaluations of a study that are done have measured, without varied environments. Where the recipe's
    own weight was chosen, the results of a tuned run are those of the other."""
    found = []
    for p in progress.values():
        if p.unit.kind == "eval" and p.state == "done" and p.unit.run is not None:
            unit = p.unit if p.unit.command else progress[p.unit.needs[0]].unit
            found += [Evaluated(p.unit.run, *one) for one in results_of(unit.makes, unit.command).items()]
    return [one for one in found if not one.result.variation]


def study_rows(study: Study, progress: Mapping[str, Progress]) -> list[dict[str, Any]]:
    """Of study.csv: success in percent, in all and by half; steps and time of plans; floor and ceilings."""
    order = [*product(study.tasks, study.recipes)]
    rows = [row(one, progress) for one in evaluated(progress)]
    return sorted(rows, key=lambda r: order.index((r["task"], r["recipe"])))


def row(evaluated: Evaluated, progress: Mapping[str, Progress]) -> dict[str, Any]:
    run, file, result = evaluated
    model, seconds = result.model, result.model.seconds_per_plan
    rates = {name: policy.success_mean for name, policy in result.policies.items() if name != "model"}
    return asdict(run) | {
        "offset": result.protocol.offset,
        "budget": result.protocol.budget,
        "cost": result.plan.cost,
        "start": result.plan.start,
        "replan_every": result.plan.execute,
        "success": _rounded(model.success_mean),
        "id": _rounded(model.success_id_mean),
        "ood": _rounded(model.success_ood_mean),
        "without_solved": _rounded(model.success_without_solved),
        **{name: _rounded(rates.get(name)) for name in ("random", "replay", "oracle")},
        "of_oracle": _rounded(result.share_of_oracle),
        "steps": round(model.steps, 2),
        "ms_per_plan": None if seconds is None else round(1000 * seconds, 2),
        "episodes": model.count,
        "train_minutes": _minutes(progress, "train", run),
        "eval_minutes": _minutes(progress, "eval", run),
        "score": last_score(file.parent.parent),
    }


def _rounded(percent: float | None) -> float | None:
    return None if percent is None else round(percent, 4)


def _minutes(progress: Mapping[str, Progress], kind: str, run: RunName) -> float:
    mine = (p for p in progress.values() if p.unit.kind == kind and p.unit.run == run)
    seconds = (p.seconds if p.unit.command else progress[p.unit.needs[0]].seconds for p in mine)
    return round(sum(seconds) / 60, 2)
