"""Draw the figures of docs/results.md from the files in docs/results/: python tools/results_figures.py docs/images

results-methods.png: success of methods and ways to plan, goals 100 steps away. results-tasks.png: the three tasks.
"""

import csv
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from atlas_wm.report.intervals import wilson
from atlas_wm.report.naming import METHODS
from atlas_wm.report.style import INK, LINE, MUTED, STYLE
from atlas_wm.task_table import TASKS, WITH_ENV

FILES = Path(__file__).parent.parent / "docs" / "results"
NAMES = {("pldm", "demo+tuned"): "PLDM, tuned", ("pldm", "demo"): "PLDM, paper's weights"}
WAYS = {  # cost, start: what it is called
    ("terminal", "zero"): "paper's plan",
    ("terminal", "retrieval"): "retrieval",
    ("temporal", "zero"): "temporal cost",
}
MODEL = METHODS["atlas"].colour
Row, Panel = dict[str, str], Callable[[Axes], None]


def read(name: str) -> list[Row]:
    return list(csv.DictReader((FILES / name).read_text().splitlines()))


def differences(study: str, key: Callable[[Row], tuple[str, str]]) -> dict[tuple[str, str], str]:
    """The text of each difference of a study, with its interval for other training seeds."""
    found, columns = {}, ("points", "seeds_low", "seeds_high")
    for row in read("differences.csv"):
        if row["study"] == f"docs/results/{study}.toml":
            points, low, high = (f"{float(row[name]):+.1f}".replace("-", "−") for name in columns)
            found[key(row)] = f"{points} [{low}, {high}]"
    return found


def beside(ax: Axes, y: float, text: str, shift: float, **style: Any) -> None:
    """Text outside of the axes: ``shift`` points to the right of them, or to the left."""
    at, side = (1, "left") if shift > 0 else (0, "right")
    ax.annotate(text, (at, y), (shift, 0), xycoords=ax.get_yaxis_transform(), textcoords="offset points",
                ha=side, va="center", annotation_clip=False, **style)  # fmt: skip


def line(ax: Axes, y: float, label: str, runs: Sequence[Row]) -> None:
    """One dot and interval for each training seed, a bar and a number for their mean."""
    colour = METHODS[runs[0]["method"]].colour
    for shift, run in zip((0.2, 0.0, -0.2), sorted(runs, key=lambda run: run["seed"]), strict=True):
        value, low, high = wilson(float(run["success"]), int(run["episodes"]))
        ax.plot([low, high], [y + shift] * 2, color=colour, lw=1.4, alpha=0.5)
        ax.plot(value, y + shift, "o", color=colour, ms=4.5, clip_on=False)
    centre = mean(float(run["success"]) for run in runs)
    ax.plot([centre] * 2, [y - 0.36, y + 0.36], color=INK, lw=1.6)
    beside(ax, y, label, -6)
    beside(ax, y, f"{centre:.1f}", 6, weight="bold")


def methods(ax: Axes) -> None:
    groups: dict[tuple[str, str], list[Row]] = {}
    for run in read("fair-demo-far.csv"):
        groups.setdefault((run["method"], run["recipe"]), []).append(run)
    less = differences("fair-demo-far", lambda row: (row["less"], row["less_recipe"]))
    ordered = sorted(groups, key=lambda key: -mean(float(run["success"]) for run in groups[key]))
    for index, key in enumerate(ordered):
        line(ax, -index, NAMES.get(key, METHODS[key[0]].name), groups[key])
        beside(ax, -index, less.get(key, ""), 42)
    beside(ax, 0.85, "mean    ATLAS − method, points", 6, color=MUTED, size=8)
    ax.set(title="Six methods, the paper's plan", ylim=(-len(ordered) + 0.4, 0.6))


