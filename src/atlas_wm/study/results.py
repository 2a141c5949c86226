"""The results of a study: one row for every run and evaluation."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from atlas_wm.runs.results import FOLDER, EvaluationResult, read_results
from atlas_wm.study.schedule import Progress
from atlas_wm.study.study import Study
from atlas_wm.study.tries import last_score
from atlas_wm.study.units import RunName


def evaluated_runs(progress: Mapping[str, Progress], task: str, recipe: str) -> dict[Path, RunName]:
    """By folder. Where the recipe's own weight was chosen, that of a tuned run is the folder of the other."""
    trained = [p.unit for p in progress.values() if p.unit.kind == "train"]
    folders = {unit.makes.parent: unit.run for unit in trained if unit.run and unit.run.recipe == recipe}
    return {folder: run for folder, run in folders.items() if run.task == task and (folder / FOLDER).exists()}


def plain_results(folder: Path) -> list[EvaluationResult]:
    """Without those of varied environments."""
    return [result for result in read_results(folder).values() if not result.variation]


def study_rows(study: Study, progress: Mapping[str, Progress]) -> list[dict[str, Any]]:
    """Of study.csv: success in percent, in all and by half; steps and time of plans; floor and ceilings."""
    return [
        row(run, result, last_score(folder), progress)
        for task in study.tasks
        for recipe in study.recipes
        for folder, run in evaluated_runs(progress, task, recipe).items()
        for result in plain_results(folder)
    ]


def row(
    run: RunName, result: EvaluationResult, score: float | None, progress: Mapping[str, Progress]
) -> dict[str, Any]:
    model, seconds = result.model, result.model.seconds_per_plan
    rates = {name: policy.success_mean for name, policy in result.policies.items() if name != "model"}
    return asdict(run) | {
        "offset": result.protocol.offset,
        "budget": result.protocol.budget,
        "cost": result.plan.cost,
        "start": result.plan.start,
        "replan_every": result.plan.execute,
        "success": model.success_mean,
        "id": model.success_id_mean,
        "ood": model.success_ood_mean,
        "without_solved": model.success_without_solved,
        **{name: rates.get(name) for name in ("random", "replay", "oracle")},
        "of_oracle": result.share_of_oracle,
        "steps": round(model.steps, 2),
        "ms_per_plan": None if seconds is None else round(1000 * seconds, 2),
        "episodes": model.count,
        "train_minutes": _minutes(progress, "train", run),
        "eval_minutes": _minutes(progress, "eval", run),
        "score": score,
    }


def _minutes(progress: Mapping[str, Progress], kind: str, run: RunName) -> float:
    mine = (p for p in progress.values() if p.unit.kind == kind and p.unit.run == run)
    seconds = (p.seconds if p.unit.command else progress[p.unit.needs[0]].seconds for p in mine)
    return round(sum(seconds) / 60, 2)
