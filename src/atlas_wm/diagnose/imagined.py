"""Imagined futures of evaluated episodes, successes and failures, beside what happened (fig. imagined)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from atlas_wm.diagnose.cases import png
from atlas_wm.diagnose.evaluated import Evaluated
from atlas_wm.diagnose.frozen_run import FrozenRun
from atlas_wm.errors import UserError
from atlas_wm.evaluate.imagine import imagine_episode
from atlas_wm.evaluate.own_demonstrations import leave_out_own
from atlas_wm.evaluate.training_frames import TrainingFrames
from atlas_wm.images import frame_to_tensor, reduce_frames
from atlas_wm.parallel.devices import one_thread
from atlas_wm.plan.planner import Planner, dtype_of
from atlas_wm.rng import make_rng
from atlas_wm.runs.results import EpisodeResult

EACH = 2  # episodes that reached the goal, and that did not
SHOWN = 10  # action chunks, at most
SIDE = 96  # px of the real frames, at most


def choose_episodes(episodes: Sequence[EpisodeResult]) -> list[EpisodeResult]:
    """Failures, then successes that were not there at the start: the longest first."""
    chosen = []
    for success in (False, True):
        some = [e for e in episodes if e.success == success and not e.solved_at_start]
        chosen += sorted(some, key=lambda e: (-e.steps, e.row))[:EACH]
    return chosen


def imagined(run: FrozenRun, evaluation: Evaluated, offset: int) -> dict[str, Any]:
    """Repeat episodes with the evaluation's planner and rngs."""
    planner = Planner(run.model, evaluation.plan, plain=evaluation.plain, dtype=dtype_of(evaluation.precision))
    left_out = leave_out_own(planner, run.data, run.groups if planner.retrieval is not None else None)
    known = TrainingFrames(run.bank.z, lambda which: run.training.frames_of(run.bank_rows[which]))
    chosen, data, found = choose_episodes(evaluation.episodes), run.data, []
    if not chosen:
        raise UserError("every evaluated episode was solved at its start")
    env = data.task.make_env()
    try:
        with one_thread():
            for episode in chosen:
                row = episode.row
                states = data.start_states(np.array([row]))[0], data.states[row + offset]
                data.task.reset(env, *states)
                future, _ = imagine_episode(
                    planner,
                    known,
                    data.task,
                    env,
                    states[1],
                    data.frame(row + offset)[0],
                    lambda number, row=row: make_rng(evaluation.seed, row, number),  # type: ignore[misc]
                    evaluation.budget,
                    left_out(row),
                )
                found.append(
                    {
                        "row": row,
                        "success": future.success,
                        "steps": future.imagined[-1].step,
                        "shown_steps": [one.step for one in future.imagined[:SHOWN]],
                        "distances": [round(one.distance, 2) for one in future.imagined[:SHOWN]],
                        "imagined": [_small(one.frame) for one in future.imagined[:SHOWN]],
                        "real": [_small(one.real) for one in future.imagined[:SHOWN]],
                        "goal": _small(future.goal),
                    }
                )
    finally:
        env.close()
    return {"episodes": found}


def _small(frame: np.ndarray | None) -> str:
    tensor = frame_to_tensor(frame)
    return png(reduce_frames(tensor, min(SIDE, *tensor.shape[-2:]))[0].permute(1, 2, 0).numpy())