def ways(ax: Axes) -> None:
    runs = read("ways-demo-far.csv")
    less = differences("ways-demo-far", lambda row: (row["cost"], row["start"]))
    for index, way in enumerate(WAYS):
        for place, method in enumerate(("atlas", "lewm")):
            of = [run for run in runs if (run["method"], run["cost"], run["start"]) == (method, *way)]
            line(ax, -2.5 * index - place, f"{METHODS[method].name}, {WAYS[way]}", of)
        beside(ax, -2.5 * index - 0.5, less[way], 42)
    beside(ax, 0.85, "mean    ATLAS − LeWM, points", 6, color=MUTED, size=8)
    ax.set(title="Two of them, three ways to plan", ylim=(-6.6, 0.6))


def tasks(ax: Axes, column: str, title: str) -> None:
    """From random actions to `tuned`, goals 25 and 50 steps away."""
    if everything := column == "success":
        beside(ax, 0.85, "task, offset", -6, color=MUTED, size=8)
    for index, (task, offset) in enumerate(product(WITH_ENV, ("25", "50"))):
        here = [r for r in read("tasks.csv") if (r["task"], r["offset"], r["episodes"]) == (task, offset, "1000")]
        start = "zero" if task == "tworoom" else "retrieval"  # what `--recipe tuned` of the task plans with
        (model,) = (r for r in here if (r["policy"], r["cost"], r["start"]) == ("model", "nearest", start))
        same = [r for r in here if r["solved_at_start"] == model["solved_at_start"]]  # the same episodes
        floor, ceiling = (next(r for r in same if r["policy"] == name) for name in ("random", "replay"))
        low, high, y = float(floor[column]), float(model[column]), -index - 0.4 * (index // 2)
        if everything:
            ax.barh(y, float(model["solved_at_start"]), 0.62, color=LINE)
            beside(ax, y, f"{TASKS[task].title}, {offset}", -6)
        ax.plot([low, high], [y, y], color=MODEL, lw=2, alpha=0.45)
        ax.plot(low, y, "o", mfc="white", mec=INK, ms=6, clip_on=False)
        ax.plot(high, y, "o", color=MODEL, ms=7, clip_on=False)
        ax.plot([float(ceiling[column])] * 2, [y - 0.34, y + 0.34], color=INK, lw=2)
        beside(ax, y, f"{high:.1f}", 6, weight="bold", color=MODEL)
        beside(ax, y, f"{low:.1f}", 42, color=MUTED)
    beside(ax, 0.85, "tuned   random", 6, color=MUTED, size=8)
    ax.set(title=title, ylim=(-6.3, 0.6))


def save(path: Path, rows: int, height: float, panels: Sequence[Panel], legend: Sequence[Artist]) -> None:
    with plt.rc_context(STYLE | {"axes.titlepad": 18}):
        canvas, axes = plt.subplots(rows, len(panels) // rows, figsize=(8, height))
        for ax, panel in zip(axes, panels, strict=True):
            panel(ax)
            ax.set(xlim=(0, 101), xticks=[0, 25, 50, 75, 100], yticks=[], xlabel="success, %")
            ax.spines["left"].set_visible(False)
        canvas.legend(handles=legend, loc="lower center", ncols=len(legend))
        canvas.tight_layout(rect=(0, 0.2 / height, 1, 1), w_pad=0.5)
        canvas.savefig(path, dpi=200, facecolor="white")


def main(out: str) -> None:
    mark = partial(Line2D, [], [], ls="none")
    one = mark(color=MUTED, marker="o", ms=4.5, ls="-", lw=1.4, label="one training seed, 95 % interval")
    several = mark(color=INK, marker="|", ms=12, mew=1.6, label="mean of the training seeds")
    save(Path(out) / "results-methods.png", 2, 5.1, (methods, ways), (one, several))
    floors = [
        Patch(color=LINE, label="solved at the start"),
        mark(mfc="white", mec=INK, marker="o", ms=6, label="random actions"),
        mark(color=MODEL, marker="o", ms=7, label="ATLAS, --recipe tuned"),
        mark(color=INK, marker="|", ms=11, mew=2, label="replayed actions"),
    ]
    titles = {"success": "All episodes", "success_of_unsolved": "Episodes not solved at the start"}
    both = [partial(tasks, column=column, title=title) for column, title in titles.items()]
    save(Path(out) / "results-tasks.png", 1, 3.1, both, floors)


if __name__ == "__main__":
    main(*sys.argv[1:])
