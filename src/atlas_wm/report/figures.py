"""Pictures of a run: training curves and films of planned episodes."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

from atlas_wm.report.table import NAMES
from atlas_wm.run_folder import METRICS, read_json, read_run

COLOURS = {"atlas": "#0b7285", "lewm": "#e8590c", "lewm+ood": "#f08c00", "wemreg": "#5f3dc4"}
TERMS = {
    "prediction": "prediction error of the next latent",
    "wemreg": "WEMReg: W₂² to a Gaussian",
    "sigreg": "SIGReg statistic",
    "relational": "OOD-recovery: distortion of distances",
}


def training_curves(runs: Sequence[Path], path: Path) -> None:
    """One panel for each loss term: training as a line, validation as dots."""
    metrics = {run: _read_metrics(run) for run in runs}
    terms = [t for t in TERMS if any(t in m for m in metrics.values())]
    figure, axes = plt.subplots(1, len(terms), figsize=(3.6 * len(terms), 3.0), squeeze=False, layout="constrained")
    for axis, term in zip(axes[0], terms, strict=True):
        for run, columns in metrics.items():
            if term not in columns:
                continue
            method = read_run(run)[0].method
            colour = COLOURS.get(method, "#495057")
            axis.plot(*columns[term], color=colour, lw=1.2, label=NAMES.get(method, method))
            if f"val_{term}" in columns:
                axis.plot(*columns[f"val_{term}"], "o", color=colour, ms=3.5, alpha=0.7)
        axis.set(title=TERMS[term], xlabel="step", yscale="log")
        axis.title.set_fontsize(9)
        axis.grid(alpha=0.25)
        handles = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
        axis.legend(handles.values(), handles.keys(), frameon=False, fontsize=8)
    figure.suptitle("lines: training   dots: held-out episodes", fontsize=8, color="#868e96")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _read_metrics(run: Path) -> dict[str, tuple[list[float], list[float]]]:
    """Column → (steps, values), without the empty cells and without columns that are all empty."""
    with (run / METRICS).open() as file:
        rows = list(csv.DictReader(file))
    columns = {}
    for name in rows[0] if rows else {}:
        filled = [(float(r["step"]), float(r[name])) for r in rows if r[name]]
        if filled:
            steps, values = zip(*filled, strict=True)
            columns[name] = (list(steps), list(values))
    return columns


def film_strips(runs: Sequence[Path], condition: str, path: Path, most: int = 3, columns: int = 9) -> None:
    """The same episodes, one method above the other: what the environment showed, the goal at the right."""
    films = {run: np.load(run / "evaluation" / f"{condition}.films.npz") for run in runs}
    episodes = {run: _episodes(run, condition) for run in runs}
    names = list(films[runs[0]].files)[:most]
    figure, axes = plt.subplots(
        len(names) * len(runs),
        columns + 1,
        figsize=(1.05 * (columns + 1) + 0.8, 1.2 * len(names) * len(runs) + 0.3),
        squeeze=False,
        layout="constrained",
    )
    lines = iter(axes)
    for name in names:
        for run in runs:
            film, line = films[run][name], next(lines)
            record = episodes[run][int(name.removeprefix("row"))]
            frames, goal = film[:-1], film[-1]
            shown = np.unique(np.linspace(0, len(frames) - 1, columns).round().astype(int))
            every = read_run(run)[0].config.model.frameskip
            for place, axis in enumerate(line[:-1]):
                axis.axis("off")
                if place < len(shown):
                    axis.imshow(frames[shown[place]])
                    step = record["steps"] if shown[place] == len(frames) - 1 else shown[place] * every
                    axis.set_title(f"step {step}", fontsize=6, color="#868e96", pad=2)
            method = read_run(run)[0].method
            outcome = f"reached in {record['steps']}" if record["success"] else "not reached"
            colour = "#2b8a3e" if record["success"] else "#c92a2a"
            line[0].text(
                -0.12,
                0.5,
                f"{NAMES.get(method, method)}\n{outcome}",
                transform=line[0].transAxes,
                ha="right",
                va="center",
                fontsize=8,
                color=colour,
            )
            line[-1].imshow(goal)
            line[-1].set(xticks=[], yticks=[])
            line[-1].set_title("goal", fontsize=7, pad=2)
            for side in line[-1].spines.values():
                side.set(color=colour, linewidth=2)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _episodes(run: Path, condition: str) -> dict[int, dict[str, Any]]:
    report = read_json(run / "evaluation" / f"{condition}.json")
    return {e["row"]: e for records in report["model"]["episodes"].values() for e in records}


def film_gif(run: Path, condition: str, path: Path) -> None:
    """The first filmed episode of a run as an animation, the goal beside it."""
    films = np.load(run / "evaluation" / f"{condition}.films.npz")
    film = films[films.files[0]]
    goal, gap = film[-1], np.full((film.shape[1], 8, 3), 200, np.uint8)
    pictures = [Image.fromarray(np.hstack([frame, gap, goal])) for frame in film[:-1]]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=250, loop=0)
