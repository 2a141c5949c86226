"""Environments that run episodes in parallel and render only when a planner needs an image."""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from atlas_wm.errors import UserError
from atlas_wm.images import frame_to_tensor, reduce_frames
from atlas_wm.parallel.workers import one_line, startup_limit, time_limit
from atlas_wm.tasks import Task
from atlas_wm.tasks.variation import NO_VARIATION, Variation, make_varied_env

FILM_EVERY = 5  # steps between two frames of a film
LAST_STATES = 3  # final states of an episode that are recorded for the diagnostics


# What a policy needs to see of an episode: its frame, (3, S, S) uint8, its full state, or nothing.
# Under a variation the goal looks otherwise than in the dataset: the first observation is then (2, 3, S, S), the
# frame and the goal's.
Observe = Literal["frame", "frame and goal", "state"] | None


@dataclass(frozen=True)
class EpisodeStart:
    """The start state of an episode and the goal that defines its success."""

    state: np.ndarray
    goal: np.ndarray  # a state
    budget: int  # steps
    observe: Observe  # only observed frames are rendered
    film: bool = False


@dataclass(frozen=True)
class EpisodeEnd:
    """The outcome of an episode."""

    success: bool
    steps: int  # until success, error or the end of the budget
    final_distance: float | None  # None after an error
    last_states: np.ndarray  # (at most LAST_STATES, s) after the last steps
    film: np.ndarray | None  # (frames, H, W, 3) uint8, the goal last
    error: str | None = None
    lost: bool = False  # its process died, perhaps because of another episode

    @classmethod
    def of_error(cls, error: str, steps: int = 0, lost: bool = False) -> "EpisodeEnd":
        return cls(False, steps, None, np.empty((0, 0)), None, error, lost)


# By slot: an episode to start, or actions (n, A) to execute until it succeeds or its budget is spent.
Asked = dict[int, EpisodeStart | np.ndarray]
# By slot: the end of its episode if it is over, else what was to be observed.
Observations = dict[int, EpisodeEnd | np.ndarray | None]


@dataclass
class _Running:
    """One episode in its environment."""

    env: Any
    start: EpisodeStart
    steps: int = 0
    success: bool = False
    last_states: deque[np.ndarray] = field(default_factory=lambda: deque(maxlen=LAST_STATES))
    film: list[np.ndarray] = field(default_factory=list)


class EnvBatch:
    """Episodes in numbered slots, each in its own environment, which later episodes reuse.

    ``ask`` it to start episodes or to act, then read the observations with ``answer``. Here the work happens in
    ``ask``; an :class:`atlas_wm.evaluate.env_pool.EnvPool` does it in other processes until ``answer``.
    """

    def __init__(self, task: Task, image_size: int, timeout: float = 0.0, variation: Variation = NO_VARIATION):
        self.task, self.image_size, self.timeout, self.variation = task, image_size, timeout, variation
        self.envs: list[Any] = []
        self._running: dict[int, _Running] = {}
        self._answer: Observations = {}

    def open(self) -> Any:
        """Make a first environment and return its action space."""
        if not self.envs:
            self._make_env()
        return self.envs[0].action_space

    def ask(self, asked: Asked) -> None:
        self._answer = self.step(asked)

    def answer(self) -> Observations:
        return self._answer

    def step(self, asked: Asked) -> Observations:
        return {
            slot: self._start(slot, item)
            if isinstance(item, EpisodeStart)
            else self._guarded(self._execute, slot, item)
            for slot, item in asked.items()
        }

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def _make_env(self) -> Any:
        try:
            with time_limit(startup_limit(self.timeout)):
                self.envs.append(make_varied_env(self.task, self.variation))
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"an environment of {self.task.name} cannot be made: {one_line(error)}") from error
        return self.envs[-1]

    def _start(self, slot: int, start: EpisodeStart) -> EpisodeEnd | np.ndarray | None:
        self._running.pop(slot, None)
        used = [running.env for running in self._running.values()]
        free = [env for env in self.envs if not any(env is other for other in used)]
        self._running[slot] = _Running(free[0] if free else self._make_env(), start)
        return self._guarded(self._begin, slot)

    def _guarded(self, do: Callable[..., Any], slot: int, *arguments: Any) -> EpisodeEnd | np.ndarray | None:
        """An exception ends this episode only, and its environment is not used again."""
        running = self._running[slot]
        try:
            with time_limit(self.timeout):
                observed = do(running, *arguments)
        except UserError:
            raise
        except Exception as error:
            self.envs.remove(running.env)
            with suppress(Exception):
                running.env.close()
            observed = EpisodeEnd.of_error(one_line(error), running.steps)
        if isinstance(observed, EpisodeEnd):
            del self._running[slot]
        return observed

    def _begin(self, running: _Running) -> np.ndarray | None:
        goal = None
        if running.start.observe == "frame and goal":
            self.task.reset(running.env, running.start.goal, running.start.state)
            goal = self._frame(running.env)
        self.task.reset(running.env, running.start.state, running.start.goal)
        if running.start.film:
            running.film.append(running.env.render())
        seen = self._observation(running)
        return seen if goal is None or seen is None else np.stack([seen, goal])

    def _execute(self, running: _Running, actions: np.ndarray) -> EpisodeEnd | np.ndarray | None:
        """An episode succeeds if the task reports success at any step. A film has a frame every ``FILM_EVERY``
        steps, including the first and the last, and the goal at its end."""
        budget = running.start.budget
        for action in actions[: budget - running.steps]:
            _, _, terminated, _, _ = running.env.step(np.asarray(action, np.float32))
            running.success = self.task.reached(running.env, running.start.goal, bool(terminated))
            running.steps += 1
            running.last_states.append(self.task.state(running.env))
            last = running.success or running.steps == budget
            if running.start.film and (running.steps % FILM_EVERY == 0 or last):
                running.film.append(running.env.render())
            if running.success:
                break
        over = running.success or running.steps == budget
        return self._end(running) if over else self._observation(running)

    def _end(self, running: _Running) -> EpisodeEnd:
        distance = self.task.distance(running.last_states[-1], running.start.goal)
        if running.start.film:
            self.task.reset(running.env, running.start.goal, running.start.state)
            running.film.append(running.env.render())
        film = np.stack(running.film) if running.film else None
        return EpisodeEnd(bool(running.success), running.steps, distance, np.stack(running.last_states), film)

    def _observation(self, running: _Running) -> np.ndarray | None:
        if running.start.observe is None:
            return None
        if running.start.observe == "state":
            return self.task.full_state(running.env)
        return self._frame(running.env)

    def _frame(self, env: Any) -> np.ndarray:
        """Reduced here, so that little data is sent; contiguous, so that it equals a frame from another process."""
        return reduce_frames(frame_to_tensor(env.render()), self.image_size)[0].contiguous().numpy()
