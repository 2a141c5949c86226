"""The commands that a study takes, each with what it needs and a key that changes when its result would."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from atlas_wm.errors import UserError
from atlas_wm.recipes import recipe_config, untuned
from atlas_wm.runs.folder import METRICS, TEMPORAL_HEAD, WEIGHTS
from atlas_wm.runs.results import FOLDER
from atlas_wm.settings import to_dict
from atlas_wm.study.study import FIRST_SEED, Dataset, Evaluation, Flags, Study, file_name
from atlas_wm.study.tuning import Tuned, all_tuned, weight_settings

Kind = Literal["collect", "try", "train", "head", "eval", "diagnose", "report"]
Purpose = Literal["", "tries", "evaluation"]  # of demonstrations; "": to train on
TUNING = "tuning.csv"  # the table of tries
WEIGHTS_FLAG = "--model.encoder.weights"
TRY_SEED = FIRST_SEED - 1  # of tries: none of the other runs'
DATA_SEEDS: dict[Purpose, int] = {"": 0, "tries": 1, "evaluation": 2}


@dataclass(frozen=True)
class Unit:
    name: str
    kind: Kind
    command: tuple[str, ...]  # arguments of atlas; none: it is the unit that it needs, under another name
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
        if name in units:
            raise UserError(f"two units of the study are named `{name}`: give your classes, or tries, other names")
        run = facts.pop("run", None)
        # A run depends on its tries by the weight in its command alone.
        needed = [units[need].key for need in needs if units[need].kind != "try"]
        content = [kind, weights_by_name(portable(command, out)), facts, needed]
        key = hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()[:16]
        units[name] = Unit(name, kind, tuple(command), makes, tuple(needs), key, run)
        return name

    def dataset(task: str, purpose: Purpose = "") -> tuple[str, list[str]]:
        """Its path, and the unit that collects it, if it does not exist."""
        described = study.dataset(task)
        path = {"": described.path, "tries": described.try_path, "evaluation": described.eval_path}[purpose]
        if path is not None:
            return path, []
        path = str(out / f"{file_name(task)}{purpose and '-'}{purpose}.{described.format}")
        name = f"collect {task}" + (f" for {purpose}" if purpose else "")
        if name not in units:
            add(name, "collect", collect_command(task, described, path, purpose), Path(path))
        return path, [name]

    names = run_folders(study)
    twins = {run: twin for run in names if (twin := same_run(study, run, chosen or {})) != run}
    runs: dict[RunName, Path] = {run: out / folder for run, folder in names.items() if run not in twins}
    for task in study.tasks:
        dataset(task)
        if evaluated_apart(study, task):
            dataset(task, "evaluation")
    tries: dict[Tuned, list[str]] = {}
    for one in all_tuned(study):
        path, needs = dataset(one.task, "tries")
        run = RunName(one.task, one.method, untuned(one.recipe), TRY_SEED)
        tries[one] = []
        for factor in study.tries:
            folder = out / "tries" / one.try_name(factor)
            given = study.settings_of(run.method) | study.try_settings | weight_settings(study, one, factor)
            command = train_command(run, path, folder, whole_episodes(run, given))
            facts = {"settings": to_dict(recipe_config(run.recipe, run.method, run.task)), "run": run}
            tries[one].append(add(f"try {folder.name}", "try", command, folder / METRICS, needs, **facts))
    for run, folder in runs.items():
        one, given = Tuned(run.task, run.method, run.recipe), study.settings_of(run.method)
        if one in tries:
            given = given | weight_settings(study, one, (chosen or {}).get(one))
        if study.part == "heldout":
            given = whole_episodes(run, given)
        path, needs = dataset(run.task)
        command = train_command(run, path, folder, given)
        facts = {"settings": to_dict(recipe_config(run.recipe, run.method, run.task)), "run": run}
        add(f"train {folder.name}", "train", command, folder / WEIGHTS, [*needs, *tries.get(one, [])], **facts)
    for run, folder in runs.items():
        trained = [f"train {folder.name}", *dataset(run.task)[1]]
        if any(wants_head(evaluation, study, run) for evaluation in study.evaluations):
            command = ["head", str(folder), *study.head, *own_task(run.task)]
            add(f"head {folder.name}", "head", command, folder / TEMPORAL_HEAD, trained, run=run)
        for name, evaluation in zip(evaluation_names(study), study.evaluations, strict=True):
            needs, episodes = list(trained), ["--part", study.part]
            if wants_head(evaluation, study, run):
                needs.append(f"head {folder.name}")
            if evaluated_apart(study, run.task):
                path, collected = dataset(run.task, "evaluation")
                needs, episodes = needs + collected, ["--data", path]
            command = ["eval", str(folder), *episodes, *evaluation_flags(evaluation), *own_task(run.task)]
            add(f"eval {folder.name} {name}", "eval", command, folder / FOLDER, needs, run=run)
    for run, twin in twins.items():
        for unit in [u for u in units.values() if u.run == twin]:
            name = unit.name.replace(f" {names[twin]}", f" {names[run]}", 1)
            add(name, unit.kind, (), unit.makes, [unit.name], run=run)
    of_runs = [u for u in units.values() if u.kind in ("train", "eval")]
    if study.diagnostics:
        for task in study.tasks:
            folders = [folder for run, folder in runs.items() if run.task == task]
            needs = [u.name for u in of_runs if u.run is not None and u.run.task == task] + dataset(task)[1]
            command = ["diagnose", *map(str, folders), "--what", *study.diagnostics, *own_task(task)]
            # Some diagnostics look at evaluated episodes: those of this dataset and offset.
            command += ["--data", dataset(task, "evaluation")[0]] if evaluated_apart(study, task) else []
            command += ["--offset", str(min((e.offset for e in study.evaluations), key=lambda o: abs(o - 50)))]
            add(f"diagnose {task}", "diagnose", command, folders[0] / "diagnostics", needs)
    needs = [u.name for u in units.values() if u.kind not in ("collect", "try")]
    command = ["report", *map(str, runs.values()), "--out", str(out / "report")]
    tried = {"tries": [u.key for u in units.values() if u.kind == "try"]} if tries else {}
    command += ["--tuning", str(out / TUNING)] if tries else []
    left_out = [f"{method}={why}" for method, why in study.left_out.items()]
    command += ["--left-out", *left_out] if left_out else []
    add("report", "report", command, out / "report" / "index.html", needs, **tried)
    return units


def collect_command(task: str, dataset: Dataset, path: str, purpose: Purpose = "") -> list[str]:
    episodes, demonstrator = dataset.episodes, dataset.demonstrator
    if purpose == "evaluation":
        episodes, demonstrator = dataset.eval_episodes, dataset.eval_demonstrator
    command = ["collect", task, "--episodes", str(episodes), "--out", path]
    command += [] if dataset.pixels else ["--no-pixels"]
    command += ["--demonstrator", *demonstrator] if demonstrator else []
    return command + (["--seed", str(DATA_SEEDS[purpose])] if purpose else [])


def evaluated_apart(study: Study, task: str) -> bool:
    """Whether evaluations have demonstrations of their own."""
    return study.part == "heldout" and study.dataset(task).evaluated_apart


def wants_head(evaluation: Evaluation, study: Study, run: "RunName") -> bool:
    """Whether an evaluation plans with a temporal head that training does not fit."""
    config = recipe_config(run.recipe, run.method, run.task)
    own = cost = str(study.settings_of(run.method).get("plan.cost", config.plan.cost))
    if "--cost" in evaluation.flags[:-1]:
        cost = evaluation.flags[evaluation.flags.index("--cost") + 1]
    return cost == "temporal" and (own != "temporal" or bool(study.head))


def train_command(run: RunName, data: str, folder: Path, settings: Flags) -> list[str]:
    command = ["train", run.task, "--method", run.method, "--recipe", run.recipe, "--data", data]
    command += ["--out", str(folder), "--train.seed", str(run.seed)]
    return command + [part for setting in settings.items() for part in flag_of(*setting)]


def flag_of(name: str, value: bool | int | float | str) -> list[str]:
    if isinstance(value, bool):
        section, _, last = name.rpartition(".")
        return [f"--{section}.{'' if value else 'no-'}{last}"]
    return [f"--{name}", str(value)]


def whole_episodes(run: RunName, settings: Flags) -> Flags:
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


def same_run(study: Study, run: RunName, chosen: Mapping[Tuned, float]) -> RunName:
    """The run with the same settings: where tries chose the recipe's own weight, that of the recipe."""
    plain = replace(run, recipe=untuned(run.recipe))
    own_weight = chosen.get(Tuned(run.task, run.method, run.recipe)) == 1.0
    return plain if own_weight and plain.recipe in study.recipes else run


