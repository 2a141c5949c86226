"""What the parity tests compare: which rows of which task, and how the library puts an environment there."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from atlas_wm.data.dataset import EpisodeData
from atlas_wm.evaluate.protocol import Protocol, draw_starts
from atlas_wm.tasks import Task
from atlas_wm.tasks.cube import CUBE, POSITIONS, VELOCITIES, Cube
from atlas_wm.tasks.pusht import PushT
from atlas_wm.tasks.tworoom import TwoRoom

SEED = 10


@dataclass(frozen=True)
class Case:
    task: type[Task]
    name: str
    recorded: int  # episodes
    longest: int  # steps of a recorded episode
    offset: int
    starts: Callable[[EpisodeData], np.ndarray]
    budget: int = 60  # not a multiple of the 25 actions of a plan: the last plan is cut short
    drawn: tuple[int, ...] | None = None  # rows of each episode that are drawn, the others are black; None: all
    there: Callable[[Any, np.ndarray, np.ndarray], None] | None = None
    """Puts an environment where the library's reset leaves it, for rows where that is not the row's state."""


def published_draw(data: EpisodeData) -> np.ndarray:
    return draw_starts(data, Protocol(offset=12, episodes=12), SEED)


def at_rest_and_clear_of_the_block(data: EpisodeData) -> np.ndarray:
    """Where the physics step in PushT's own reset, which ours leaves out, changes nothing."""
    agent, block = data.states[data.offsets, :2], data.states[data.offsets, 2:4]
    return data.offsets[np.linalg.norm(agent - block, axis=1) > 100]


def in_a_push(data: EpisodeData) -> np.ndarray:
    """The block has just been moved, and is moved on: at least 20 px by the time of the goal."""
    rows = np.concatenate(
        [np.arange(1, n - 25) + first for first, n in zip(data.offsets, data.lengths, strict=True)]
    )
    block = data.states[:, 2:4]
    moving = np.linalg.norm(block[rows] - block[rows - 1], axis=1) > 1
    far = np.linalg.norm(block[rows + 25] - block[rows], axis=1) > 20
    pushed = rows[moving & far]
    return pushed[np.linspace(0, len(pushed) - 1, 8).astype(int)]


def in_hand_or_not(data: EpisodeData) -> np.ndarray:
    """Row 0, and one that carries the cube."""
    return np.array([0, CARRYING])


def carried(data: EpisodeData) -> np.ndarray:
    """The cube is carried farther than a success reaches."""
    cube = data.states[:, CUBE][:, :3]
    rows = np.flatnonzero(np.linalg.norm(cube[25:] - cube[:-25], axis=1) > 0.06)
    return rows[np.linspace(0, len(rows) - 1, 4)[1:3].astype(int)]


def pusht_there(env: Any, state: np.ndarray, goal: np.ndarray) -> None:
    """The library resets, then sets the state and takes a physics step, by which the agent drifts on."""
    env.reset(seed=0)
    env.unwrapped._set_state(state)
    env.unwrapped._set_goal_state(goal)


def cube_there(env: Any, state: np.ndarray, goal: np.ndarray) -> None:
    """The library computes the effector's pose, to which actions are relative, from the row's qpos; while recording
    it was one physics step older."""
    import mujoco

    inner = env.unwrapped
    mujoco.mj_resetData(inner.model, inner.data)
    inner.set_target_pos(0, goal[CUBE][:3], goal[CUBE][3:])
    inner.set_state(state[:POSITIONS], state[POSITIONS : POSITIONS + VELOCITIES])


CARRYING = 30
ROOM = Case(TwoRoom, "tworoom", recorded=12, longest=40, offset=12, starts=published_draw)
AT_REST = Case(PushT, "pusht", recorded=12, longest=12, offset=2, starts=at_rest_and_clear_of_the_block)
PUSHES = Case(PushT, "pushes", recorded=3, longest=100, offset=25, starts=in_a_push, there=pusht_there)
CUBE_CASE = Case(
    *(Cube, "cube"),
    recorded=1,
    longest=45,
    offset=10,
    starts=in_hand_or_not,
    budget=28,
    drawn=(0, 10, CARRYING, CARRYING + 10),
    there=cube_there,
)

REPLAYED_PUSHES = replace(PUSHES, budget=25, drawn=())
REPLAYED_CUBE = replace(CUBE_CASE, starts=carried, longest=120, offset=25, budget=25, drawn=())

# How the published evaluation makes an environment, and puts it into a row of the dataset.
CALLABLES = [
    {"method": "_set_state", "args": {"state": {"value": "state"}}},
    {"method": "_set_goal_state", "args": {"goal_state": {"value": "goal_state"}}},
    {"method": "set_state", "args": {"qpos": {"value": "qpos"}, "qvel": {"value": "qvel"}}},
    {
        "method": "set_target_pos",
        "args": {
            "cube_id": {"value": 0, "in_dataset": False},
            "target_pos": {"value": "goal_privileged_block_0_pos"},
            "target_quat": {"value": "goal_privileged_block_0_quat"},
        },
    },
]
OPTIONS: dict[str, dict[str, Any]] = {
    "cube": {"env_type": "single", "mode": "data_collection", "visualize_info": False}
}
