"""Read the files of runs: JSON and CSV in, runs and groups of runs out. Damaged files are listed, not fatal."""

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any

from atlas_wm.diagnose.catalog import DIAGNOSTICS
from atlas_wm.errors import UserError, reason, short
from atlas_wm.report.naming import method_colour, method_name, task_name
from atlas_wm.report.style import OTHER_COLOURS
from atlas_wm.runs.files import MOST_JSON, MOST_SETTINGS, read_json
from atlas_wm.runs.folder import CONFIG, METRICS
from atlas_wm.runs.results import FOLDER, EvaluationResult, SelectedEvaluation, most_complete

Json = dict[str, Any]
MOST_NAMES, MOST_NAME, MOST_NUMBER = 2000, 200, 2.0**64  # names per object, characters per name, magnitude
MOST_LABEL = 40  # characters of a recipe
TUNED = "+tuned"  # end of the recipes whose weights a study chose


@dataclass
class Run:
    name: str  # distinct within a report
    folder: Path
    config: Json
    metrics: dict[str, tuple[list[float], list[float]]]  # column → (steps, values)
    evaluations: dict[str, SelectedEvaluation]  # by condition
    diagnostics: dict[str, Json]  # by name

    @property
    def task(self) -> str:
        return str(self.config["task"])

    @property
    def method(self) -> str:
        return str(self.config["method"])

    @property
    def data_hash(self) -> str | None:
        return (self.config.get("data") or {}).get("hash")

    @property
    def seed(self) -> int | None:
        return self.config["config"]["train"].get("seed")

    def result(self, what: str) -> Json | None:
        return self.diagnostics[what]["result"] if what in self.diagnostics else None


@dataclass
class Group:
    """Runs that differ only in their training seed. The report shows their mean."""

    runs: list[Run]
    label: str
    colour: str
    variant: int = 0  # index among groups with the same method and task

    @property
    def task(self) -> str:
        return self.runs[0].task

    @property
    def method(self) -> str:
        return self.runs[0].method

    @property
    def recipe(self) -> str:
        return str(self.runs[0].config.get("recipe"))

    def evaluated(self, condition: str) -> list[EvaluationResult]:
        return [run.evaluations[condition].result for run in self.runs if condition in run.evaluations]

    def by_seed(self, condition: str) -> dict[int | None, EvaluationResult]:
        return {run.seed: run.evaluations[condition].result for run in self.runs if condition in run.evaluations}

    def results(self, what: str) -> list[Json]:
        return [result for run in self.runs if (result := run.result(what)) is not None]


@dataclass(frozen=True)
class Try:
    """A row of tuning.csv, which `atlas study` writes."""

    task: str
    method: str
    recipe: str
    factor: float
    weights: str
    state: str
    score: float | None
    minutes: float
    chosen: bool


@dataclass
class Study:
    """All runs of a report, and problems with their files."""

    runs: list[Run]
    problems: list[str] = field(default_factory=list)
    tries: list[Try] = field(default_factory=list)
    left_out: Mapping[str, str] = field(default_factory=dict)  # methods that were not run, and why

    @property
    def repeated(self) -> list[Run]:
        """The tuned runs that were not trained: where the recipe's own weight was chosen, they are the recipe's."""
        found = []
        for one in self.tries:
            mine = [run for run in self.runs if (run.task, run.method) == (one.task, one.method)]
            trained = any(run.config.get("recipe") == one.recipe for run in mine)
            if one.chosen and one.factor == 1.0 and not trained:
                plain = [run for run in mine if run.config.get("recipe") == one.recipe.removesuffix(TUNED)]
                found += [replace(run, config={**run.config, "recipe": one.recipe}) for run in plain]
        return found

    @property
    def with_repeated(self) -> "Study":
        return Study([*self.runs, *self.repeated], self.problems, left_out=self.left_out)

    @cached_property
    def groups(self) -> list[Group]:
        by_settings: dict[str, list[Run]] = {}
        for run in self.runs:
            by_settings.setdefault(_apart_from_seed(run), []).append(run)
        groups: list[Group] = []
        others = iter(OTHER_COLOURS * len(self.runs))
        colours = {m: method_colour(m) or next(others) for m in dict.fromkeys(run.method for run in self.runs)}
        for runs in by_settings.values():
            method, task = runs[0].method, runs[0].task
            variants = [r for r in by_settings.values() if (r[0].method, r[0].task) == (method, task)]
            label = method_name(method)
            if len(variants) > 1:
                recipes = [str(r[0].config.get("recipe"))[:MOST_LABEL] for r in variants]
                distinct = len(set(recipes)) == len(variants)
                label += f", {recipes[variants.index(runs)] if distinct else runs[0].name}"
            if len(runs) > 1:
                label += f" ({len(runs)} runs)"
            groups.append(Group(runs, label, colours[method], variants.index(runs)))
        return groups

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(run.task for run in self.runs))

    @property
    def task_names(self) -> dict[str, str]:
        return {task: task_name(task) for task in self.tasks}

    def of_task(self, task: str) -> list[Group]:
        return [group for group in self.groups if group.task == task]

    def measured(self, what: str) -> Iterator[tuple[str, list[tuple[Group, list[Json]]]]]:
        """Each task with the groups that have results of a diagnostic."""
        for task in self.tasks:
            groups = [(group, results) for group in self.of_task(task) if (results := group.results(what))]
            if groups:
                yield task, groups


