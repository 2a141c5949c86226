"""How weights were chosen: the planning score of every try of a study; and whether that score predicts success."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from scipy.stats import spearmanr

from atlas_wm.report import captions
from atlas_wm.report.naming import method_colour, method_name, task_name
from atlas_wm.report.page_table import Table
from atlas_wm.report.runs import TUNED, Group, Run, Study, Try
from atlas_wm.report.section import Notice, Section, per_task
from atlas_wm.report.style import ALPHAS, OTHER_COLOURS, Figure, Panel
from atlas_wm.report.success import condition_text, primary
from atlas_wm.report.training import SCORE

CLOSE = 0.01  # planning scores differ by as much between training seeds (docs/results/pusht-small.md)
LEAST_RUNS = 5  # for a rank correlation
BELOW: Any = {"loc": "upper left", "bbox_to_anchor": (-0.15, -0.2)}  # a legend that hides no point
LINE = 0.18  # inches of a line of it


def tuning_section(study: Study) -> Section:
    section = Section(
        "tuning", "Choice of weights", "Which weight of its regulariser did each method get, and why?"
    )
    if not study.tries:
        return section
    panels = []
    for task, recipe in dict.fromkeys((t.task, t.recipe) for t in study.tries):
        mine = [t for t in study.tries if (t.task, t.recipe) == (task, recipe)]
        panels.append(Panel(f"{task_name(task)}, {recipe}", partial(_draw_tries, tries=mine), 3.2))
    section.blocks += [
        *_repeated(study),
        *_notices(study.tries),
        Figure("tuning", "Planning score of tries", panels, captions.TUNING),
    ]
    rows = [
        [task_name(t.task), t.recipe, method_name(t.method), f"{t.factor:g}", t.weights, _score(t),
         f"{t.minutes:.1f}", "chosen" if t.chosen else ""]
        for t in study.tries
    ]  # fmt: skip
    header = ["Task", "Recipe", "Method", "Factor", "Weights", "Planning score", "Training, min", ""]
    note = "Factor: of the recipe's weight. Training: with the start of the process and validations."
    best = {(i, "Planning score") for i, t in enumerate(study.tries) if t.chosen}
    table = Table("tuning", "Tries", header, rows, [vars(t) for t in study.tries], note, best=best)
    section.blocks.append(table.without_constant("Task", "Recipe"))
    return section


def _score(one: Try) -> str:
    return one.state if one.score is None else f"{one.score:.3f}"


def _repeated(study: Study) -> list[Notice]:
    notices = []
    for task, method, recipe in dict.fromkeys((r.task, r.method, str(r.config["recipe"])) for r in study.repeated):
        where, plain = f"{task_name(task)}, {recipe}, {method_name(method)}", recipe.removesuffix(TUNED)
        notices.append(
            Notice("note", f"{where}: the recipe's own weight was chosen. Its runs are those of {plain}.")
        )
    return notices


def _notices(tries: Sequence[Try]) -> list[Notice]:
    notices = []
    for one in tries:
        where = f"{task_name(one.task)}, {one.recipe}, {method_name(one.method)}"
        same = [t for t in tries if (t.task, t.recipe, t.method) == (one.task, one.recipe, one.method)]
        mine, close = [t.factor for t in same], [t.weights for t in same if t is not one and _close(t, one)]
        if one.chosen and close:
            text = f"{where}: the scores of {', '.join(close)} are within {CLOSE} of the chosen {one.weights}, as "
            text += "those of training seeds are. Longer tries may choose another."
            notices.append(Notice("note", text))
        if one.chosen and len(mine) > 1 and one.factor in (min(mine), max(mine)):
            edge = f"{where}: {one.weights}, the chosen weight, is at the edge of those tried"
            notices.append(Notice("note", f"{edge}. One beyond may be better."))
        if one.state == "failed":
            notices.append(Notice("warning", f"{where}: the try with {one.weights} failed and was not chosen."))
    return notices


def _close(one: Try, chosen: Try) -> bool:
    return one.score is not None and chosen.score is not None and chosen.score - one.score < CLOSE


def _draw_tries(axes: Axes, tries: Sequence[Try]) -> None:
    others = iter(OTHER_COLOURS * len(tries))
    for method in dict.fromkeys(t.method for t in tries):
        known = sorted((t.factor, t.score) for t in tries if t.method == method and t.score is not None)
        if not known:
            continue
        colour = method_colour(method) or next(others)
        axes.plot(*zip(*known, strict=True), "o-", color=colour, ms=3.5, lw=1.2, label=method_name(method))
        chosen = [(t.factor, t.score) for t in tries if t.method == method and t.chosen and t.score is not None]
        axes.plot(*zip(*chosen, strict=True), "o", color=colour, ms=9, fillstyle="none") if chosen else None
    factors = sorted({t.factor for t in tries})
    axes.set_xscale("log")
    axes.set_xticks(factors, [f"{factor:g}" for factor in factors])
    axes.set_xticks([], minor=True)
    axes.set(xlabel="factor of the recipe's weight", ylabel="planning score")
    axes.legend(fontsize=8, ncols=2, **BELOW)


def score_section(study: Study) -> Section:
    section = Section(
        "score", "Planning score and success", "Does the score without an environment predict success?"
    )
    panels: list[Panel] = []
    data: list[dict[str, Any]] = []
    for task in study.tasks:
        condition = primary(study, task)
        found = [(g, points) for g in study.of_task(task) if (points := _points(g.runs, condition))]
        if condition is None or not found:
            continue
        every = [point for _, points in found for point in points]
        draw = partial(_draw_points, groups=found, condition=condition)
        panels.append(Panel(per_task(_correlation(every), task, study), draw, 2.6 + LINE * len(found)))
        where = condition_text(study, task, condition)
        data += [{"task": task, "condition": where, "run": name, "score": score, "success_percent": rate}
                 for name, score, rate in every]  # fmt: skip
    if panels:
        rows = [[d["condition"], d["run"], f"{d['score']:.3f}", f"{d['success_percent']:.1f}"] for d in data]
        header = ["Condition", "Run", "Planning score", "Success, %"]
        section.blocks += [
            Figure("score", "Success against the planning score", panels, captions.SCORE),
            Table("score", "Every run", header, rows, data, folded=True).without_constant("Condition"),
        ]
    return section


Point = tuple[str, float, float]  # run, planning score, success in %


def _points(runs: Sequence[Run], condition: str | None) -> list[Point]:
    found = []
    for run in runs:
        success = run.evaluations[condition].result.model.success_mean if condition in run.evaluations else None
        score = run.metrics[SCORE][1][-1] if SCORE in run.metrics else math.nan
        if math.isfinite(score) and success is not None:
            found.append((run.name, score, success))
    return found


def _correlation(points: Sequence[Point]) -> str:
    _, scores, rates = zip(*points, strict=True)
    if len(points) < LEAST_RUNS or len(set(scores)) == 1 or len(set(rates)) == 1:
        return f"{len(points)} runs"
    return f"{len(points)} runs, Spearman {spearmanr(scores, rates).statistic:.2f}"


def _draw_points(axes: Axes, groups: Sequence[tuple[Group, list[Point]]], condition: str) -> None:
    for group, points in groups:
        _, scores, rates = zip(*points, strict=True)
        marker, alpha = "os^"[min(group.variant, 2)], ALPHAS[min(group.variant, 2)]
        axes.plot(scores, rates, marker, color=group.colour, alpha=alpha, ms=6, label=group.label)
    results = [run.evaluations[condition].result for run in groups[0][0].runs if condition in run.evaluations]
    axes.set(xlabel="planning score at the end of training")
    axes.set(ylabel=f"success at offset {results[0].protocol.offset}, %")
    axes.legend(fontsize=8, **BELOW)
