"""The environment in worker processes: outcomes of actions and images of states."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atlas_wm.errors import UserError
from atlas_wm.images import frame_to_tensor, reduce_frames
from atlas_wm.parallel.launch import own_cores
from atlas_wm.parallel.workers import (
    TIMEOUT,
    WorkerDied,
    WorkerPool,
    check_timeout,
    one_line,
    startup_limit,
    time_limit,
)
from atlas_wm.tasks import Task, get_task, task_id

STATES_PER_JOB = 64


class Simulator:
    """``workers`` processes with one environment each, started when needed.

    A result depends only on its arguments, so a request whose process died is tried once more. If the environment
    fails again, or takes longer than ``timeout`` seconds, the diagnostic cannot be measured.
    """

    def __init__(self, workers: int | None = None, timeout: float = TIMEOUT):
        self._pool = WorkerPool(workers or own_cores(), Environments, check_timeout(timeout))
        self._random_states: dict[tuple[str, int, int, int, int], np.ndarray] = {}  # shared by all runs of a task

    def __enter__(self) -> "Simulator":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def _each(self, what: str, task: Task, jobs: Iterable[tuple[Any, ...]]) -> Iterator[np.ndarray]:
        """The answers to ``what(*job)``, in the order of the jobs."""
        name = task_id(task)
        requests = deque[tuple[Any, ...]](("run", number, what, name, *job) for number, job in enumerate(jobs))
        count, answers, retried = len(requests), dict[int, np.ndarray](), set[int]()
        with closing(self._pool.each(requests)) as finished:
            for number in range(count):
                while number not in answers:
                    request, answer = next(finished)
                    if not isinstance(answer, WorkerDied):
                        answers[request[1]] = answer
                    elif request[1] not in retried:
                        retried.add(request[1])
                        requests.append(request)
                    else:
                        raise UserError(f"an environment of {name} failed, {answer} (--timeout, --workers)")
                yield answers.pop(number)

    def futures(self, task: Task, starts: np.ndarray, actions: np.ndarray) -> Iterator[np.ndarray]:
        """For each of Q start states (Q, s), in order: the states (C, H, s) after each action chunk.

        actions: (Q, C, H, frameskip, A) in the environment's units.
        """
        return self._each("futures", task, zip(starts, actions, strict=True))

    def random_states(self, task: Task, episodes: int, steps: int, every: int, seed: int) -> np.ndarray:
        """States under uniformly random actions, one every ``every`` steps: (episodes · steps/every, s)."""
        key = task_id(task), episodes, steps, every, seed
        if key not in self._random_states:
            jobs = [(steps, every, [seed, n]) for n in range(episodes)]
            self._random_states[key] = np.concatenate(list(self._each("random_states", task, jobs)))
        return self._random_states[key]

    def images(self, task: Task, states: np.ndarray, size: int) -> Tensor:
        """(n, s) states → (n, 3, size, size) uint8"""
        if type(task).draw is not Task.draw:
            return task.draw(states, size)
        jobs = [(states[i : i + STATES_PER_JOB], size) for i in range(0, len(states), STATES_PER_JOB)]
        return torch.from_numpy(np.concatenate(list(self._each("images", task, jobs))))


class Environments:
    """The environments of one process, one per task."""

    def __init__(self, timeout: float):
        self.timeout = timeout
        self._environments: dict[str, tuple[Task, Any]] = {}

    def run(self, number: int, what: str, name: str, *arguments: Any) -> np.ndarray:
        """Run the job ``what`` in an environment of a task, within the time limit. ``number`` is the request's."""
        try:
            if name not in self._environments:
                with time_limit(startup_limit(self.timeout)):
                    task = get_task(name)
                    self._environments[name] = task, task.make_env()
            with time_limit(self.timeout):
                return JOBS[what](*self._environments[name], *arguments)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"an environment of {name} failed: {one_line(error)}") from error

    def close(self) -> None:
        for _, env in self._environments.values():
            env.close()


def _futures(task: Task, env: Any, start: np.ndarray, actions: np.ndarray) -> np.ndarray:
    states = []
    for sequence in actions:
        task.reset(env, start, start)
        for chunk in sequence:
            for action in chunk:
                env.step(action.astype(np.float32))
            states.append(task.state(env))
    return np.stack(states).reshape(*actions.shape[:2], -1)


def _random_states(task: Task, env: Any, steps: int, every: int, seed: list[int]) -> np.ndarray:
    rng = np.random.default_rng(seed)
    env.reset(seed=int(rng.integers(2**31)))
    space, states = env.action_space, []
    for step in range(1, steps + 1):
        env.step(rng.uniform(space.low, space.high).astype(np.float32))
        if step % every == 0:
            states.append(task.state(env))
    return np.stack(states)


def _images(task: Task, env: Any, states: np.ndarray, size: int) -> np.ndarray:
    frames = []
    for state in states:
        task.reset(env, state, state)
        frames.append(reduce_frames(frame_to_tensor(env.render()), size)[0].numpy())
    return np.stack(frames)


JOBS: dict[str, Callable[..., np.ndarray]] = {
    "futures": _futures,
    "random_states": _random_states,
    "images": _images,
}
