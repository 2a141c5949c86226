"""Rollout error, relational distortion, and the planning bound that combines them."""

from collections.abc import Sequence
from functools import partial
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from atlas_wm.report import captions
from atlas_wm.report.naming import task_name
from atlas_wm.report.page_table import Table
from atlas_wm.report.runs import Group, Json, Run, Study
from atlas_wm.report.section import Notice, Section, diagnostic_notices, names, per_task
from atlas_wm.report.style import (
    ALPHAS,
    DASHES,
    MUTED,
    TERM_COLOURS,
    TERM_TEXT,
    Bar,
    Estimate,
    Figure,
    Panel,
    average,
    bars,
    bars_height,
)

Measured = Sequence[tuple[Group, list[Json]]]
DISTORTIONS = {"rmse": "Root mean square", "percentile_95": "95th percentile", "maximum": "Maximum"}
TERMS = {"prediction": "prediction", "relational": "relations", "scale": "scale"}

IN_BRACKETS = "Brackets: 95 % bootstrap interval over queries; with several runs, for other training seeds, too."


def rollout_section(study: Study) -> Section:
    section = Section("rollout", "Rollout error", "How fast do predictions drift from what really happens?")
    section.blocks += diagnostic_notices(study, "rollout")
    panels, rows, data = [], [], []
    for task, groups in study.measured("rollout"):
        panels.append(Panel(task_name(task), partial(_draw_curves, groups=groups), 3.1, 4.6))
        for group, results in groups:
            for horizon, estimate in _by_horizon(results):
                rows.append(
                    [task_name(task), group.label, str(horizon), estimate.text(3) if estimate else "not available"]
                )
                data.append({"task": task, "method": group.label, "horizon": horizon, "runs": len(results),
                             "median": estimate and estimate.value, "low": estimate and estimate.low,
                             "high": estimate and estimate.high})  # fmt: skip
    if panels:
        section.blocks += [
            Figure("rollout", "Prediction error over the horizon", panels, captions.ROLLOUT, 3),
            Table(
                "rollout",
                "Prediction error over the horizon",
                ["Task", "Method", "Model steps", "Error over ℓ"],
                rows,
                data,
                IN_BRACKETS,
                folded=True,
            ).without_constant("Task"),
        ]
    return section


def _by_horizon(results: Sequence[Json]) -> list[tuple[int, Estimate | None]]:
    horizons = sorted({h for r in results for h in r["horizons"]})
    found = []
    for horizon in horizons:
        at = [(r, r["horizons"].index(horizon)) for r in results if horizon in r["horizons"]]
        found.append((horizon, Estimate.of([(r["median"][i], r["low"][i], r["high"][i]) for r, i in at], 0)))
    return found


def _draw_curves(axes: Axes, groups: Measured) -> None:
    ends = []
    for group, results in groups:
        known = [(h, e) for h, e in _by_horizon(results) if e]
        if not known:
            continue
        steps, values = [h for h, _ in known], [e.value for _, e in known]
        lows = [e.value if e.low is None else e.low for _, e in known]
        highs = [e.value if e.high is None else e.high for _, e in known]
        axes.fill_between(steps, lows, highs, color=group.colour, alpha=0.18, lw=0)
        axes.plot(steps, values, DASHES[min(group.variant, 2)], color=group.colour, marker="o", ms=3.5)
        ends.append((values[-1], steps[-1], group))
    axes.set(xlabel="model steps into the future", ylabel="latent error / ℓ")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    direct_labels(axes, ends)


def direct_labels(axes: Axes, ends: Sequence[tuple[float, float, Group]]) -> None:
    """Label the ends of lines, moved apart if they are close."""
    low, high = axes.get_ylim()
    gap, floor = (high - low) * 0.075, -np.inf
    for value, _, group in sorted(ends, key=lambda end: end[0]):
        name = fill(group.label, 22)
        floor = max(value, floor + gap * (1 + 0.8 * name.count("\n")))
        axes.annotate(name, (1.02, floor), xycoords=("axes fraction", "data"), va="center",
                      color=group.colour, fontsize=9, annotation_clip=False)  # fmt: skip


