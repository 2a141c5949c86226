"""The real environment, in worker processes: where actions lead, and how states look."""

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
from atlas_wm.parallel.workers import TIMEOUT, Died, Helpers, check_timeout, one_line, time_limit, to_make
from atlas_wm.tasks import Task, get_task, task_id

STATES_A_JOB = 64


class Simulator:
    """``workers`` processes with one environment each, started when they are needed.

    Every result is a function of its arguments, so one that a process died over is tried once more. If an
    environment fails again, or takes longer than ``timeout`` seconds, what needs it cannot be measured.
    """

    def __init__(self, workers: int | None = None, timeout: float = TIMEOUT):
        self._helpers = Helpers(workers or own_cores(), Environments, check_timeout(timeout))
        self._wandered: dict[tuple[str, int, int, int, int], np.ndarray] = {}  # the same for every run of a task

    def __enter__(self) -> "Simulator":
        return self

    def __exit__(self, *_: object) -> None:
        self._helpers.close()

    def _each(self, what: str, task: Task, jobs: Iterable[tuple[Any, ...]]) -> Iterator[np.ndarray]:
        """The answers to ``what(*job)`` in the order of the jobs, as they come."""
        name = task_id(task)
        requests = deque[tuple[Any, ...]](("do", number, what, name, *job) for number, job in enumerate(jobs))
        count, answers, again = len(requests), dict[int, np.ndarray](), set[int]()
        with closing(self._helpers.each(requests)) as coming:
            for number in range(count):
                while number not in answers:
                    request, answer = next(coming)
                    if not isinstance(answer, Died):
                        answers[request[1]] = answer
                    elif request[1] not in again:
                        again.add(request[1])
                        requests.append(request)
                    else:
                        raise UserError(f"an environment of {name} failed, {answer} (--timeout, --workers)")
                yield answers.pop(number)

    def futures(self, task: Task, starts: np.ndarray, actions: np.ndarray) -> Iterator[np.ndarray]:
        """For each of Q start states (Q, s), in order: the states (C, H, s) after each block of its sequences.

        actions: (Q, C, H, frameskip, A) in the environment's units.
        """
        return self._each("futures", task, zip(starts, actions, strict=True))

    def wander(self, task: Task, episodes: int, steps: int, every: int, seed: int) -> np.ndarray:
        """States that uniformly random actions lead to: ``every`` steps one, (episodes · steps/every, s)."""
        key = task_id(task), episodes, steps, every, seed
        if key not in self._wandered:
            jobs = [(steps, every, [seed, n]) for n in range(episodes)]
            self._wandered[key] = np.concatenate(list(self._each("wander", task, jobs)))
        return self._wandered[key]

    def images(self, task: Task, states: np.ndarray, size: int) -> Tensor:
        """(n, s) states → (n, 3, size, size) uint8"""
        if type(task).draw is not Task.draw:
            return task.draw(states, size)
        jobs = [(states[i : i + STATES_A_JOB], size) for i in range(0, len(states), STATES_A_JOB)]
        return torch.from_numpy(np.concatenate(list(self._each("images", task, jobs))))


class Environments:
    """One process's environments, one for each task."""

    def __init__(self, timeout: float):
        self.timeout = timeout
        self._made: dict[str, tuple[Task, Any]] = {}

    def do(self, number: int, what: str, name: str, *arguments: Any) -> np.ndarray:
        """``what`` in an environment of a task, within the time it may take. ``number``: for the one who asks."""
        try:
            if name not in self._made:
                with time_limit(to_make(self.timeout)):
                    task = get_task(name)
                    self._made[name] = task, task.make_env()
            with time_limit(self.timeout):
                return JOBS[what](*self._made[name], *arguments)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"an environment of {name} failed: {one_line(error)}") from error

    def close(self) -> None:
        for _, env in self._made.values():
            env.close()


def _futures(task: Task, env: Any, start: np.ndarray, actions: np.ndarray) -> np.ndarray:
    states = []
    for sequence in actions:
        task.reset(env, start, start)
        for block in sequence:
            for action in block:
                env.step(action.astype(np.float32))
            states.append(task.state(env))
    return np.stack(states).reshape(*actions.shape[:2], -1)


def _wander(task: Task, env: Any, steps: int, every: int, seed: list[int]) -> np.ndarray:
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


JOBS: dict[str, Callable[..., np.ndarray]] = {"futures": _futures, "wander": _wander, "images": _images}
