"""The commands that a study takes, each with what it needs and a key that changes when its result would."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from atlas_wm.recipes import recipe_config
from atlas_wm.settings import to_dict
from atlas_wm.study.study import Evaluation, Study

Kind = Literal["collect", "train", "eval", "diagnose", "report"]


@dataclass(frozen=True)
class Unit:
    name: str
    kind: Kind
    command: tuple[str, ...]  # arguments of atlas
    makes: Path  # exists when it is done
    needs: tuple[str, ...]  # names of units
    key: str  # of the settings and of what it needs: another key, another result
    run: "RunName | None" = None


@dataclass(frozen=True)
class RunName:
    task: str
    method: str
    recipe: str
    seed: int


def units_of(study: Study, out: Path) -> dict[str, Unit]:
    """By name, in an order in which each stands after what it needs."""
    units: dict[str, Unit] = {}

    def add(
        name: str, kind: Kind, command: Sequence[str], makes: Path, needs: Sequence[str] = (), **facts: Any
    ) -> str:
        run = facts.pop("run", None)
        content = [kind, command, facts, [units[need].key for need in needs]]
        key = hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()[:16]
        units[name] = Unit(name, kind, tuple(command), makes, tuple(needs), key, run)
        return name

    runs: dict[RunName, Path] = {run: out / folder for run, folder in run_folders(study).items()}
    data, collected = dict[str, Path](), dict[str, list[str]]()
    for task in study.tasks:
        dataset = study.dataset(task)
        data[task] = Path(dataset.path) if dataset.path else out / f"{file_name(task)}.{dataset.format}"
        if dataset.path is None:
            command = ["collect", task, "--episodes", str(dataset.episodes), "--out", str(data[task])]
            command += [] if dataset.pixels else ["--no-pixels"]
            command += ["--demonstrator", *dataset.demonstrator] if dataset.demonstrator else []
            collected[task] = [add(f"collect {task}", "collect", command, data[task])]
    for run, folder in runs.items():
        command = ["train", run.task, "--method", run.method, "--recipe", run.recipe, "--data", str(data[run.task])]
        command += ["--out", str(folder), "--train.seed", str(run.seed)]
        command += [part for name, value in study.settings.items() for part in (f"--{name}", str(value))]
        settings = to_dict(recipe_config(run.recipe, run.method, run.task))
        needs = collected.get(run.task, [])
        add(
            f"train {folder.name}",
            "train",
            command,
            folder / "model.safetensors",
            needs,
            settings=settings,
            run=run,
        )
    for run, folder in runs.items():
        for evaluation in study.evaluations:
            name = f"eval {folder.name} {evaluation.offset}{''.join(' ' + f.lstrip('-') for f in evaluation.flags)}"
            command = ["eval", str(folder), *evaluation_flags(evaluation, study.part), *own_task(run.task)]
            add(name, "eval", command, folder / "evaluation", [f"train {folder.name}"], run=run)
    if study.diagnostics:
        for task in study.tasks:
            folders = [folder for run, folder in runs.items() if run.task == task]
            needs = [u.name for u in units.values() if u.run is not None and u.run.task == task]
            command = ["diagnose", *map(str, folders), "--what", *study.diagnostics, *own_task(task)]
            add(f"diagnose {task}", "diagnose", command, folders[0] / "diagnostics", needs)
    needs = [u.name for u in units.values() if u.kind != "collect"]
    command = ["report", *map(str, runs.values()), "--out", str(out / "report")]
    add("report", "report", command, out / "report" / "index.html", needs)
    return units


def run_folders(study: Study) -> dict[RunName, str]:
    """The name of each run's folder: what differs between runs."""
    varied = [len(values) > 1 for values in (study.tasks, study.methods, study.recipes, study.training_seeds)]
    varied[1] = True  # the method is always named
    names = {}
    for parts in product(study.tasks, study.methods, study.recipes, study.training_seeds):
        shown = (file_name(str(part)) for part, differs in zip(parts, varied, strict=True) if differs)
        names[RunName(*parts)] = "-".join(shown)
    return names


def file_name(text: str) -> str:
    """``module:Class`` without its module."""
    return text.rpartition(":")[-1]


def own_task(task: str) -> list[str]:
    """The flag that lets a command import it: names in files are never imported."""
    return ["--task", task] if ":" in task else []


def evaluation_flags(evaluation: Evaluation, part: str) -> Iterator[str]:
    yield from ("--part", part, "--offset", str(evaluation.offset))
    if evaluation.budget is not None:
        yield from ("--budget", str(evaluation.budget))
    yield from ("--episodes", str(evaluation.episodes), "--seeds", ",".join(map(str, evaluation.seeds)))
    yield from evaluation.flags
