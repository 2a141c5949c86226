"""The real environment, in worker processes: where actions lead, and how states look."""

from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cached_property
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atlas_wm.frames import frame_to_tensor, reduce_frames
from atlas_wm.launch import own_cores
from atlas_wm.tasks import Task, get_task, task_id

STATES_A_JOB = 64


class Simulator:
    """``workers`` processes with one environment each, started when first needed."""

    def __init__(self, workers: int | None = None):
        self.workers = workers or own_cores()
        self._wandered: dict[tuple[str, int, int, int, int], np.ndarray] = {}  # the same for every run of a task

    @cached_property
    def _pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self.workers, mp_context=get_context("spawn"), initializer=_one_thread)

    def __enter__(self) -> "Simulator":
        return self

    def __exit__(self, *_: object) -> None:
        if "_pool" in self.__dict__:
            self._pool.shutdown(cancel_futures=True)

    def futures(self, task: Task, starts: np.ndarray, actions: np.ndarray) -> Iterator[np.ndarray]:
        """For each of Q start states (Q, s), in order: the states (C, H, s) after each block of its sequences.

        actions: (Q, C, H, frameskip, A) in the environment's units.
        """
        jobs = [self._pool.submit(_futures, task_id(task), s, a) for s, a in zip(starts, actions, strict=True)]
        return (job.result() for job in jobs)

    def wander(self, task: Task, episodes: int, steps: int, every: int, seed: int) -> np.ndarray:
        """States that uniformly random actions lead to: ``every`` steps one, (episodes · steps/every, s)."""
        key = task_id(task), episodes, steps, every, seed
        if key not in self._wandered:
            jobs = [self._pool.submit(_wander, task_id(task), steps, every, [seed, n]) for n in range(episodes)]
            self._wandered[key] = np.concatenate([job.result() for job in jobs])
        return self._wandered[key]

    def pictures(self, task: Task, states: np.ndarray, size: int) -> Tensor:
        """(n, s) states → (n, 3, size, size) uint8"""
        if type(task).draw is not Task.draw:
            return task.draw(states, size)
        parts = [states[i : i + STATES_A_JOB] for i in range(0, len(states), STATES_A_JOB)]
        jobs: list[Future[np.ndarray]] = [self._pool.submit(_pictures, task_id(task), part, size) for part in parts]
        return torch.from_numpy(np.concatenate([job.result() for job in jobs]))


_envs: dict[str, tuple[Task, Any]] = {}


def _one_thread() -> None:
    torch.set_num_threads(1)  # there are as many processes as cores


def _env(name: str) -> tuple[Task, Any]:
    if name not in _envs:
        task = get_task(name)
        _envs[name] = task, task.make_env()
    return _envs[name]


def _futures(name: str, start: np.ndarray, actions: np.ndarray) -> np.ndarray:
    task, env = _env(name)
    states = []
    for sequence in actions:
        task.reset(env, start, start)
        for block in sequence:
            for action in block:
                env.step(action.astype(np.float32))
            states.append(task.state(env))
    return np.stack(states).reshape(*actions.shape[:2], -1)


def _wander(name: str, steps: int, every: int, seed: list[int]) -> np.ndarray:
    task, env = _env(name)
    rng = np.random.default_rng(seed)
    env.reset(seed=int(rng.integers(2**31)))
    space, states = env.action_space, []
    for step in range(1, steps + 1):
        env.step(rng.uniform(space.low, space.high).astype(np.float32))
        if step % every == 0:
            states.append(task.state(env))
    return np.stack(states)


def _pictures(name: str, states: np.ndarray, size: int) -> np.ndarray:
    task, env = _env(name)
    frames = []
    for state in states:
        task.reset(env, state, state)
        frames.append(reduce_frames(frame_to_tensor(env.render()), size)[0].numpy())
    return np.stack(frames)