def relational_section(study: Study) -> Section:
    section = Section(
        "relational",
        "Relational distortion",
        "How much do distances in the latent differ from those in the encoder's patch features?",
    )
    section.blocks += diagnostic_notices(study, "relational")
    panels, rows, data = [], [], []
    for task, groups in study.measured("relational"):
        for key, title in DISTORTIONS.items():
            panels.append(
                Panel(
                    per_task(title, task, study),
                    partial(_draw_distortion, key=key, groups=groups),
                    bars_height(len(groups)),
                )
            )
        for group, results in groups:
            found = {key: _distortion(results, key) for key in DISTORTIONS}
            rows.append(
                [task_name(task), group.label, *(e.text(3) if e else "not available" for e in found.values())]
            )
            data += [{"task": task, "method": group.label, "statistic": key, "runs": len(results),
                      "median": e and e.value, "low": e and e.low, "high": e and e.high}
                     for key, e in found.items()]  # fmt: skip
    if panels:
        section.blocks += [
            Figure("relational", "Distortion of pairwise distances", panels, captions.RELATIONAL, 3),
            Table(
                "relational",
                "Distortion of pairwise distances, median over queries",
                ["Task", "Method", *DISTORTIONS.values()],
                rows,
                data,
                IN_BRACKETS,
                folded=True,
            ).without_constant("Task"),
        ]
    return section


def _distortion(results: Sequence[Json], key: str) -> Estimate | None:
    return Estimate.of([(r[key]["median"], r[key]["low"], r[key]["high"]) for r in results], 0)


def _draw_distortion(axes: Axes, key: str, groups: Measured) -> None:
    rows = []
    for group, results in groups:
        estimate = _distortion(results, key)
        text = f"{estimate.value:.3f}" if estimate else None
        rows.append(Bar(group.label, estimate, group.colour, ALPHAS[min(group.variant, 2)], text))
    bars(axes, rows)
    axes.xaxis.set_major_locator(MaxNLocator(4))


def regret_section(study: Study) -> Section:
    section = Section(
        "regret",
        "Planning bound and regret",
        "How much worse than the best candidate is the chosen one, and what does the theory guarantee?",
    )
    section.blocks += diagnostic_notices(study, "regret") + _not_covered(study)
    scatters, parts, rows, data = [], [], [], []
    for task, measured in study.measured("regret"):
        groups = [(group, results) for group, results in measured if not _plans_by_time(group.runs[0])]
        if not groups:
            continue
        most = max((v for _, rs in groups for r in rs for v in r["regret"] if v is not None), default=1.0)
        high = max((v for _, rs in groups for r in rs for v in r["bound"] if v is not None), default=1.0)
        for group, results in groups:
            draw = partial(
                _draw_scatter, group=group, results=results, reach=(most * 1.08 or 1.0, high * 1.08 or 1.0)
            )
            scatters.append(Panel(per_task(group.label, task, study), draw, 3.2))
            row = _regret_row(results)
            shares = [row[term] for term in TERMS]
            rows.append(
                [
                    task_name(task),
                    group.label,
                    *(
                        ("not available" if v is None else f"{v:.3f}")
                        for v in [row["regret"], row["bound"], *shares]
                    ),
                    f"{row['guaranteed']} of {row['queries']}",
                ]
            )
            data.append({"task": task, "method": group.label, "runs": len(results), **row})
        parts.append(
            Panel(task_name(task), partial(_draw_terms, groups=groups), bars_height(len(groups)) + 0.6, 4.6)
        )
    if scatters:
        section.blocks += [
            Figure("regret", "Bound against regret", scatters, captions.REGRET),
            Figure("decomposition", "Terms of the bound", parts, captions.DECOMPOSITION, 3),
            Table(
                "regret",
                "Regret, bound and its terms",
                [
                    "Task",
                    "Method",
                    "Mean regret",
                    "Mean bound",
                    *(t.capitalize() for t in TERMS.values()),
                    "Guaranteed",
                ],
                rows,
                data,
                "Means over queries (and runs). Guaranteed: queries whose margin is wide enough for the theory to "
                "guarantee the best choice.",
                folded=True,
            ).without_constant("Task"),
        ]
    return section


