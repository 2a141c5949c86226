"""TwoRoom: a red dot passes a door to reach the goal. 2-D; actions are velocities."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from atlas_wm.images import reduce_frames
from atlas_wm.settings import check_types, require, within
from atlas_wm.tasks.base import Columns, Coordinate, Task

SUCCESS_RADIUS = 16.0  # px; the environment's own constant
# px; farther away the dot has a weight of at most 2^-25, which changes no pixel in float32.
DOT_REACH = 42
CHUNK = 32  # images drawn at once; they fit into the CPU cache


@dataclass(frozen=True)
class TwoRoomDemonstrator:
    action_noise: float = 2.0  # standard deviation, before actions are clipped
    action_repeat_prob: float = 0.05

    def __post_init__(self) -> None:
        check_types("", self)
        require(self.action_noise >= 0, f"action_noise must be at least 0, not {self.action_noise}")
        within("", self, 0, 1, "action_repeat_prob")


class TwoRoom(Task):
    name = "tworoom"
    env_id = "swm/TwoRoom-v1"
    max_episode_steps = 100
    action_size = 2
    action_bounds = ((-1.0, 1.0),) * 2
    demonstrator_config = TwoRoomDemonstrator()
    state_columns = (("pos_agent",), ("state",))
    novelty_columns = (("pos_agent", "pos_target"), ("state", "goal_state"))

    def __init__(self) -> None:
        self._scene: _Scene | None = None

    def demonstrator_settings(self) -> dict[str, Any]:
        return {"policy": "stable_worldmodel two_room ExpertPolicy"}

    def demonstrator(self, env: gym.Env, seed: int) -> Any:
        from stable_worldmodel.envs.two_room import ExpertPolicy

        settings = self.demonstrator_config
        policy = ExpertPolicy(settings.action_noise, settings.action_repeat_prob, seed=seed)
        policy.set_env(env)
        return policy

    def columns(self, env: gym.Env, info: dict[str, Any]) -> Columns:
        return {key: np.asarray(info[key], np.float32) for key in ("state", "goal_state")}

    def reset(self, env: gym.Env, state: np.ndarray, goal_state: np.ndarray) -> None:
        env.reset(seed=0, options={"state": state, "target_state": goal_state})

    def rewind(self, env: gym.Env, state: np.ndarray, goal_state: np.ndarray) -> None:
        """Without the image of the goal that every reset renders."""
        env.unwrapped._set_state(state)  # type: ignore[attr-defined]

    def state(self, env: gym.Env) -> np.ndarray:
        return env.unwrapped.agent_position.numpy().astype(np.float32)  # type: ignore[attr-defined]

    def distance(self, state: np.ndarray, goal_state: np.ndarray) -> float:
        return float(np.linalg.norm(np.asarray(state) - np.asarray(goal_state)))

    def cost_to_goal(self, env: gym.Env, state: np.ndarray, goal_state: np.ndarray) -> float:
        """px, through the middle of the nearest door if the goal is in the other room."""
        inner: Any = env.unwrapped
        across, wall = int(inner.wall_axis == 0), float(inner.WALL_CENTER)
        if (state[across] < wall) == (goal_state[across] < wall):
            return self.distance(state, goal_state)
        doors = [(c, wall) if across else (wall, c) for c in inner.door_positions[: inner.num_doors].tolist()]
        return min(self.distance(state, np.array(d)) + self.distance(np.array(d), goal_state) for d in doors)

    def coordinates(self, states: np.ndarray) -> list[Coordinate]:
        return [Coordinate("agent", "px", states[:, :2])]

    def solved(self, state: np.ndarray, goal_state: np.ndarray) -> bool:
        return self.distance(state, goal_state) < SUCCESS_RADIUS

    def draw(self, states: np.ndarray, size: int) -> Tensor:
        self._scene = self._scene or _read_scene(self.make_env())
        chunks = range(0, len(states), CHUNK)
        return torch.cat([_draw(self._scene, states[i : i + CHUNK], size) for i in chunks])


class _Scene(NamedTuple):
    """The parts of an image. Equal colour channels are stored and computed once."""

    room: Tensor  # (c, H, W) uint8, without the dot
    colour: Tensor  # (c, 1, 1) of the dot
    std: float  # px, of the dot
    channels: list[int]  # the index among the c of red, green and blue


def _draw(scene: _Scene, states: np.ndarray, size: int) -> Tensor:
    """Blend the dot into the empty room. Only pixels near the dot are computed, with the environment's arithmetic:
    images equal rendered ones (tests compare them)."""
    full, count = scene.room.shape[-1], len(states)
    factor = full // size if full % size == 0 else 1  # blocks of factor² pixels become one
    side = min(full, -(-(2 * DOT_REACH + 1) // factor) * factor + factor)
    position = torch.from_numpy(np.ascontiguousarray(states[:, :2], dtype=np.float32))  # (N, xy)
    cell = ((position - DOT_REACH).floor().long() // factor).clamp(0, (full - side) // factor)

    pixels = cell[:, :, None] * factor + torch.arange(side)  # (N, xy, side) pixels near the dot
    dx, dy = (pixels - position[:, :, None]).square().unbind(1)
    dot = torch.exp(-(dx[:, None, :] + dy[:, :, None]) / (2.0 * scene.std * scene.std))  # rows are y
    alpha = (dot / dot.amax(dim=(1, 2), keepdim=True))[:, None]
    windows = scene.room.unfold(1, side, factor).unfold(2, side, factor)  # (c, y cell, x cell, side, side)
    under = windows[:, cell[:, 1], cell[:, 0]].transpose(0, 1).float()
    near = (under * (1.0 - alpha) + scene.colour * alpha).to(torch.uint8)
    near = reduce_frames(near, side // factor)

    frames = reduce_frames(scene.room[None], full // factor).repeat(count, 1, 1, 1)
    columns, rows = (cell[:, :, None] + torch.arange(side // factor)).unbind(1)
    frames.permute(0, 2, 3, 1)[torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]] = (
        near.permute(0, 2, 3, 1)
    )
    return reduce_frames(frames[:, scene.channels], size)


def _read_scene(env: gym.Env) -> _Scene:
    env.reset(seed=0)
    inner: Any = env.unwrapped
    room = inner._render_frame(agent_pos=torch.tensor([-1e4, -1e4]))
    colour = torch.from_numpy(inner.variation_space["agent"]["color"].value.astype(np.float32)).view(3, 1, 1)
    std = float(inner.variation_space["agent"]["radius"].value.item())
    env.close()
    same = [[bool((room[a] == room[b]).all() and colour[a] == colour[b]) for b in range(3)] for a in range(3)]
    first = [row.index(True) for row in same]
    distinct = sorted(set(first))
    return _Scene(room[distinct], colour[distinct], std, [distinct.index(c) for c in first])
