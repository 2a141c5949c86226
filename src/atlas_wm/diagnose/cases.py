"""Films of the same episodes for every run: where one arrives and the other does not (fig. cases)."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from atlas_wm.diagnose.probe import evaluated_episodes
from atlas_wm.diagnose.subject import Subject
from atlas_wm.evaluate.rollout import planning_policy, run_episodes
from atlas_wm.evaluate.stage import FILM_EVERY, Stage
from atlas_wm.plan.planner import Planner

SHOWN = 7  # frames of a strip, besides the goal


def choose_rows(runs: Sequence[Path], offset: int, count: int = 4) -> list[int]:
    """Starts that all runs were evaluated from: first those on which they differ, then failures, then the others.

    Within each kind the most unusual come first.
    """
    by_run = [{e["row"]: e for e in evaluated_episodes(run, offset)} for run in runs]
    common = set.intersection(*(set(episodes) for episodes in by_run))

    def kind(row: int) -> tuple[int, float]:
        outcomes = [episodes[row]["success"] for episodes in by_run]
        return (0 if len(set(outcomes)) > 1 else 2 if all(outcomes) else 1), -by_run[0][row]["novelty"]

    return sorted(common, key=kind)[:count]


def cases(subject: Subject, rows: Sequence[int], offset: int) -> dict[str, Any]:
    """The chosen episodes again, with the same random streams, filmed."""
    known = {e["row"]: e for e in evaluated_episodes(subject.run, offset)}
    chosen = [known[row] for row in rows]
    stage = Stage(subject.data.task, subject.data.image_size)
    try:
        records, films = run_episodes(
            [stage],
            subject.data,
            planning_policy(Planner(subject.model), chosen[0]["seed"]),
            list(rows),
            offset,
            chosen[0]["budget"],
            films=set(rows),
        )
    finally:
        stage.close()
    return {
        "episodes": [
            {
                "row": record.row,
                "success": record.success,
                "steps": record.steps,
                "novelty": known[record.row]["novelty"],
                **_strip(films[record.row], record.steps),
            }
            for record in records
        ]
    }


def _strip(film: np.ndarray, steps: int) -> dict[str, Any]:
    """A few frames from the first to the last, and the goal."""
    taken = [*range(0, steps, FILM_EVERY), steps]
    which = np.unique(np.linspace(0, len(taken) - 1, SHOWN).round().astype(int))
    frames = [film[i] for i in which] + [film[-1]]
    return {"shown_steps": [taken[i] for i in which], "frames": [_png(frame) for frame in frames]}


def _png(frame: np.ndarray) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()
