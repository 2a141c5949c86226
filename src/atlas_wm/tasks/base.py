"""What a task is: everything that knows an environment is behind this class."""

import logging
import warnings
from abc import ABC, abstractmethod
from typing import Any

import gymnasium as gym
import numpy as np
from torch import Tensor

from atlas_wm.errors import UserError, reason
from atlas_wm.normalizer import Bounds
from atlas_wm.runs.versions import install_command, to_install

log = logging.getLogger(__name__)

Columns = dict[str, np.ndarray]


def import_harness() -> None:
    """Import stable-worldmodel, which registers its environments, without its warning about Atari."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ale-py not found")
        try:
            import stable_worldmodel  # noqa: F401
        except ImportError as error:
            remedy = f"{to_install(error, install_command('stable_worldmodel'))}, or see `atlas doctor`"
            raise UserError(f"stable-worldmodel does not load ({error}): {remedy}") from error


class Task(ABC):
    """One environment of the harness, its demonstrations, and how to start an episode from a dataset row."""

    name: str
    env_id: str
    max_episode_steps: int
    action_size: int
    state_columns: tuple[tuple[str, ...], ...]
    """Where datasets keep the state that :meth:`reset` needs: alternatives, the first one present is used; the
    columns of an alternative are put side by side."""
    novelty_columns: tuple[tuple[str, ...], ...]
    """The same for the state whose distance from the training data says how unusual an episode is."""
    hidden_columns: tuple[str, ...] = ()
    """What is no part of the state, but makes a reset repeat a demonstration exactly, such as a solver's memory.
    Where a dataset has all of these columns, :meth:`reset` gets them behind the state."""

    episodes_per_job: int = 25
    """Demonstrations a worker process records before it hands them over."""
    most_at_once: int = 100
    """Environments one planner may have side by side."""
    max_env_processes: int = 32
    """Processes that may hold them beside a planning GPU."""

    @property
    def spec(self) -> str:
        """What :func:`atlas_wm.tasks.get_task` makes this task from, in any process: module:Class."""
        return f"{type(self).__module__}:{type(self).__qualname__}"

    def make_env(self) -> gym.Env:
        import_harness()
        return gym.make(
            self.env_id,
            max_episode_steps=self.max_episode_steps,
            render_mode="rgb_array",
            disable_env_checker=True,  # it warns at every environment of the harness, which returns tensors
        )

    @property
    def action_bounds(self) -> Bounds | None:
        """The lowest and the highest value of each action coordinate, which plans are clipped to; where infinite or
        None, those of the training data. By default those of the environment's action space; a task that knows the
        numbers saves making an environment: ``action_bounds = ((-1.0, 1.0),) * 2``."""
        try:
            env = self.make_env()
        except Exception as error:  # data without an environment, or one that is not installed here
            log.warning("%s has no environment to take action bounds from (%s)", self.name, reason(error))
            return None
        space = env.action_space
        env.close()
        if not isinstance(space, gym.spaces.Box) or space.shape != (self.action_size,):
            log.warning(
                "%s has an action space, %s, without bounds of %d numbers", self.name, space, self.action_size
            )
            return None
        return tuple(zip(space.low.tolist(), space.high.tolist(), strict=True))

    @abstractmethod
    def demonstrator(self, env: gym.Env, seed: int) -> Any:
        """The policy that makes demonstrations: ``get_action(info) -> action``. Where it has an attribute
        ``finished``, an episode ends once that is true."""

    @abstractmethod
    def demonstrator_settings(self) -> dict[str, Any]:
        """What the card of a collected dataset says about the policy."""

    @abstractmethod
    def columns(self, env: gym.Env, info: dict[str, Any]) -> Columns:
        """What is stored of one step, beside action and pixels."""

    @abstractmethod
    def reset(self, env: gym.Env, state: np.ndarray, goal_state: np.ndarray) -> None:
        """Start an episode in ``state`` with success defined by ``goal_state``; see ``hidden_columns``."""

    @abstractmethod
    def state(self, env: gym.Env) -> np.ndarray:
        """The state the environment is in, as the state column has it."""

    @abstractmethod
    def distance(self, state: np.ndarray, goal_state: np.ndarray) -> float:
        """How far a state is from the goal, in the task's own unit."""

    @abstractmethod
    def solved(self, state: np.ndarray, goal_state: np.ndarray) -> bool:
        """The environment's own test of success."""

    def reached(self, env: gym.Env, goal_state: np.ndarray, terminated: bool) -> bool:
        """Whether the last step reached the goal: what the environment reports, unless a task knows better."""
        return terminated

    def draw(self, states: np.ndarray, size: int) -> Tensor:
        """Images of states, exactly as the environment would render and the data would be reduced:
        (N, s) → (N, 3, size, size) uint8. Only for tasks whose image follows from the state alone."""
        raise UserError(
            f"the dataset has no 'pixels' column and {self.name} cannot be drawn from states: "
            f"collect it again with `atlas collect {self.name} --pixels`"
        )