def _cost(run: Run) -> str:
    plan = run.config["config"]["plan"]
    return str(plan.get("cost", plan.get("rule", "terminal")))  # rule: the name in older runs


def _plans_by_time(run: Run) -> bool:
    return _cost(run) == "temporal"


def _not_covered(study: Study) -> list[Notice]:
    """The bound is one on the latent distance, which the cost temporal does not minimise, and on the choice by the
    last predicted latent. The cost nearest chooses by the step that comes nearest, so its plans have no bound, but
    that choice can be measured for its runs as for others."""
    left_out = [run for run in study.runs if _plans_by_time(run)]
    evaluated = [
        run
        for run in study.runs
        if run not in left_out and any(e.result.plan.cost == "temporal" for e in run.evaluations.values())
    ]
    reason = "The paper's bounds do not cover plans with the cost temporal"
    texts = [(left_out, f"{reason}, so none is shown for"), (evaluated, f"{reason}, such as those evaluated of")]
    costs = [{_cost(run), *(e.result.plan.cost for e in run.evaluations.values())} for run in study.runs]
    reason = "Regret and bound are for the choice by the predicted end. They do not cover plans with the cost"
    for cost in sorted(set().union(*costs) - {"terminal", "temporal"}):
        concerned = [run for run, used in zip(study.runs, costs, strict=True) if cost in used]
        texts.append((concerned, f"{reason} {cost}, such as those of"))
    return [Notice("note", f"{text} {names(runs)}.") for runs, text in texts if runs]


def _regret_row(results: Sequence[Json]) -> Json:
    return {
        "regret": average(v for r in results for v in r["regret"]),
        "bound": average(v for r in results for v in r["bound"]),
        **{term: average(r["means"].get(term) for r in results) for term in TERMS},
        "guaranteed": sum(r["guaranteed"] for r in results),
        "queries": sum(len(r["bound"]) for r in results),
    }


def _draw_scatter(axes: Axes, group: Group, results: Sequence[Json], reach: tuple[float, float]) -> None:
    for result in results:
        regret, bound = (np.array(result[key], float) for key in ("regret", "bound"))
        axes.scatter(regret, bound, s=12, color=group.colour, alpha=0.6, lw=0, rasterized=len(regret) > 500)
    end = min(reach)
    axes.plot([0, end], [0, end], color=MUTED, lw=1, ls=(0, (4, 3)))
    axes.annotate(
        "equality",
        (end, end),
        (-4, 6),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=8,
        color=MUTED,
    )
    axes.set(
        xlim=(-0.03 * reach[0], reach[0]),
        ylim=(0, reach[1]),
        xlabel="regret of the chosen candidate",
        ylabel="bound",
    )
    axes.xaxis.set_major_locator(MaxNLocator(4))


def _draw_terms(axes: Axes, groups: Measured) -> None:
    totals = []
    for index, (group, results) in enumerate(groups):
        row, left = _regret_row(results), 0.0
        axes.annotate(group.label, (0, -index), (1, 9), textcoords="offset points", va="bottom", fontsize=9)
        for term in TERMS:
            value = row[term]
            if value is not None:
                axes.barh(-index, value, 0.44, left=left, color=TERM_COLOURS[term])
                axes.annotate(f"{value:.2f}", (left + value / 2, -index), ha="center", va="center", fontsize=8,
                              color=TERM_TEXT, gid=f"{value}")  # fmt: skip
                left += value
        total = "sum not available" if None in (row[term] for term in TERMS) else f"{left:.2f}"
        axes.annotate(total, (left, -index), (5, 0), textcoords="offset points", va="center", fontsize=9)
        totals.append(left)
    reach = max(totals, default=1.0) or 1.0
    for text in [t for t in axes.texts if t.get_gid()]:  # the part is too short for its number
        if float(str(text.get_gid())) < 0.09 * reach:
            text.remove()
    axes.set(
        ylim=(-len(groups) + 0.4, 0.9),
        xlim=(0, reach * 1.15),
        yticks=[],
        xlabel="mean ε_plan; the bound is twice this",
    )
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    keys = [Patch(color=TERM_COLOURS[term], label=label) for term, label in TERMS.items()]
    axes.legend(handles=keys, loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=3, fontsize=9)
