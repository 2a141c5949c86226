"""Planning queries that all models share: start states, goals, candidate actions, and their true outcomes.

They depend on the dataset and the settings, not on a model: runs diagnosed one by one get the same queries.
"""

import hashlib
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import numpy as np

from atlas_wm.data.dataset import EpisodeData
from atlas_wm.diagnose.catalog import QuerySettings
from atlas_wm.diagnose.frozen_run import OnProgress
from atlas_wm.diagnose.simulate import Simulator
from atlas_wm.evaluate.protocol import Protocol, draw_starts
from atlas_wm.normalizer import Normalizer
from atlas_wm.parallel.processes import from_main, is_main, sharded_map
from atlas_wm.rng import DiagnoseRng
from atlas_wm.runs.files import write_atomically
from atlas_wm.tasks import task_id

RESETS = 2  # increase it when the reset of a task changes: stored outcomes began in other states


@dataclass(frozen=True)
class Queries:
    """Q starts and goals, C action sequences for each, and the states they lead to."""

    rows: np.ndarray  # (Q,) dataset rows of the starts
    goal_rows: np.ndarray  # (Q,)
    actions: np.ndarray  # (Q, C, H, frameskip, A) in the environment's units
    states: np.ndarray  # (Q, C, H, s) after each action chunk
    key: str
    outcome_rows: np.ndarray | None = None  # (Q, C, H) where the frames of these states are recorded; None: nowhere


def shared_queries(
    data: EpisodeData,
    settings: QuerySettings,
    simulator: Simulator,
    file: Path,
    others: Sequence[Path],
    on_progress: OnProgress,
) -> Queries:
    """Draw and simulate the queries, or read them from ``file`` or from one of ``others`` if it holds the same."""
    # The demonstration must be as long as the other candidates.
    ahead = max(settings.offset, settings.horizon * data.frameskip)
    assert settings.queries is not None
    rows = draw_starts(data, Protocol(ahead, episodes=settings.queries), settings.seed)
    inputs = f"{task_id(data.task)} {RESETS} {data.content_hash()} {data.frameskip} {settings}"
    key = hashlib.sha256(inputs.encode()).hexdigest()[:16]
    if not data.task.has_env:
        return _recorded_queries(data, rows, settings, key)
    actions = candidate_actions(data, rows, settings)
    shape = (*actions.shape[:3], data.states.shape[1])
    files = (file, *others) if is_main() else ()  # on a network disk, processes may see a file at different times
    states = from_main(next((s for known in files if (s := _stored_states(known, key, shape)) is not None), None))
    if states is None:

        def simulate(which: list[int]) -> list[np.ndarray]:
            answers = []
            for answer in simulator.futures(data.task, data.start_states(rows[which]), actions[which]):
                answers.append(answer)
                on_progress(len(answers), len(which))
            return answers

        answers: list[np.ndarray] = sharded_map(list(range(len(rows))), simulate)
        states = np.stack(answers)
    if is_main() and _stored_states(file, key, shape) is None:
        with write_atomically(file) as temporary, temporary.open("wb") as out:
            np.savez_compressed(out, key=key, states=states)
    return Queries(rows, rows + settings.offset, actions, states, key)


def _recorded_queries(data: EpisodeData, rows: np.ndarray, settings: QuerySettings, key: str) -> Queries:
    """Without an environment the recorded actions are the only candidate whose outcome is known."""
    steps = settings.horizon * data.frameskip
    actions = data.actions[rows[:, None] + np.arange(steps)]  # (Q, H·frameskip, A)
    actions = actions.reshape(len(rows), 1, settings.horizon, data.frameskip, -1)
    outcomes = rows[:, None, None] + data.frameskip * np.arange(1, settings.horizon + 1)  # (Q, 1, H) rows
    return Queries(rows, rows + settings.offset, actions, data.states[outcomes], key, outcomes)


def _stored_states(file: Path, key: str, shape: tuple[int, ...]) -> np.ndarray | None:
    """None if the file is missing, damaged or holds other queries. shape: (Q, C, H, s)"""
    try:
        with ZipFile(file) as archive:  # checked before unpacking: a small file may hold a giant array
            if archive.getinfo("states.npy").file_size > 8 * math.prod(shape) + 1024:
                return None
        with np.load(file) as stored:
            states = stored["states"] if str(stored["key"]) == key else None
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, zlib.error, NotImplementedError, RuntimeError):
        return None
    return states if states is not None and states.shape == shape and np.isfinite(states).all() else None


def candidate_actions(data: EpisodeData, rows: np.ndarray, settings: QuerySettings) -> np.ndarray:
    """(Q, C, H, frameskip, A). The first candidate repeats the demonstration.

    Half of the others are noise, like the planner's first candidates (independent Gaussian actions with the mean
    and standard deviation of the data); half are pieces of other demonstrations, which lead somewhere.
    """
    rng = np.random.default_rng([settings.seed, DiagnoseRng.QUERIES])
    steps = settings.horizon * data.frameskip
    real = np.nan_to_num(data.actions)
    starts = draw_starts(data, Protocol(steps, episodes=min(10_000, _valid(data, steps))), settings.seed + 1)
    actions = np.empty((len(rows), settings.candidates, steps, real.shape[1]), np.float32)
    statistics = Normalizer.fit(data.actions)
    noisy = settings.candidates // 2
    for query, row in enumerate(rows):
        actions[query, 0] = real[row : row + steps]
        actions[query, 1:noisy] = rng.normal(statistics.mean, statistics.std, (noisy - 1, steps, real.shape[1]))
        others = rng.choice(starts, settings.candidates - noisy)
        actions[query, noisy:] = real[others[:, None] + np.arange(steps)]
    return actions.reshape(len(rows), settings.candidates, settings.horizon, data.frameskip, -1)


def _valid(data: EpisodeData, steps: int) -> int:
    return int(np.maximum(data.lengths - steps, 0).sum())
