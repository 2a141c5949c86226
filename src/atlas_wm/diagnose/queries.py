"""Shared questions to all models: start states, goals, candidate actions, and where these really lead.

A function of the dataset and a few numbers, of no model: runs that are diagnosed one by one meet the same ones.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from atlas_wm.data.dataset import EpisodeData
from atlas_wm.diagnose.simulate import Simulator
from atlas_wm.diagnose.subject import OnProgress
from atlas_wm.evaluate.protocol import Protocol, draw_starts
from atlas_wm.run_folder import write_atomically


@dataclass(frozen=True)
class QuerySettings:
    queries: int = 100
    candidates: int = 128
    horizon: int = 5
    """Model steps that candidates last."""
    offset: int = 50
    """Rows between start and goal."""
    seed: int = 0


@dataclass(frozen=True)
class Queries:
    """Q starts and goals, C action sequences for each, and the states they lead to."""

    rows: np.ndarray  # (Q,) dataset rows of the starts
    goal_rows: np.ndarray  # (Q,)
    actions: np.ndarray  # (Q, C, H, frameskip, A) in the environment's units
    states: np.ndarray  # (Q, C, H, s) after each block
    key: str


def shared_queries(
    data: EpisodeData, settings: QuerySettings, simulator: Simulator, file: Path, on_progress: OnProgress
) -> Queries:
    """Drawn from the dataset and simulated, or read from ``file`` if it holds these very ones."""
    rows = draw_starts(data, Protocol(settings.offset, episodes=settings.queries), settings.seed)
    key = hashlib.sha256(f"{data.content_hash()} {data.frameskip} {settings}".encode()).hexdigest()[:16]
    actions = candidate_actions(data, rows, settings)
    if file.exists():
        with np.load(file) as stored:
            if str(stored["key"]) == key:
                return Queries(rows, rows + settings.offset, actions, stored["states"], key)
    states = []
    for answer in simulator.futures(data.task, data.states[rows], actions):
        states.append(answer)
        on_progress(len(states), len(rows))
    queries = Queries(rows, rows + settings.offset, actions, np.stack(states), key)
    with write_atomically(file) as temporary, temporary.open("wb") as out:
        np.savez_compressed(out, key=key, states=queries.states)
    return queries


def candidate_actions(data: EpisodeData, rows: np.ndarray, settings: QuerySettings) -> np.ndarray:
    """(Q, C, H, frameskip, A). The first candidate is what the demonstration did.

    The others are half noise, as the planner's first candidates (independent Gaussian actions with the mean and
    deviation of the data), half stretches of other demonstrations, which go somewhere.
    """
    rng = np.random.default_rng([settings.seed, 1])
    steps = settings.horizon * data.frameskip
    real = np.nan_to_num(data.actions)
    starts = draw_starts(data, Protocol(steps, episodes=min(10_000, _valid(data, steps))), settings.seed + 1)
    actions = np.empty((len(rows), settings.candidates, steps, real.shape[1]), np.float32)
    mean, std = real.mean(axis=0), real.std(axis=0)
    noisy = settings.candidates // 2
    for query, row in enumerate(rows):
        actions[query, 0] = real[row : row + steps]
        actions[query, 1:noisy] = rng.normal(mean, std, (noisy - 1, steps, real.shape[1]))
        others = rng.choice(starts, settings.candidates - noisy)
        actions[query, noisy:] = real[others[:, None] + np.arange(steps)]
    return actions.reshape(len(rows), settings.candidates, settings.horizon, data.frameskip, -1)


def _valid(data: EpisodeData, steps: int) -> int:
    return int(np.maximum(data.lengths - steps, 0).sum())