def _apart_from_seed(run: Run) -> str:
    settings = {**run.config["config"], "train": {**run.config["config"]["train"], "seed": None}}
    return json.dumps([run.task, run.method, run.config.get("recipe"), run.data_hash, settings], sort_keys=True)


def read_study(folders: Sequence[Path]) -> Study:
    """All runs that can be read; at least one must be readable."""
    study, selected = Study([]), list[list[SelectedEvaluation]]()
    for name, folder in _named(folders).items():
        if not folder.is_dir():
            raise UserError(f"there is no run folder {folder}: check the path")
        if not (folder / CONFIG).exists() and any(folder.glob(f"*/{CONFIG}")):
            study.problems.append(_folder_of_runs(folder))
            continue
        config = _read(folder / CONFIG, _check_config, study.problems, MOST_SETTINGS)
        if config is None:
            continue
        study.runs.append(
            Run(
                name,
                folder,
                config,
                _read_metrics(folder / METRICS, study.problems),
                {},
                _read_all(folder / "diagnostics", _check_diagnostic, study.problems),
            )
        )
        selected.append(most_complete(_read_results(folder / FOLDER, study.problems)))
    if not study.runs:
        raise UserError("no run could be read: " + "; ".join(study.problems))
    _name_conditions(study.runs, selected)
    return study


def _named(folders: Sequence[Path]) -> dict[str, Path]:
    """Each folder once, by its name; where several have the same, by as much of the path as tells them apart."""
    paths = {folder.absolute().parts: folder for folder in folders}
    named = {}
    for parts, folder in paths.items():
        length = 1
        while sum(other[-length:] == parts[-length:] for other in paths) > 1:
            length += 1
        named[str(Path(*parts[-length:]))] = folder
    return named


def _folder_of_runs(folder: Path) -> str:
    page = folder / "report" / "index.html"
    instead = f"open {page}, or " if page.exists() else ""
    return f"{folder} is a folder of runs, not a run: {instead}name the runs, `atlas report {folder}/*/`"


def read_tries(path: Path) -> list[Try]:
    try:
        if path.stat().st_size > MOST_SETTINGS:
            raise ValueError(f"it is larger than {MOST_SETTINGS:,} bytes")
        with path.open(newline="") as file:
            if not (tries := [_try(row) for row in csv.DictReader(file)]):
                raise ValueError("it is empty")
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise UserError(f"--tuning {path} cannot be read as the tuning.csv of a study: {reason(error)}") from error
    return tries


def _try(row: dict[str, str]) -> Try:
    names = {name: row[name][:MOST_NAME] for name in ("task", "method", "recipe", "weights", "state")}
    factor, minutes, score = float(row["factor"]), float(row["minutes"]), row["score"]
    known = [factor, minutes, float(score or 0)]
    if not all(abs(value) < MOST_NUMBER for value in known) or factor <= 0:
        raise ValueError(f"a number that cannot be drawn: {short(known)}")
    return Try(
        **names,
        factor=factor,
        minutes=minutes,
        score=float(score) if score else None,
        chosen=row["chosen"] == "True",
    )


def _read_results(folder: Path, problems: list[str]) -> dict[str, EvaluationResult]:
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            data = read_json(path)
            _check_modest(path, data)
            found[path.stem] = EvaluationResult.parse(data, path)
        except UserError as error:
            problems.append(str(error))
    return found


