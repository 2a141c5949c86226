"""Differences between methods on the same episodes, and between a tuned recipe and the same one untuned."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import permutations
from typing import NamedTuple

from matplotlib.axes import Axes

from atlas_wm.report import captions
from atlas_wm.report.intervals import Difference, paired
from atlas_wm.report.naming import method_name, task_name
from atlas_wm.report.page_table import Table
from atlas_wm.report.runs import TUNED, Group, Study
from atlas_wm.report.section import Section, per_task
from atlas_wm.report.style import ALPHAS, Bar, Estimate, Figure, Panel, bars, bars_height
from atlas_wm.report.success import condition_text, conditions

OURS = "atlas"  # which the others are compared with
HEADER = ["Task", "Condition", "Compared", "Points of success", "These runs alone"]
HEADER += ["Won, lost", "Training seeds", "By training seed"]


class Compared(NamedTuple):
    name: str
    first: Group
    difference: Difference


def differences_section(study: Study) -> Section:
    """Empty where nothing can be compared."""
    section = Section(
        "differences",
        "Differences between methods",
        "Which differences are larger than chance?",
    )
    study = study.with_repeated
    panels: list[Panel] = []
    rows: list[list[str]] = []
    data = []
    for task in study.tasks:
        for condition in conditions(study, task):
            compared = list(_compared(study.of_task(task), condition))
            if not compared:
                continue
            where = condition_text(study, task, condition)
            panels.append(
                Panel(per_task(where, task, study), partial(_draw, rows=compared), bars_height(len(compared)) + 0.3)
            )
            for name, _, d in compared:
                alone = f"{d.low:+.1f} to {d.high:+.1f}" if len(d.by_run) > 1 else "–"
                rows.append([task_name(task), where, name, d.text, alone, f"{d.won}, {d.lost}", str(len(d.by_run)),
                             d.range_text or "–"])  # fmt: skip
                by_run = " ".join(f"{points:.2f}" for points in d.by_run)
                data.append({"task": task, "condition": where, "compared": name} | d._asdict() | {"by_run": by_run})
    if panels:
        note = captions.DIFFERENCES_NOTE
        table = Table("differences", "Differences in success", HEADER, rows, data, note)
        section.blocks += [
            Figure("differences", "Differences in success, points", panels, captions.DIFFERENCES, 3),
            table.without_constant("Task", "Condition", "These runs alone", "Training seeds", "By training seed"),
        ]
    return section


def _compared(groups: Sequence[Group], condition: str) -> Iterator[Compared]:
    for first, second in permutations(groups, 2):
        name = _name(first, second) if first.runs[0].folder != second.runs[0].folder else ""
        if name and (difference := paired(first.by_seed(condition), second.by_seed(condition))):
            yield Compared(name, first, difference)


def _name(first: Group, second: Group) -> str:
    """Of a pair that is compared: of two methods with one recipe, or of two recipes of one method."""
    recipe, other = first.recipe, second.recipe
    if first.method == OURS != second.method and recipe == other:
        return f"{method_name(first.method)} against {method_name(second.method)}, {recipe}"
    if first.method == second.method and recipe != other == recipe.removesuffix(TUNED):
        return f"{method_name(first.method)}, {recipe} against {other}"
    return ""


def _draw(axes: Axes, rows: Sequence[Compared]) -> None:
    drawn = []
    for name, group, d in rows:
        estimate = Estimate(d.points, *d.interval)
        drawn.append(Bar(name, estimate, group.colour, ALPHAS[min(group.variant, 2)], f"{d.points:+.1f}"))
    bars(axes, drawn, reference=(0.0, ""))
    axes.set_xlabel("points of success")
