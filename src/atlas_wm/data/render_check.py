"""Check that the installed environment renders the stored frames: reset to a few rows, render and compare.

Another version of an environment or renderer may change colours, sizes or the camera. A model trained on the stored
frames would then plan from frames unlike any it was trained on.
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
ROWS, AHEAD = 3, 50  # rows compared, and rows from each to its goal
TIME_LIMIT = 120.0  # seconds to make an environment and render
# Differences that lossy storage explains. At JPEG quality 95 (Lance) means are below 1 and cells below 10 on all
# three tasks; at quality 75 below 1.5 and below 17.
MOST_MEAN = 2.0  # grey levels, over a frame
GRID, MOST_CELL = 28, 24  # grey levels, mean over a cell of a 28×28 grid: detects small objects in other colours
PIXEL_DIFFERS = 16  # grey levels, for the share of pixels in the warning
REMEDY = (
    "A model trained on these frames will see others when it acts: install the versions that recorded them, or "
    "collect again"
)


def check_rendering(data: EpisodeData) -> None:
    """Warn if the stored frames of a few rows differ from their renders by more than lossy storage explains.

    The environment runs in a separate process with a time limit. If it fails, a log line says that nothing was
    compared. Only the main process checks. Tasks without an environment are not checked.
    """
    if not is_main():
        return
    try:
        difference = rendering_difference(data)
    except Exception as error:  # a failing check must not stop training
        log.info("stored frames are not compared with renders of %s: %s", data.task.name, one_line(error))
        return
    if difference:
        log.warning("%s: %s. %s", data.path, difference, REMEDY)


def rendering_difference(data: EpisodeData) -> str:
    """How the stored frames of a few rows differ from their renders; empty if they do not, or if the data has no
    frames or no environment. Raises what the environment raises."""
    if not (data.has_pixels and data.task.has_env):
        return ""
    rows = np.unique((len(data.states) * (np.arange(ROWS) + 0.5) / ROWS).astype(np.int64))
    episodes, _ = data.locate(rows)
    goals = np.minimum(rows + AHEAD, data.offsets[episodes] + data.lengths[episodes] - 1)
    stored = data.frames_of(rows)
    frames = _render_in_subprocess(task_id(data.task), data.start_states(rows), data.states[goals])
    rendered = torch.cat([reduce_frames(frame_to_tensor(frame), data.image_size) for frame in frames])
    grid = min(GRID, data.image_size)
    difference = (stored.int() - rendered.int()).abs()
    cells = (reduce_frames(stored, grid).int() - reduce_frames(rendered, grid).int()).abs()
    means = difference.float().mean(dim=(1, 2, 3))
    wrong = (means > MOST_MEAN) | (cells.amax(dim=(1, 2, 3)) > MOST_CELL)
    if not wrong.any():
        return ""
    share = 100 * (difference[wrong].amax(dim=1) > PIXEL_DIFFERS).float().mean()
    return (
        f"the installed environment of {data.task.name} renders other frames than the stored ones: rows "
        f"{', '.join(map(str, rows[wrong.numpy()]))} differ by {means[wrong].mean():.1f} grey levels on average, "
        f"and {share:.1f} % of the pixels by more than {PIXEL_DIFFERS}"
    )


def _render(task: Task, states: np.ndarray, goals: np.ndarray) -> np.ndarray:
    """Renders of ``states``: (n, H, W, 3) uint8."""
    env, frames = task.make_env(), []
    for state, goal in zip(states, goals, strict=True):
        task.reset(env, state, goal)
        frames.append(np.asarray(env.render()))
    return np.stack(frames)


def _render_in_subprocess(task: str, states: np.ndarray, goals: np.ndarray) -> np.ndarray:
    """The same in a subprocess, which may hang or die. Not multiprocessing, which would run the user's script again
    if that has no ``if __name__ == "__main__"``."""
    request = io.BytesIO()
    np.savez(request, states=states, goals=goals)
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"from {__name__} import _answer; _answer({task!r})"],
            input=request.getvalue(),
            capture_output=True,
            timeout=TIME_LIMIT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"the environment took longer than {TIME_LIMIT:.0f} s") from None
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"its process ended with status {done.returncode}")
    return np.load(io.BytesIO(done.stdout))


def _answer(task: str) -> None:
    """The subprocess: reads states from stdin, writes frames to stdout; what libraries print goes to stderr."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    request = np.load(io.BytesIO(sys.stdin.buffer.read()))
    frames = io.BytesIO()  # NumPy cannot write arrays to a pipe
    np.save(frames, _render(get_task(task), request["states"], request["goals"]))
    out.write(frames.getvalue())
    out.flush()
    os._exit(0)  # without shutting renderers down: some crash