def _name_conditions(runs: Sequence[Run], selected: Sequence[Sequence[SelectedEvaluation]]) -> None:
    """Evaluations with the same protocol share a condition. If runs were evaluated on different data, or one on
    other data than its training data, each dataset is its own condition; so is each task."""
    both = [(run, one) for run, mine in zip(runs, selected, strict=True) for one in mine]
    datasets: dict[tuple[str, str], set[str | None]] = {}
    for run, one in both:
        datasets.setdefault((run.task, one.result.condition), set()).update((run.data_hash, one.result.data.hash))
    for run, one in both:
        result, name = one.result, one.result.condition
        if len(datasets[run.task, name]) > 1:
            name += f" on {result.data.hash}"
        if result.task != run.task:
            name += f" as {result.task}"
        run.evaluations[name] = one


def _read_all(folder: Path, check: Callable[[Path, Json], None], problems: list[str]) -> dict[str, Json]:
    found = {path.stem: _read(path, check, problems) for path in sorted(folder.glob("*.json"))}
    return {name: data for name, data in found.items() if data is not None}


def _read(
    path: Path, check: Callable[[Path, Json], None], problems: list[str], most: int = MOST_JSON
) -> Json | None:
    """The content of the file, or None and a line in ``problems``."""
    try:
        data = read_json(path, most)
        _check_modest(path, data)
        check(path, data)
    except UserError as error:
        problems.append(str(error))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        problems.append(f"{path} has unexpected content: {type(error).__name__} {reason(error)}")
    else:
        return dict(data)
    return None


def _need(path: Path, data: Json, keys: Sequence[str]) -> None:
    if lacking := [key for key in keys if key not in data]:
        raise UserError(f"{path} lacks {', '.join(lacking)}")


def _check_modest(path: Path, data: Any) -> None:
    """Refuse content that would make a figure huge: too many or too long names, or extreme numbers."""
    stack = [data]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            if len(value) > MOST_NAMES or any(len(name) > MOST_NAME for name in value):
                raise UserError(f"{path} has more or longer names than any file that atlas-wm writes")
            stack += value.values()
        elif isinstance(value, list):
            stack += value
        elif isinstance(value, (int, float)) and not abs(value) < MOST_NUMBER:
            raise UserError(f"{path} has a number that cannot be drawn: {short(value)}")


def _expect(path: Path, data: Json, kind: Any, *keys: str) -> None:
    _need(path, data, keys)
    for key in keys:
        if not isinstance(data[key], kind) or (kind is not dict and isinstance(data[key], bool)):
            raise UserError(f"{path}: {key} has an unexpected value: {short(data[key])}")


def _check_config(path: Path, data: Json) -> None:
    _expect(path, data, str, "task", "method")
    _expect(path, data, dict, "config")
    _expect(path, data["config"], dict, "train", "objective", "plan", "model")
    _expect(path, {"data": {}} | data, (dict, NoneType), "data")
    _expect(path, {"seed": None} | data["config"]["train"], (int, NoneType), "seed")


def _check_diagnostic(path: Path, data: Json) -> None:
    keys = {str(name): diagnostic.keys for name, diagnostic in DIAGNOSTICS.items()}.get(path.stem)
    if keys is not None:
        _need(path, data, ("result", "queries"))
        _expect(path, data, dict, "result")
        _need(path, data["result"], keys)


def _read_metrics(path: Path, problems: list[str]) -> dict[str, tuple[list[float], list[float]]]:
    try:
        return read_metrics(path)
    except FileNotFoundError:
        return {}  # the training section reports it
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        problems.append(f"{path} cannot be read: {reason(error)}")
        return {}


def read_metrics(path: Path) -> dict[str, tuple[list[float], list[float]]]:
    """Column → (steps, values), without empty cells and empty columns."""
    if path.stat().st_size > MOST_JSON:
        raise ValueError(f"it is larger than {MOST_JSON:,} bytes")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    columns = {}
    for name in rows[0] if rows else {}:
        filled = [(_finite(r["step"]), _finite(r[name])) for r in rows if r[name]]
        if filled:
            steps, values = zip(*filled, strict=True)
            columns[name] = (list(steps), list(values))
    return columns


def _finite(cell: str) -> float:
    """A loss that is not finite becomes NaN, which is drawn as a gap."""
    value = float(cell)
    return value if abs(value) < MOST_NUMBER else math.nan
