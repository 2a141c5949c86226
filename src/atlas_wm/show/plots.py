"""Histograms and film strips of a dataset."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from atlas_wm.report.films import INCHES_PER_FRAME
from atlas_wm.report.naming import METHODS
from atlas_wm.report.style import CLEAR, MUTED, PANEL_WIDTH, Panel

COLOUR = METHODS["atlas"].colour  # themed: readable on light and dark pages
BINS, MOST_BINS = 50, 48  # of a histogram, and per axis of coverage


@dataclass(frozen=True)
class Film:
    label: str
    rows: int  # of the episode
    steps: Sequence[int]
    frames: np.ndarray  # (n, H, W, 3) uint8


def film_panel(title: str, films: Sequence[Film]) -> Panel:
    columns = max(len(film.frames) for film in films)
    label_width = 0.25 + 0.085 * max(len(film.label) for film in films)  # in frames
    size = INCHES_PER_FRAME * (label_width + columns), INCHES_PER_FRAME * 1.22 * len(films) + 0.45
    return Panel(
        title, partial(_draw_films, films=films, columns=columns, label_width=label_width), size[1], size[0]
    )


def _draw_films(axes: Axes, films: Sequence[Film], columns: int, label_width: float) -> None:
    for index, film in enumerate(films):
        bottom = -1.22 * (index + 1)
        axes.text(-0.12, bottom + 0.62, film.label, ha="right", va="center", fontsize=9, weight="bold")
        axes.text(-0.12, bottom + 0.38, f"{film.rows} rows", ha="right", va="center", fontsize=8.5, color=MUTED)
        for column, (frame, step) in enumerate(zip(film.frames, film.steps, strict=True)):
            axes.imshow(frame, extent=(column, column + 0.96, bottom, bottom + 0.96))
            axes.text(
                column + 0.48, bottom + 1.0, f"step {step}", ha="center", va="bottom", fontsize=7.5, color=MUTED
            )
    axes.set(xlim=(-label_width, columns), ylim=(-1.22 * len(films) - 0.03, 0))
    axes.axis("off")


def histogram(
    title: str,
    values: np.ndarray,
    unit: str,
    marks: Sequence[tuple[float, str]] = (),
    width: float = PANEL_WIDTH,
) -> Panel:
    """Of values (N,); ``marks``: positions and labels of dashed lines."""
    draw = partial(_draw_histogram, values=values[np.isfinite(values)], unit=unit, marks=marks)
    return Panel(title, draw, width=width)


def _draw_histogram(axes: Axes, values: np.ndarray, unit: str, marks: Sequence[tuple[float, str]]) -> None:
    whole = np.array_equal(values, np.round(values)) and np.ptp(values) < BINS
    edges = np.arange(values.min(), values.max() + 2) - 0.5 if whole else BINS
    axes.stairs(*np.histogram(values, edges), fill=True, color=COLOUR)
    for position, label in marks:
        axes.axvline(position, color=MUTED, lw=1, ls=(0, (4, 3)))
        axes.annotate(label, (position, 1), (3, -2), xycoords=("data", "axes fraction"),
                      textcoords="offset points", fontsize=8, color=MUTED, va="top", bbox=CLEAR)  # fmt: skip
    axes.margins(y=0.18 if any(label for _, label in marks) else 0.05)
    axes.set(xlabel=unit)


def coverage(title: str, points: np.ndarray, labels: tuple[str, str], unit: str = "") -> Panel:
    """How many of N points (N, 2) are in each cell. ``unit``: that of both axes, which then have the same scale."""
    points = points[np.isfinite(points).all(axis=1)]
    return Panel(title, partial(_draw_coverage, points=points, labels=labels, unit=unit), height=3.2)


def _draw_coverage(axes: Axes, points: np.ndarray, labels: tuple[str, str], unit: str) -> None:
    bins = int(np.clip(len(points) ** 0.5 / 2, 8, MOST_BINS))
    counts, x, y = np.histogram2d(points[:, 0], points[:, 1], bins)
    axes.imshow(
        np.ma.masked_equal(counts.T, 0),
        extent=(x[0], x[-1], y[0], y[-1]),
        origin="lower",
        norm=LogNorm(1, max(2, counts.max())),
        aspect="equal" if unit else "auto",
        interpolation="nearest",
    )
    if unit == "px":  # as in the image, where y points down
        axes.invert_yaxis()
    axes.set(
        xlabel=f"{labels[0]} [{unit}]" if unit else labels[0], ylabel=f"{labels[1]} [{unit}]" if unit else labels[1]
    )
    axes.grid(visible=False)