def own_task(task: str) -> list[str]:
    """The flag that lets a command import it: names in files are never imported."""
    return ["--task", task] if ":" in task else []


def evaluation_names(study: Study) -> list[str]:
    """Of each evaluation: its offset and flags; the rest of its protocol where others have the same."""
    names = [f"{e.offset}" + "".join(f" {flag.lstrip('-')}" for flag in e.flags) for e in study.evaluations]
    whole = [" ".join(flag.lstrip("-") for flag in evaluation_flags(e)) for e in study.evaluations]
    return [name if names.count(name) == 1 else long for name, long in zip(names, whole, strict=True)]


def portable(command: Sequence[str], out: Path) -> tuple[str, ...]:
    """A command without the place of the study's folder: the same study may be called by another path."""
    place = str(out)
    return tuple(
        "OUT" + part.removeprefix(place) if part == place or part.startswith(f"{place}/") else part
        for part in command
    )


def weights_by_name(command: tuple[str, ...]) -> tuple[str, ...]:
    """A command with the name alone of a file of pretrained weights, which may lie elsewhere on another machine."""
    at = command.index(WEIGHTS_FLAG) + 1 if WEIGHTS_FLAG in command else len(command)
    return (*command[:at], *(Path(file).name for file in command[at : at + 1]), *command[at + 1 :])


def evaluation_flags(evaluation: Evaluation) -> Iterator[str]:
    yield from ("--offset", str(evaluation.offset))
    if evaluation.budget is not None:
        yield from ("--budget", str(evaluation.budget))
    yield from ("--episodes", str(evaluation.episodes), "--seeds", ",".join(map(str, evaluation.seeds)))
    yield from evaluation.flags
