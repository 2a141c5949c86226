"""The interface between this package and an environment."""

import copy
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import gymnasium as gym
import numpy as np
from torch import Tensor

from atlas_wm.errors import UserError, reason
from atlas_wm.normalizer import Bounds
from atlas_wm.runs.versions import install_command, to_install
from atlas_wm.settings import with_changes

log = logging.getLogger(__name__)

Columns = dict[str, np.ndarray]


def import_harness() -> None:
    """Import stable-worldmodel, which registers its environments, without its warning about Atari."""
    # It imports lancedb, which warns at every fork. Loader processes of Lance tables are not forked but spawned.
    warnings.filterwarnings("ignore", message="lancedb fork support is experimental")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ale-py not found")
        try:
            import stable_worldmodel  # noqa: F401
        except ImportError as error:
            remedy = f"{to_install(error, install_command('stable_worldmodel'))}, or see `atlas doctor`"
            raise UserError(f"stable-worldmodel does not load ({error}): {remedy}") from error


class Coordinate(NamedTuple):
    """A part of the state that probes read from a representation."""

    name: str
    unit: str
    values: np.ndarray  # (N, k); an angle as (cos, sin)
    angle: bool = False  # its error is in degrees


class Task(ABC):
    """The columns of a dataset, the environment it was recorded in, and how to start an episode from a dataset row.

    Without an environment, derive from :class:`atlas_wm.tasks.OfflineTask` instead.
    """

    name: str
    env_id: str
    max_episode_steps: int
    has_env: bool = True
    action_size: int | None = None
    """Coordinates of an action. None: as many as the dataset has."""
    action_column: str = "action"
    image_column: str = "pixels"
    state_columns: tuple[tuple[str, ...], ...]
    """The columns that hold the state :meth:`reset` needs. These are alternatives: the first one whose columns are
    all in the dataset is used, and its columns are concatenated."""
    novelty_columns: tuple[tuple[str, ...], ...] = ()
    """The same for the state whose distance from the training data says how novel an episode is. Empty: the state
    columns."""
    coordinate_columns: tuple[tuple[str, ...], ...] = ()
    """The same for what :meth:`coordinates` takes. Empty: the state columns."""
    hidden_columns: tuple[str, ...] = ()
    """Columns that are not part of the state but make a reset repeat a demonstration exactly, such as the warm
    start of a solver. If the dataset has all of them, :meth:`reset` gets them appended to the state."""

    demonstrator_config: Any = None
    """Settings of the demonstrator that ``atlas collect --demonstrator NAME=VALUE`` changes: an object of a frozen
    dataclass with the defaults. :meth:`demonstrator` reads it and the card holds it. None: there are none."""
    published_moments: Mapping[str, tuple[float, ...]] = MappingProxyType({})
    """Moments of published data that a collected dataset is compared with, by their name in its card."""
    episodes_per_job: int = 25
    """Demonstrations that a worker process records in one job."""
    most_at_once: int = 100
    """The most environments that one planner steps in parallel."""
    max_env_processes: int = 32
    """The most processes that hold environments for one planning GPU."""
    most_collectors: int | None = None
    """The most processes that record demonstrations unless --workers says otherwise. None: one per core."""

    @property
    def spec(self) -> str:
        """module:Class, from which :func:`atlas_wm.tasks.get_task` makes this task again in any process."""
        return f"{type(self).__module__}:{type(self).__qualname__}"

    def require_env(self, command: str, remedy: str) -> None:
        """Raise a UserError if ``command`` cannot work without an environment and the task has none."""
        if not self.has_env:
            raise UserError(f"{command} needs an environment, and the task {self.name} has none: {remedy}")

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
        """The lowest and the highest value of each action coordinate. Plans are clipped to them. None or infinite:
        the smallest and largest training action. The default is the action space of the environment; set
        ``action_bounds = ((-1.0, 1.0),) * 2`` to avoid making an environment."""
        try:
            env = self.make_env()
        except Exception as error:  # not installed on this machine
            log.warning(
                "the environment of %s cannot be made, so plans are clipped to the training actions (%s)",
                *(self.name, reason(error)),
            )
            return None
        space = env.action_space
        env.close()
        if not isinstance(space, gym.spaces.Box) or (self.action_size and space.shape != (self.action_size,)):
            log.warning(
                "the action space of %s, %s, is not a box of %s numbers: plans are clipped to the training actions",
                *(self.name, space, self.action_size),
            )
            return None
        return tuple(zip(space.low.tolist(), space.high.tolist(), strict=True))

    @abstractmethod
    def demonstrator(self, env: gym.Env, seed: int) -> Any:
        """The policy that records demonstrations: ``get_action(info) -> action``. If it has an attribute
        ``finished``, the episode ends once that is true."""

    @abstractmethod
    def demonstrator_settings(self) -> dict[str, Any]:
        """What the card of a collected dataset says about the policy, beside ``demonstrator_config``."""

    def with_demonstrator(self, given: Sequence[str]) -> Self:
        """A copy of the task whose demonstrator has other settings: ``["targets=many"]``."""
        if self.demonstrator_config is None:
            raise UserError(f"the demonstrator of {self.name} has no settings: leave --demonstrator out")
        changed = copy.copy(self)
        changed.demonstrator_config = with_changes(
            self.demonstrator_config, given, f"--demonstrator of {self.name}"
        )
        return changed

    @abstractmethod
    def columns(self, env: gym.Env, info: dict[str, Any]) -> Columns:
        """The columns to store for one step, besides action and pixels."""

    @abstractmethod
    def reset(self, env: gym.Env, state: np.ndarray, goal_state: np.ndarray) -> None:
        """Start an episode in ``state``; ``goal_state`` defines success. See ``hidden_columns``."""

    def rewind(self, env: gym.Env, state: np.ndarray, goal_state: np.ndarray) -> None:
        """Set an environment that was already reset with this goal back to ``state``. A task may do it faster than
        :meth:`reset`, with the same effect on what follows: the oracle rewinds for every candidate."""
        self.reset(env, state, goal_state)

    @abstractmethod
    def state(self, env: gym.Env) -> np.ndarray:
        """The current state of the environment, in the layout of the state columns."""

    def full_state(self, env: gym.Env) -> np.ndarray:
        """The current state with all that :meth:`reset` needs to continue exactly from here: the state, and the
        hidden columns if there are any. Default: the state."""
        return self.state(env)

    @abstractmethod
    def distance(self, state: np.ndarray, goal_state: np.ndarray) -> float:
        """Distance of a state from the goal, in the task's unit."""

    def cost_to_goal(self, env: gym.Env, state: np.ndarray, goal_state: np.ndarray) -> float:
        """What the oracle minimises: smallest where the goal is reached. Default: the distance. A task overrides it
        if ``solved`` asks for more than a small distance, or if the shortest distance leads through an obstacle.
        env: where the state was reached."""
        return self.distance(state, goal_state)

    @abstractmethod
    def solved(self, state: np.ndarray, goal_state: np.ndarray) -> bool:
        """Whether ``state`` counts as success, by the environment's criterion."""

    def reached(self, env: gym.Env, goal_state: np.ndarray, terminated: bool) -> bool:
        """Whether the last step reached the goal. Default: the environment terminated the episode."""
        return terminated

    def coordinates(self, states: np.ndarray) -> list[Coordinate]:
        """What the state probe reads, from rows (N, s) of ``coordinate_columns``. Default: each number by itself,
        without a unit."""
        return [Coordinate(f"state_{i}", "", states[:, i : i + 1]) for i in range(states.shape[1])]

    def quantities(self, states: np.ndarray) -> list[Coordinate]:
        """What the moments of a dataset describe besides actions, from rows (N, s) of ``coordinate_columns``.
        Default: the coordinates of the state probe."""
        return self.coordinates(states)

    def draw(self, states: np.ndarray, size: int) -> Tensor:
        """Images of states, equal to what the environment renders, reduced to ``size``:
        (N, s) → (N, 3, size, size) uint8. Only for tasks whose image is a function of the state alone."""
        raise UserError(
            f"the dataset has no {self.image_column!r} column and {self.name} cannot be drawn from states: "
            f"collect it again with `atlas collect {self.name} --pixels`"
        )
