"""Does the installed environment draw what the dataset holds? A few rows are reset, rendered and compared.

Another version of an environment, or another renderer, may draw other colours, sizes or cameras. A model trained on
the stored frames then plans from frames that it has never seen.
"""

import io
import logging
import os
import subprocess
import sys

import numpy as np
import torch

from atlas_wm.data.dataset import EpisodeData
from atlas_wm.images import frame_to_tensor, reduce_frames
from atlas_wm.parallel.processes import is_main
from atlas_wm.parallel.workers import one_line
from atlas_wm.tasks import Task, get_task, task_id

log = logging.getLogger(__name__)
ROWS, AHEAD = 3, 50  # compared, and how far behind a row its goal is
TIME_LIMIT = 120.0  # seconds to make an environment and draw with it
# What lossy storage explains. At JPEG quality 95, Lance's, means are below 1 and cells below 10 on all three tasks;
# at quality 75 below 1.5 and below 17.
MOST_MEAN = 2.0  # grey levels, over a frame
GRID, MOST_CELL = 28, 24  # grey levels, of the mean over a cell of a 28×28 grid: a small thing in another colour
PIXEL_DIFFERS = 16  # grey levels, for the share that a warning names


def check_rendering(data: EpisodeData) -> None:
    """Warn if frames of a few rows and renders of the same rows differ by more than lossy storage explains.

    The environment runs in a process of its own with a time limit. Where it cannot be made or drawn, one line says
    that nothing was compared. Only the main process checks.
    """
    if not (is_main() and data.has_pixels and data.task.has_env):
        return
    rows = np.unique((len(data.states) * (np.arange(ROWS) + 0.5) / ROWS).astype(np.int64))
    episodes, _ = data.locate(rows)
    goals = np.minimum(rows + AHEAD, data.offsets[episodes] + data.lengths[episodes] - 1)
    try:
        stored = data.frames_of(rows)
        drawn = _drawn_apart(task_id(data.task), data.start_states(rows), data.states[goals])
        rendered = torch.cat([reduce_frames(frame_to_tensor(frame), data.image_size) for frame in drawn])
    except Exception as error:  # a check must not stop what would work without it
        log.info("stored frames are not compared with renders of %s: %s", data.task.name, one_line(error))
        return
    grid = min(GRID, data.image_size)
    difference = (stored.int() - rendered.int()).abs()
    cells = (reduce_frames(stored, grid).int() - reduce_frames(rendered, grid).int()).abs()
    means = difference.float().mean(dim=(1, 2, 3))
    wrong = (means > MOST_MEAN) | (cells.amax(dim=(1, 2, 3)) > MOST_CELL)
    if wrong.any():
        share = 100 * (difference[wrong].amax(dim=1) > PIXEL_DIFFERS).float().mean()
        log.warning(
            "%s: the installed environment of %s does not draw what is stored: in rows %s the frames differ by "
            "%.1f grey levels on average, and %.1f %% of the pixels by more than %d. A model trained on these "
            "frames sees others when it acts: install the versions they were made with, or collect them again",
            data.path,
            data.task.name,
            ", ".join(map(str, rows[wrong.numpy()])),
            means[wrong].mean(),
            share,
            PIXEL_DIFFERS,
        )


def _drawn(task: Task, states: np.ndarray, goals: np.ndarray) -> np.ndarray:
    """Renders of ``states``: (n, H, W, 3) uint8."""
    env, frames = task.make_env(), []
    for state, goal in zip(states, goals, strict=True):
        task.reset(env, state, goal)
        frames.append(np.asarray(env.render()))
    return np.stack(frames)


def _drawn_apart(task: str, states: np.ndarray, goals: np.ndarray) -> np.ndarray:
    """The same by another process, which may hang or die. Not by multiprocessing, which would run the user's script
    again where that has no ``if __name__ == "__main__"``."""
    asked = io.BytesIO()
    np.savez(asked, states=states, goals=goals)
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"from {__name__} import _answer; _answer({task!r})"],
            input=asked.getvalue(),
            capture_output=True,
            timeout=TIME_LIMIT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"the environment took longer than {TIME_LIMIT:.0f} s") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise RuntimeError(said[-1] if said else f"its process ended with status {done.returncode}")
    return np.load(io.BytesIO(done.stdout))


def _answer(task: str) -> None:
    """The other process: states come in on stdin, frames leave on stdout; what libraries print goes to stderr."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    asked = np.load(io.BytesIO(sys.stdin.buffer.read()))
    frames = io.BytesIO()  # NumPy does not write arrays to a pipe
    np.save(frames, _drawn(get_task(task), asked["states"], asked["goals"]))
    out.write(frames.getvalue())
    out.flush()
    os._exit(0)  # no renderer is taken down: some crash then
