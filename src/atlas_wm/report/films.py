"""Films of planned episodes: one strip per method, and an animation."""

import base64
import io
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from PIL import Image

from atlas_wm.errors import UserError, reason
from atlas_wm.report import captions
from atlas_wm.report.naming import file_name, method_name, task_name
from atlas_wm.report.runs import Study
from atlas_wm.report.section import Section, diagnostic_notices
from atlas_wm.report.style import BAD, GOOD, MUTED, Figure, Panel
from atlas_wm.runs.films import film_rows, film_steps, films_path
from atlas_wm.runs.results import EvaluationResult

MOST_EPISODES = 6
MOST_FRAMES, MOST_PIXELS = 20, 4096  # frames per strip, pixels per side of a frame
MOST_BYTES = 2**28  # of a film
INCHES_PER_FRAME = 0.98
DAMAGED = (OSError, ValueError, LookupError, EOFError, BadZipFile, zlib.error)  # what reading films raises


@dataclass(frozen=True)
class Strip:
    label: str
    success: bool
    steps: int
    shown_steps: Sequence[int]
    frames: Sequence[np.ndarray]  # (H, W, 3) uint8
    goal: np.ndarray
    marks: Sequence[str] = ()  # above the frames; empty: their steps


def draw_strips(axes: Axes, strips: Sequence[Strip], columns: int, label_width: float) -> None:
    """Draw strips in units of frames: the name, the frames with their step, the goal at the right."""
    for index, strip in enumerate(strips):
        bottom = -1.22 * (index + 1)
        colour = GOOD if strip.success else BAD
        outcome = f"reached in {strip.steps}" if strip.success else f"not reached in {strip.steps}"
        marks = strip.marks or [f"step {step}" for step in strip.shown_steps]
        axes.text(-0.12, bottom + 0.62, strip.label, ha="right", va="center", fontsize=9, weight="bold")
        axes.text(-0.12, bottom + 0.38, outcome, ha="right", va="center", fontsize=8.5, color=colour)
        for column, (frame, mark) in enumerate(zip(strip.frames, marks, strict=True)):
            axes.imshow(frame, extent=(column, column + 0.96, bottom, bottom + 0.96))
            axes.text(column + 0.48, bottom + 1.0, mark, ha="center", va="bottom", fontsize=7.5, color=MUTED)
        left = columns + 0.12
        axes.imshow(strip.goal, extent=(left, left + 0.96, bottom, bottom + 0.96))
        axes.add_patch(Rectangle((left, bottom), 0.96, 0.96, fill=False, ec=colour, lw=2.5))
        axes.text(left + 0.48, bottom + 1.0, "goal", ha="center", va="bottom", fontsize=7.5, color=MUTED)
    axes.set(xlim=(-label_width, columns + 1.12), ylim=(-1.22 * len(strips) - 0.03, 0))
    axes.axis("off")


def strips_panel(title: str, strips: Sequence[Strip]) -> Panel:
    columns = max(len(strip.frames) for strip in strips)
    label_width = 0.25 + 0.085 * max(18, *(len(strip.label) for strip in strips))  # in frames
    width = INCHES_PER_FRAME * (label_width + columns + 1.12)
    height = INCHES_PER_FRAME * 1.22 * len(strips) + 0.55
    return Panel(
        title, partial(draw_strips, strips=strips, columns=columns, label_width=label_width), height, width
    )


def cases_section(study: Study) -> Section:
    section = Section("cases", "Episodes side by side", "What do success and failure look like?")
    section.blocks += diagnostic_notices(study, "cases")
    for task in study.tasks:
        # One run per group: films of more training seeds add little.
        shown = [(g, run) for g in study.of_task(task) for run in g.runs if "cases" in run.diagnostics]
        shown = [(g, run) for i, (g, run) in enumerate(shown) if g not in [other for other, _ in shown[:i]]]
        if not shown:
            continue
        films = {
            run.name: {e["row"]: e for e in run.diagnostics["cases"]["result"]["episodes"]} for _, run in shown
        }
        rows = list(dict.fromkeys(row for film in films.values() for row in film))
        rows.sort(key=lambda row: -sum(row in film for film in films.values()))  # first those of all runs
        panels = []
        for row in rows[:MOST_EPISODES]:
            here = [(g, run, films[run.name][row]) for g, run in shown if row in films[run.name]]
            novelty = here[0][2].get("novelty")
            title = f"{task_name(task)}, start row {row}" + ("" if novelty is None else f", novelty {novelty:.2f}")
            labels = [
                g.label if len(g.runs) == 1 else f"{method_name(g.method)} ({run.name})" for g, run, _ in here
            ]
            panels.append(
                strips_panel(title, [_strip(label, e) for label, (_, _, e) in zip(labels, here, strict=True)])
            )
        if panels:
            name = "cases" if len(study.tasks) == 1 else f"cases-{file_name(task)}"
            section.blocks.append(Figure(name, f"{task_name(task)}: the same episodes", panels, captions.CASES, 1))
    return section


