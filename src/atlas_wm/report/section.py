"""A section of the report, and the notices about missing and differing files."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from atlas_wm.report.naming import task_name
from atlas_wm.report.page_table import Table
from atlas_wm.report.runs import Json, Run, Study
from atlas_wm.report.style import Figure


@dataclass(frozen=True)
class Notice:
    """``missing``: not measured, with the command that measures it. ``error``. ``warning``. ``note``."""

    kind: Literal["missing", "error", "warning", "note"]
    text: str
    command: str = ""


@dataclass
class Section:
    key: str
    title: str
    question: str
    blocks: list[Figure | Table | Notice] = field(default_factory=list)


def names(runs: Sequence[Run]) -> str:
    return ", ".join(run.name for run in runs)


def diagnostic_notices(study: Study, what: str) -> list[Notice]:
    """Runs without this diagnostic, runs with other queries or settings, and notes from the files."""
    notices = []
    without = [run for run in study.runs if what not in run.diagnostics]
    damaged = [run for run in without if (run.folder / "diagnostics" / f"{what}.json").exists()]
    for runs, state, flag in (
        ([run for run in without if run not in damaged], "Not measured", ""),
        (damaged, "The file is damaged", " --fresh"),
    ):
        if runs:
            command = f"atlas diagnose {' '.join(str(run.folder) for run in runs)} --what {what}{flag}"
            notices.append(Notice("missing", f"{state}: {names(runs)}.", command))
    for task in study.tasks:
        runs = [run for run in study.runs if run.task == task and what in run.diagnostics]
        for key, why in (("queries", "different queries"), ("settings", "different settings")):
            if different := differing_values(runs, [_comparable(run.diagnostics[what], key) for run in runs]):
                notices.append(
                    Notice("warning", f"{task_name(task)}: measured with {why}, so not comparable: {different}.")
                )
    for run in study.runs:
        if what not in run.diagnostics:
            continue
        if note := run.diagnostics[what]["result"].get("note"):
            notices.append(Notice("note", f"{run.name}: {note}"))
        measured_on = (run.diagnostics[what].get("run") or {}).get("data")
        if measured_on and run.data_hash and measured_on != run.data_hash:
            notices.append(
                Notice("warning", f"{run.name}: measured on dataset {measured_on}, trained on {run.data_hash}.")
            )
    return notices


def _comparable(file: Json, key: str) -> object:
    """The queries or the settings of a result, without those that belong to one run."""
    if key == "settings":
        return {name: value for name, value in (file.get(key) or {}).items() if name not in ("evaluation", "rows")}
    return file.get(key)


def data_warnings(study: Study) -> list[Notice]:
    """Runs of one task that were trained on different data, and runs that count as different training seeds but are
    not."""
    warnings = []
    for task in study.tasks:
        runs = [run for run in study.runs if run.task == task]
        if different := differing_values(runs, [run.data_hash for run in runs]):
            text = f"{task_name(task)}: trained on different datasets, so compare with care: {different}."
            warnings.append(Notice("warning", text))
    for group in study.groups:
        seeds = [run.seed for run in group.runs]
        for seed in dict.fromkeys(seed for seed in seeds if seeds.count(seed) > 1):
            copies = names([run for run in group.runs if run.seed == seed])
            text = f"The same settings and training seed {seed}: {copies}. They count as several, so name one."
            warnings.append(Notice("warning", text))
    return warnings


def differing_values(runs: Sequence[Run], values: Sequence[object]) -> str:
    """``a, b: x; c: y`` if the values differ, else an empty string."""
    by_value: dict[str, list[Run]] = {}
    for run, value in zip(runs, values, strict=True):
        by_value.setdefault("none" if value is None else str(value), []).append(run)
    if len(by_value) < 2:
        return ""
    return "; ".join(f"{names(group)}: {value}" for value, group in by_value.items())


def per_task(title: str, task: str, study: Study) -> str:
    """The title of a panel, with the task if the report has several."""
    return f"{task_name(task)}: {title}" if len(study.tasks) > 1 else title
