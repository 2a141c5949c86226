"""The commands that a study takes, each with what it needs and a key that changes when its result would."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from atlas_wm.recipes import recipe_config, untuned
from atlas_wm.runs.folder import WEIGHTS
from atlas_wm.settings import Options, to_dict
from atlas_wm.study.study import FIRST_SEED, Dataset, Evaluation, Study, file_name
from atlas_wm.study.tuning import Tuned, all_tuned, weight_settings

Kind = Literal["collect", "try", "train", "eval", "diagnose", "report"]
TUNING = "tuning.csv"  # the table of tries
TRY_SEED = FIRST_SEED - 1  # of tries: none of the other runs'
TRY_DATA_SEED = 1  # of the demonstrations for tries; the others have 0


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


def units_of(study: Study, out: Path, chosen: Mapping[Tuned, float] | None = None) -> dict[str, Unit]:
    """By name, in an order in which each stands after what it needs.

    ``chosen``: the factor of each recipe that is tuned, as far as its tries are over.
    """
    units: dict[str, Unit] = {}

    def add(
        name: str, kind: Kind, command: Sequence[str], makes: Path, needs: Sequence[str] = (), **facts: Any
    ) -> str:
        run = facts.pop("run", None)
        # A run depends on its tries by the weight in its command alone.
        content = [kind, command, facts, [units[need].key for need in needs if units[need].kind != "try"]]
        key = hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()[:16]
        units[name] = Unit(name, kind, tuple(command), makes, tuple(needs), key, run)
        return name

    runs: dict[RunName, Path] = {run: out / folder for run, folder in run_folders(study).items()}
    data, collected = dict[str, str](), dict[str, list[str]]()
    for task in study.tasks:
        dataset = study.dataset(task)
        data[task] = dataset.path or str(out / f"{file_name(task)}.{dataset.format}")
        if dataset.path is None:
            command = collect_command(task, dataset, data[task])
            collected[task] = [add(f"collect {task}", "collect", command, Path(data[task]))]
    tries: dict[Tuned, list[str]] = {}
    for one in all_tuned(study):
        dataset = study.dataset(one.task)
        path = dataset.try_path or str(out / f"{file_name(one.task)}-tries.{dataset.format}")
        needs = [f"collect {one.task} for tries"] if dataset.try_path is None else []
        if needs and needs[0] not in units:
            command = [*collect_command(one.task, dataset, path), "--seed", str(TRY_DATA_SEED)]
            add(needs[0], "collect", command, Path(path))
        run = RunName(one.task, one.method, untuned(one.recipe), TRY_SEED)
        tries[one] = []
        for factor in study.tries:
            folder = out / "tries" / one.try_name(factor)
            given = study.settings | study.try_settings | weight_settings(study, one, factor)
            command = train_command(run, path, folder, whole_episodes(run, given))
            facts = {"settings": to_dict(recipe_config(run.recipe, run.method, run.task)), "run": run}
            tries[one].append(add(f"try {folder.name}", "try", command, folder / WEIGHTS, needs, **facts))
    for run, folder in runs.items():
        one, given = Tuned(run.task, run.method, run.recipe), study.settings
        if one in tries:
            given = given | weight_settings(study, one, (chosen or {}).get(one))
        if study.part == "heldout":
            given = whole_episodes(run, given)
        command = train_command(run, data[run.task], folder, given)
        needs = [*collected.get(run.task, []), *tries.get(one, [])]
        facts = {"settings": to_dict(recipe_config(run.recipe, run.method, run.task)), "run": run}
        add(f"train {folder.name}", "train", command, folder / WEIGHTS, needs, **facts)
    for run, folder in runs.items():
        for evaluation in study.evaluations:
            name = f"eval {folder.name} {evaluation.offset}{''.join(' ' + f.lstrip('-') for f in evaluation.flags)}"
            command = ["eval", str(folder), *evaluation_flags(evaluation, study.part), *own_task(run.task)]
            add(name, "eval", command, folder / "evaluation", [f"train {folder.name}"], run=run)
    of_runs = [u for u in units.values() if u.kind in ("train", "eval")]
    if study.diagnostics:
        for task in study.tasks:
            folders = [folder for run, folder in runs.items() if run.task == task]
            needs = [u.name for u in of_runs if u.run is not None and u.run.task == task]
            command = ["diagnose", *map(str, folders), "--what", *study.diagnostics, *own_task(task)]
            add(f"diagnose {task}", "diagnose", command, folders[0] / "diagnostics", needs)
    needs = [u.name for u in units.values() if u.kind not in ("collect", "try")]
    command = ["report", *map(str, runs.values()), "--out", str(out / "report")]
    tried = {"tries": [u.key for u in units.values() if u.kind == "try"]} if tries else {}
    command += ["--tuning", str(out / TUNING)] if tries else []
    add("report", "report", command, out / "report" / "index.html", needs, **tried)
    return units


def collect_command(task: str, dataset: Dataset, path: str) -> list[str]:
    command = ["collect", task, "--episodes", str(dataset.episodes), "--out", path]
    command += [] if dataset.pixels else ["--no-pixels"]
    return command + (["--demonstrator", *dataset.demonstrator] if dataset.demonstrator else [])


def train_command(run: RunName, data: str, folder: Path, settings: Options) -> list[str]:
    command = ["train", run.task, "--method", run.method, "--recipe", run.recipe, "--data", data]
    command += ["--out", str(folder), "--train.seed", str(run.seed)]
    return command + [part for name, value in settings.items() for part in (f"--{name}", str(value))]


def whole_episodes(run: RunName, settings: Options) -> Options:
    """The settings, with a split by episodes where the recipe holds out clips: then every episode is trained on."""
    split = settings.get("train.split", recipe_config(run.recipe, run.method, run.task).train.split)
    return settings | {"train.split": "episodes"} if split == "clips" else settings


def run_folders(study: Study) -> dict[RunName, str]:
    """The name of each run's folder: what differs between runs."""
    varied = [len(values) > 1 for values in (study.tasks, study.methods, study.recipes, study.training_seeds)]
    varied[1] = True  # the method is always named
    names = {}
    for parts in product(study.tasks, study.methods, study.recipes, study.training_seeds):
        shown = (file_name(str(part)) for part, differs in zip(parts, varied, strict=True) if differs)
        names[RunName(*parts)] = "-".join(shown)
    return names


def own_task(task: str) -> list[str]:
    """The flag that lets a command import it: names in files are never imported."""
    return ["--task", task] if ":" in task else []


def evaluation_flags(evaluation: Evaluation, part: str) -> Iterator[str]:
    yield from ("--part", part, "--offset", str(evaluation.offset))
    if evaluation.budget is not None:
        yield from ("--budget", str(evaluation.budget))
    yield from ("--episodes", str(evaluation.episodes), "--seeds", ",".join(map(str, evaluation.seeds)))
    yield from evaluation.flags
