"""Where episodes happen: environments that are started, acted in, and drawn only when a planner needs a picture."""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from atlas_wm.errors import UserError
from atlas_wm.images import frame_to_tensor, reduce_frames
from atlas_wm.parallel.workers import one_line, time_limit, to_make
from atlas_wm.tasks import Task

FILM_EVERY = 5  # steps between two frames of a film
LAST_STATES = 3  # how many of an episode's states are kept for the diagnostics


@dataclass(frozen=True)
class Start:
    """How an episode begins, and what counts as its success."""

    state: np.ndarray
    goal: np.ndarray  # a state too
    film: bool = False


@dataclass(frozen=True)
class Ending:
    """How an episode ended."""

    success: bool
    steps: int  # to success, or the whole budget; to the error, if there was one
    final_distance: float | None  # None after an error
    last_states: np.ndarray  # (at most LAST_STATES, s) after the last steps
    film: np.ndarray | None  # (frames, H, W, 3) uint8, the goal last
    error: str | None = None
    lost: bool = False  # with the process it was in: not known to be this episode's fault

    @classmethod
    def of_error(cls, error: str, steps: int = 0, lost: bool = False) -> "Ending":
        return cls(False, steps, None, np.empty((0, 0)), None, error, lost)


# By the number of the episode: its ending if it is over, else its frame, (3, S, S) uint8, or None if nobody looks.
Seen = dict[int, Ending | np.ndarray | None]


@dataclass
class _Scene:
    """One episode in its environment."""

    env: Any
    start: Start
    steps: int = 0
    success: bool = False
    last_states: deque[np.ndarray] = field(default_factory=lambda: deque(maxlen=LAST_STATES))
    film: list[np.ndarray] = field(default_factory=list)


class Stage:
    """Episodes side by side, known by numbers, each in an environment of its own that is kept for later ones.

    A stage is asked to ``reset`` and to ``act``, and answers with what is then seen: here at once, in a process of
    its own (:class:`atlas_wm.evaluate.env_pool.StageProcesses`) while the one who asked does something else.
    """

    def __init__(self, task: Task, image_size: int, timeout: float = 0.0):
        self.task, self.image_size, self.timeout = task, image_size, timeout
        self.envs: list[Any] = []
        self._scenes: dict[int, _Scene] = {}
        self._answer: Seen = {}

    def open(self) -> Any:
        """Make a first environment, and tell the space of its actions."""
        self._make_envs(1)
        return self.envs[0].action_space

    def ask(self, what: str, *arguments: Any) -> None:
        self._answer = getattr(self, what)(*arguments)

    def answer(self) -> Seen:
        return self._answer

    def reset(self, starts: dict[int, Start], budget: int, look: bool) -> Seen:
        """Begin an episode of at most ``budget`` steps for each start; frames are drawn only if somebody looks."""
        self.budget, self.look = budget, look
        self._make_envs(len(starts))
        self._scenes = {
            number: _Scene(env, start) for env, (number, start) in zip(self.envs, starts.items(), strict=False)
        }
        return {number: self._guarded(self._begin, scene) for number, scene in self._scenes.items()}

    def act(self, plans: dict[int, np.ndarray]) -> Seen:
        """Execute the actions (n, A) planned for each episode, until it succeeds or its budget is spent."""
        return {
            number: self._guarded(self._execute, self._scenes[number], actions) for number, actions in plans.items()
        }

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def _make_envs(self, count: int) -> None:
        while len(self.envs) < count:
            try:
                with time_limit(to_make(self.timeout)):
                    self.envs.append(self.task.make_env())
            except UserError:
                raise
            except Exception as error:
                raise UserError(f"an environment of {self.task.name} cannot be made: {one_line(error)}") from error

    def _guarded(self, do: Callable[..., Any], scene: _Scene, *arguments: Any) -> Ending | np.ndarray | None:
        """What an environment raises ends its episode, not the others, and this environment is not used again."""
        try:
            with time_limit(self.timeout):
                return do(scene, *arguments)
        except UserError:
            raise
        except Exception as error:
            self.envs.remove(scene.env)
            with suppress(Exception):
                scene.env.close()
            return Ending.of_error(one_line(error), scene.steps)

    def _begin(self, scene: _Scene) -> np.ndarray | None:
        self.task.reset(scene.env, scene.start.state, scene.start.goal)
        if scene.start.film:
            scene.film.append(scene.env.render())
        return self._frame(scene)

    def _execute(self, scene: _Scene, actions: np.ndarray) -> Ending | np.ndarray | None:
        """Success is what the environment reports at any step. A film gets a frame every ``FILM_EVERY`` steps, the
        first and the last included, and the goal at its end."""
        for action in actions[: self.budget - scene.steps]:
            _, _, terminated, _, _ = scene.env.step(np.asarray(action, np.float32))
            scene.success = self.task.reached(scene.env, scene.start.goal, bool(terminated))
            scene.steps += 1
            scene.last_states.append(self.task.state(scene.env))
            last = scene.success or scene.steps == self.budget
            if scene.start.film and (scene.steps % FILM_EVERY == 0 or last):
                scene.film.append(scene.env.render())
            if scene.success:
                break
        return self._end(scene) if scene.success or scene.steps == self.budget else self._frame(scene)

    def _end(self, scene: _Scene) -> Ending:
        distance = self.task.distance(scene.last_states[-1], scene.start.goal)
        if scene.start.film:
            self.task.reset(scene.env, scene.start.goal, scene.start.state)
            scene.film.append(scene.env.render())
        film = np.stack(scene.film) if scene.film else None
        return Ending(bool(scene.success), scene.steps, distance, np.stack(scene.last_states), film)

    def _frame(self, scene: _Scene) -> np.ndarray | None:
        """Reduced here, so that little travels; contiguous, so that its layout is the same from anywhere."""
        if not self.look:
            return None
        return reduce_frames(frame_to_tensor(scene.env.render()), self.image_size)[0].contiguous().numpy()