def _strip(label: str, episode: dict[str, Any]) -> Strip:
    stored = episode["frames"]
    *frames, goal = [read_image(f) for f in [*stored[: len(stored) - 1][:MOST_FRAMES], stored[-1]]]
    return Strip(label, bool(episode["success"]), episode["steps"], episode["shown_steps"], frames, goal)


def read_image(text: str) -> np.ndarray:
    image = Image.open(io.BytesIO(base64.b64decode(text)))
    if max(image.size) > MOST_PIXELS:  # checked before decoding: a small file may hold a giant image
        raise ValueError(f"an image of {image.size} pixels")
    return np.asarray(image.convert("RGB"))


def film_strips(files: Sequence[Path], path: Path, most: int = 3, columns: int = 9) -> str:
    """Write one image of the episodes that all these evaluations (``RUN/evaluation/*.json``) have a film of.

    Returns a line that says what it shows, or why there is no image.
    """
    found = [(EvaluationResult.read(file), read_films(file)) for file in files]
    shared = [row for row in found[0][1] if all(row in films for _, films in found)]
    if not shared:
        path.unlink(missing_ok=True)
        each = "; ".join(
            f"{file}: {', '.join(map(str, films)) or 'none'}" for file, (_, films) in zip(files, found, strict=True)
        )
        return f"no {path.name}: the films of the runs have no start row in common ({each})"
    panels = []
    for row in shared[:most]:
        strips = []
        for result, films in found:
            film = films[row]
            record = next(e for episodes in result.model.episodes.values() for e in episodes if e.row == row)
            steps = film_steps(len(film) - 1, record.steps, result.film_every)
            shown = np.unique(np.linspace(0, len(film) - 2, columns).round().astype(int))
            frames = [film[i] for i in shown]
            label = method_name(result.method)
            strips.append(Strip(label, record.success, record.steps, [steps[i] for i in shown], frames, film[-1]))
        panels.append(strips_panel("", strips))
    Figure(path.stem, "", panels, captions.CASES, columns=1).write(path.parent)
    return f"films {path}: {len(panels)} of the {len(shared)} episodes that were filmed in all runs"


def read_films(file: Path) -> dict[int, np.ndarray]:
    """The films of an evaluation by start row: (frames, H, W, 3) uint8, the goal last. There may be none."""
    path = films_path(file)
    if not path.exists():
        return {}
    try:
        with np.load(path) as stored:
            return {row: stored[name] for row, name in zip(film_rows(stored.files), stored.files, strict=True)}
    except DAMAGED as error:
        raise UserError(f"{path} is damaged ({reason(error)}): delete it and run `atlas eval` again") from error


def first_frame(file: Path) -> np.ndarray | None:
    """The first frame of the first film of an evaluation: (H, W, 3) uint8. None without films."""
    path = films_path(file)
    if not path.exists():
        return None
    try:
        with np.load(path) as stored:
            if not stored.files:
                return None
            size = stored.zip.getinfo(f"{stored.files[0]}.npy").file_size
            if size > MOST_BYTES:  # checked before reading: a small file may hold a giant film
                raise ValueError(f"a film of {size:,} bytes")
            frame = stored[stored.files[0]][0]
            if frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8:
                raise ValueError(f"a frame of shape {frame.shape} and type {frame.dtype}")
            return frame
    except DAMAGED as error:
        raise UserError(f"{path} is damaged ({reason(error)}): delete it and run `atlas eval` again") from error


def film_gif(file: Path, path: Path) -> str:
    """Write the first filmed episode as an animation with the goal at the right. Returns a line that says so."""
    film = next(iter(read_films(file).values()), None)
    if film is None:
        path.unlink(missing_ok=True)
        return f"no {path.name}: {file} has no films"
    goal, gap = film[-1], np.full((film.shape[1], 8, 3), 200, np.uint8)
    images = [Image.fromarray(np.hstack([frame, gap, goal])) for frame in film[:-1]]
    images[0].save(path, save_all=True, append_images=images[1:], duration=250, loop=0)
    return f"animation {path}"
