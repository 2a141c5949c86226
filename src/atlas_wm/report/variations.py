"""Varied environments: success and the share of flagged plans, beside the plain evaluation of the same episodes."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from atlas_wm.errors import UserError
from atlas_wm.report import captions
from atlas_wm.report.films import first_frame
from atlas_wm.report.intervals import success_interval, wilson
from atlas_wm.report.page_table import Table
from atlas_wm.report.runs import Group, Run, Study
from atlas_wm.report.section import Notice, Section, per_task
from atlas_wm.report.style import (
    ALPHAS,
    FLAGGED,
    LINE,
    PANEL_WIDTH,
    Bar,
    Estimate,
    Figure,
    Panel,
    bars,
    bars_height,
)
from atlas_wm.report.success import evaluated_as
from atlas_wm.report.table import plain_counterpart
from atlas_wm.runs.results import FOLDER, EvaluationResult, SelectedEvaluation

MOST_VARIATIONS = 20  # rows of a panel
WIDTH = PANEL_WIDTH + 0.8
IMAGE_WIDTH, IMAGE_HEIGHT = 0.26, 1.7  # of a frame beside its bars: share of the axis, bars


class Row(NamedTuple):
    name: str
    results: list[EvaluationResult]  # of the runs of one group
    frame: np.ndarray | None  # (H, W, 3) uint8


def variations_section(study: Study) -> Section:
    """Empty without a varied evaluation."""
    section = Section(
        "variations",
        "Varied environments",
        "Does the planner reach the goal in a changed scene, and does it notice?",
    )
    panels = []
    for group in study.groups:
        for title, rows in _rows(group, section.blocks).items():
            draw = partial(_draw, group=group, rows=rows[: 1 + MOST_VARIATIONS])
            height = bars_height(2 * min(len(rows), 1 + MOST_VARIATIONS)) + 0.3
            panels.append(Panel(f"{per_task(group.label, group.task, study)}, {title}", draw, height, WIDTH))
    if panels:
        section.blocks += [
            Figure("variations", "Success and novelty in varied environments", panels, captions.VARIATIONS, 2),
            _table(study),
        ]
    return section


def _rows(group: Group, blocks: list[Figure | Table | Notice]) -> dict[str, list[Row]]:
    """By the condition without its variation: the plain evaluation, where there is one, and each variation."""
    found: dict[str, dict[str, Row]] = {}
    for run in group.runs:
        evaluations = list(run.evaluations.values())
        for varied in evaluations:
            if not varied.result.variation:
                continue
            title = evaluated_as(run, replace(varied.result, variation={}))
            rows = found.setdefault(title, {})
            plain = plain_counterpart(varied.result, [one.result for one in evaluations])
            for one in (*(one for one in evaluations if one.result is plain), varied):
                name = one.result.variation_text or "plain"
                row = rows.get(name) or Row(name, [], _first_frame(run, one, blocks))
                if all(one.result is not result for result in row.results):
                    row.results.append(one.result)
                rows[name] = row
    return {title: sorted(rows.values(), key=lambda row: row.name != "plain") for title, rows in found.items()}


def _first_frame(
    run: Run, evaluation: SelectedEvaluation, blocks: list[Figure | Table | Notice]
) -> np.ndarray | None:
    try:
        return first_frame(run.folder / FOLDER / f"{evaluation.name}.json")
    except UserError as error:
        blocks.append(Notice("warning", f"{error}."))
        return None


def _draw(axes: Axes, group: Group, rows: Sequence[Row]) -> None:
    drawn = []
    for name, results, _ in rows:
        value, low, high = success_interval(results)
        success = None if value is None else Estimate(value, low, high)
        flagged = Estimate.of([_flagged(result) for result in results], 0, 100)
        for what, estimate, colour in (("success", success, group.colour), ("plans flagged", flagged, FLAGGED)):
            text = f"{estimate.value:.0f} %" if estimate else "not measured"
            alpha = ALPHAS[min(group.variant, 2)] if what == "success" else 1.0
            drawn.append(Bar(f"{name} · {what}" if what == "success" else what, estimate, colour, alpha, text))
    bars(axes, drawn, top=100)
    axes.set(xticks=[0, 25, 50, 75, 100], xlabel="%")
    if any(row.frame is not None for row in rows):
        left, right = axes.get_xlim()
        width = (right - left) * IMAGE_WIDTH / (1 - IMAGE_WIDTH)
        axes.set_xlim(left - width, right)
        axes.spines["bottom"].set_bounds(left, right)
        for index, row in enumerate(rows):
            if row.frame is not None:
                place = (left - width, -2 * index - 1 - 0.45, 0.86 * width, IMAGE_HEIGHT)
                image = axes.inset_axes(place, transform=axes.transData)
                image.imshow(row.frame)
                image.set(xticks=[], yticks=[])
                image.grid(visible=False)
                for spine in image.spines.values():
                    spine.set(visible=True, color=LINE)


def _flagged(result: EvaluationResult) -> tuple[float | None, float | None, float | None]:
    """The plans of one episode are alike, so the interval is that of as many plans as episodes."""
    planned = sum(episode.plans > 0 for episodes in result.model.episodes.values() for episode in episodes)
    return wilson(result.novel_share, planned)


def _table(study: Study) -> Table:
    data = []
    for run in study.runs:
        results = [one.result for one in run.evaluations.values()]
        for result in results:
            if result.variation:
                plain = plain_counterpart(result, results)
                data.append({"run": run.name, "variation": result.variation_text, "offset": result.protocol.offset,
                             "success_plain_percent": plain and plain.model.success_mean,
                             "success_percent": result.model.success_mean,
                             "novel_plans_plain_percent": plain and plain.novel_share,
                             "novel_plans_percent": result.novel_share,
                             "remaining_auroc": result.remaining_auroc,
                             "risk_auroc": result.risk_auroc})  # fmt: skip
    header = ["Run", "Variation", "Offset", "Success, plain, %", "Success, varied, %"]
    header += ["Novel plans, plain, %", "Novel plans, varied, %", "AUROC of remaining", "AUROC of risk"]
    note = (
        "Varied: the same episodes in an environment with the given values, goal images included. Novel plans: "
        "those whose current frame, goal or imagined end has a novelty above the 99th percentile. "
        "AUROC: with which the first plan predicts failure, varied; – with fewer than 10 failures or "
        "successes."
    )
    rows = [[_cell(name, value) for name, value in record.items()] for record in data]
    return Table("variations", "Success and novelty in varied environments", header, rows, data, note)


def _cell(name: str, value: Any) -> str:
    digits = 2 if name.endswith("auroc") else 1
    return "–" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)
