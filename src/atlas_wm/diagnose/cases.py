"""Films of the same episodes for every run (fig. cases)."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from atlas_wm.diagnose.evaluated import Evaluated, find_each_evaluated
from atlas_wm.diagnose.frozen_run import FrozenRun
from atlas_wm.errors import UserError
from atlas_wm.evaluate.env_batch import FILM_EVERY, EnvBatch
from atlas_wm.evaluate.own_demonstrations import leave_out_own
from atlas_wm.evaluate.rollout import planning_policy, run_episodes
from atlas_wm.parallel.devices import one_thread
from atlas_wm.plan.planner import Planner, dtype_of
from atlas_wm.runs.films import film_steps

SHOWN = 7  # frames of a strip, not counting the goal


def choose_rows(runs: Sequence[Path], offset: int, data: str, count: int = 4) -> list[int]:
    """Start rows that all evaluations of these runs on this dataset (its hash) share.

    Episodes on which the runs differ come first, then failures, then the rest; each by falling novelty. A second
    row of one demonstration is taken only when no other demonstration is left: it shows nearly the same episode.
    """
    found = find_each_evaluated(runs, offset, data)
    by_run = [{e.row: e for e in evaluation.episodes} for evaluation in found if evaluation is not None]
    common = set(by_run[0]).intersection(*by_run)
    if not common:
        raise UserError("the runs have no start row in common: evaluate them with the same --seeds")

    def rank(row: int) -> tuple[int, float, int]:
        outcomes = [episodes[row].success for episodes in by_run]
        return (0 if len(set(outcomes)) > 1 else 2 if all(outcomes) else 1), -by_run[0][row].novelty, row

    ranked = sorted(common, key=rank)
    first = {by_run[0][row].episode: row for row in reversed(ranked)}  # the best row of each demonstration
    return sorted(ranked, key=lambda row: first[by_run[0][row].episode] != row)[:count]


def cases(run: FrozenRun, evaluation: Evaluated, rows: Sequence[int], offset: int) -> dict[str, Any]:
    """Repeat and film the chosen episodes with the evaluation's planner and rngs."""
    known = {e.row: e for e in evaluation.episodes}
    planner = Planner(run.model, evaluation.plan, plain=evaluation.plain, dtype=dtype_of(evaluation.precision))
    left_out = leave_out_own(planner, run.data, run.groups if planner.retrieval is not None else None)
    envs = EnvBatch(run.data.task, run.data.image_size)
    try:
        with one_thread():  # as evaluations plan
            records, films = run_episodes(
                [envs],
                run.data,
                planning_policy(planner, evaluation.seed, left_out=left_out),
                rows,
                offset,
                evaluation.budget,
                films=set(rows),
            )
    finally:
        envs.close()
    episodes = [
        {
            "row": record.row,
            "success": record.success,
            "steps": record.steps,
            "novelty": known[record.row].novelty,
            **_strip(films[record.row], record.steps),
        }
        for record in records
    ]
    result: dict[str, Any] = {"episodes": episodes}
    same = [(r.success, r.steps) == (known[r.row].success, known[r.row].steps) for r in records]
    if not all(same):
        result["note"] = (
            f"{same.count(False)} episodes ended differently than in the evaluation: "
            f"the device, the batch size or the weights have changed"
        )
    return result


def _strip(film: np.ndarray, steps: int) -> dict[str, Any]:
    """Evenly spaced frames from the first to the last, and the goal."""
    taken = film_steps(len(film) - 1, steps, FILM_EVERY)
    which = np.unique(np.linspace(0, len(taken) - 1, SHOWN).round().astype(int))
    frames = [film[i] for i in which] + [film[-1]]
    return {"shown_steps": [taken[i] for i in which], "frames": [png(frame) for frame in frames]}


def png(frame: np.ndarray) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()
