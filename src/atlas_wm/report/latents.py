"""The distribution of the planning latent: marginal statistics and principal components."""

from collections.abc import Sequence
from functools import partial

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from atlas_wm.report import captions
from atlas_wm.report.naming import task_name
from atlas_wm.report.page_table import Table
from atlas_wm.report.runs import Group, Json, Study
from atlas_wm.report.section import Section, diagnostic_notices, per_task
from atlas_wm.report.style import ALPHAS, MUTED, NOVELTY, Bar, Estimate, Figure, Panel, average, bars, bars_height

STATISTICS = {
    "mean_norm": "Norm of the mean",
    "covariance_error": "Covariance error",
    "cvm": "Cramér–von Mises",
    "cvm_whitened": "Cramér–von Mises, whitened",
}


def number(value: float | None) -> str:
    return "not available" if value is None else f"{value:#.3g}".rstrip(".")


def marginal_section(study: Study) -> Section:
    section = Section(
        "marginal",
        "Marginal distribution",
        "Is the latent still Gaussian on frames that no demonstration contains?",
    )
    section.blocks += diagnostic_notices(study, "marginal")
    panels, rows, data = [], [], []
    for task, groups in study.measured("marginal"):
        for key, title in STATISTICS.items():
            panels.append(
                Panel(
                    per_task(title, task, study),
                    partial(_draw_bars, key=key, groups=groups),
                    bars_height(len(groups)),
                )
            )
        for group, results in groups:
            values = {
                k: average(r.get(k) for r in results) for k in (*STATISTICS, "cvm_null", "effective_rank", "frames")
            }
            texts = [number(value) for name, value in values.items() if name != "frames"]
            frames = values["frames"]
            rows.append(
                [task_name(task), group.label, *texts, "not available" if frames is None else f"{frames:.0f}"]
            )
            data.append({"task": task, "method": group.label, "runs": len(results), **values})
    if panels:
        section.blocks += [
            Figure("marginal", "Latent statistics on frames of a random policy", panels, captions.MARGINAL),
            Table(
                "marginal",
                "Latent statistics on frames of a random policy",
                ["Task", "Method", *STATISTICS.values(), "CvM of a Gaussian sample", "Effective rank", "Frames"],
                rows,
                data,
                "Means if there are several runs.",
                folded=True,
            ).without_constant("Task"),
        ]
    return section


def _draw_bars(axes: Axes, key: str, groups: Sequence[tuple[Group, list[Json]]]) -> None:
    rows = []
    for group, results in groups:
        estimate = Estimate.of([(r.get(key), None, None) for r in results], 0)
        text = number(estimate.value) if estimate else None
        rows.append(Bar(group.label, estimate, group.colour, ALPHAS[min(group.variant, 2)], text))
    null = average(r.get("cvm_null") for _, results in groups for r in results) if key == "cvm" else None
    bars(axes, rows, reference=(null, "Gaussian sample") if null is not None else None)
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4))


def geometry_section(study: Study) -> Section:
    section = Section("geometry", "Latent geometry", "Are unusual states separated from familiar ones?")
    section.blocks += diagnostic_notices(study, "geometry")
    panels, rows, data = [], [], []
    for task, groups in study.measured("geometry"):
        for group, results in groups:
            result = results[0]
            name = f"{group.label}, first run" if len(group.runs) > 1 else group.label
            panels.append(Panel(per_task(name, task, study), partial(_draw_map, result=result), 3.5))
            shares = [100 * share for share in result["explained"]]
            correlation = Estimate.of([(r["rank_correlation"], None, None) for r in results], -1, 1)
            rows.append(
                [
                    task_name(task),
                    group.label,
                    correlation.text() if correlation else "not available",
                    " + ".join(f"{share:.0f}" for share in shares) + " %",
                    str(len(result["points"])),
                ]
            )
            data.append({"task": task, "method": group.label, "runs": len(results),
                         "rank_correlation": correlation and correlation.value,
                         "explained_1": result["explained"][0], "explained_2": result["explained"][1],
                         "points": len(result["points"])})  # fmt: skip
    if panels:
        section.blocks += [
            Figure("geometry", "Planning latent, two principal components", panels, captions.GEOMETRY),
            Table(
                "geometry",
                "Distance from the mean latent against novelty",
                ["Task", "Method", "Rank correlation", "Variance shown", "States"],
                rows,
                data,
                "Spearman rank correlation between the distance of a state's latent from the mean latent, in all "
                "dimensions, and the novelty of the true state.",
            ).without_constant("Task"),
        ]
    return section


def _draw_map(axes: Axes, result: Json) -> None:
    points = np.array(result["points"], float).reshape(-1, 2)
    novelty = np.array(result["novelty_percentile"], float)
    order = np.argsort(novelty)  # unusual states are drawn on top
    shown = axes.scatter(points[order, 0], points[order, 1], c=novelty[order], cmap=NOVELTY, vmin=0, vmax=100,
                         s=7, lw=0, alpha=0.85, rasterized=True)  # fmt: skip
    axes.set(xticks=[], yticks=[], xlabel=f"component 1 ({100 * result['explained'][0]:.0f} % of the variance)",
             ylabel=f"component 2 ({100 * result['explained'][1]:.0f} %)")  # fmt: skip
    axes.set_aspect("equal", adjustable="datalim")
    bar = plt.gcf().colorbar(shown, ax=axes, orientation="horizontal", shrink=0.7, aspect=30, pad=0.04)
    bar.set_label("novelty percentile of the true state", color=MUTED, fontsize=8)
    bar.set_ticks([0, 50, 100])
    bar.outline.set_visible(False)
