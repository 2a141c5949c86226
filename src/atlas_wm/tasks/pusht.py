"""PushT: a blue disc pushes a grey T. 2-D; actions are target displacements of the disc."""

from typing import Any

import gymnasium as gym
import numpy as np

from atlas_wm.tasks.base import Columns, Coordinate, Task
from atlas_wm.tasks.pusher import Pusher, PusherSettings

SUCCESS_RADIUS = 20.0  # px, over agent and block together; this and the next are the environment's constants
SUCCESS_ANGLE = np.pi / 9
PX_PER_RADIAN = SUCCESS_RADIUS / SUCCESS_ANGLE
BLOCK_STARTS = 125.0, 395.0  # px; the environment's 100 to 400 vary more than the published data
# Agent and block do not touch each other or the walls.
APART = np.array([60.0, 60.0, 256.0, 256.0, 0.0, 0.0, 0.0])
# What the loader of DINO-WM's pusht_noise states; the quantiles and the length are those of its rows.
PUBLISHED = {
    "action mean": (-0.009, 0.007),
    "action std": (0.202, 0.200),
    "|action| 50, 90, 99 %": (0.20, 0.47, 0.76),
    "episode length": (125.0,),
    "agent mean": (236.6, 264.6),
    "agent std": (101.1, 87.0),
    "block mean": (255.1, 266.4),
    "block std": (52.7, 57.5),
    "block angle mean": (1.96,),
    "block angle std": (1.76,),
    "agent velocity mean": (-2.9, 2.5),
    "agent velocity std": (74.8, 74.1),
}


class PushT(Task):
    """The state is (agent x, y, block x, y, block angle in [0, 2π), agent velocity x, y).

    Demonstrations push the block to the green T in 50 to 250 rows and match the moments of the published data
    (docs/notes/pusht-demonstrations.md). The environment draws a random goal for each episode and terminates if it
    is reached by chance; the pusher does not aim for it.
    """

    name = "pusht"
    env_id = "swm/PushT-v1"
    max_episode_steps = 250
    action_size = 2
    action_bounds = ((-1.0, 1.0),) * 2
    demonstrator_config = PusherSettings()
    published_moments = PUBLISHED
    state_columns = (("state",),)
    novelty_columns = (("state",),)

    def make_env(self) -> gym.Env:
        env = super().make_env()
        space: Any = env.unwrapped.variation_space  # type: ignore[attr-defined]
        for part in space.values():  # plain numbers make gymnasium warn at every reset
            for box in part.values():
                if isinstance(box, gym.spaces.Box):
                    box.set_init_value(np.asarray(box.init_value, box.dtype))  # type: ignore[attr-defined]
        start = space["block"]["start_position"]  # for demonstrations only: evaluation resets to given states
        start.low[:], start.high[:] = BLOCK_STARTS
        return env

    def demonstrator_settings(self) -> dict[str, Any]:
        return {"policy": "atlas_wm Pusher", "block_starts": list(BLOCK_STARTS)}

    def demonstrator(self, env: gym.Env, seed: int) -> Any:
        return Pusher(env, seed, self.demonstrator_config)

    def columns(self, env: gym.Env, info: dict[str, Any]) -> Columns:
        """The columns of stable-worldmodel's own collection, without the goal image."""
        agent, velocity, block = (
            np.asarray(info[key], np.float64) for key in ("pos_agent", "vel_agent", "block_pose")
        )
        return {
            "state": np.concatenate([agent, block[:2], [block[2] % (2 * np.pi)], velocity]),
            "goal_state": np.asarray(info["goal_state"], np.float64),
            "proprio": np.concatenate([agent, velocity]),
            "block_pose": block,
        }

    def reset(self, env: gym.Env, state: np.ndarray, goal_state: np.ndarray) -> None:
        """Set agent and block exactly, even during a push.

        The environment's ``_set_state`` takes a physics step after it sets the state, so the agent drifts. Here the
        agent starts one step earlier and the step moves it to its position. The step also restores what the state
        columns do not contain: the contact of agent and block, and the velocity the contact gives the block for one
        physics step. Contacts are visible in frames as a red dot of a few pixels.

        Frames equal the recorded ones. The recorded actions reproduce the recorded states up to rounding (1e-12 px)
        unless the block touches a wall: between agent and wall, the physics amplify any difference.
        """
        env.reset(seed=0, options={"state": APART, "goal_state": np.asarray(goal_state, np.float64)})
        self.rewind(env, state, goal_state)

    def rewind(self, env: gym.Env, state: np.ndarray, goal_state: np.ndarray) -> None:
        """Without the image of the goal that every reset renders."""
        inner: Any = env.unwrapped
        state = np.asarray(state, np.float64)
        _set(inner, APART)
        for _ in range(3):  # the physics remember contacts for three steps
            inner.space.step(inner.dt)
        _set(inner, np.concatenate([state[:2] - state[5:7] * inner.dt, state[2:]]))
        inner.space.step(inner.dt)
        inner.agent.position = state[:2].tolist()  # equal up to rounding
        inner.space.reindex_shapes_for_body(inner.agent)

    def state(self, env: gym.Env) -> np.ndarray:
        return env.unwrapped._get_obs()  # type: ignore[attr-defined]

    def distance(self, state: np.ndarray, goal_state: np.ndarray) -> float:
        """px, over the positions of agent and block together."""
        return float(np.linalg.norm(np.asarray(state)[:4] - np.asarray(goal_state)[:4]))

    def cost_to_goal(self, env: gym.Env, state: np.ndarray, goal_state: np.ndarray) -> float:
        """px: the distance and the angle, each compared with what still counts as success."""
        return float(np.hypot(self.distance(state, goal_state), turn(state, goal_state) * PX_PER_RADIAN))

    def coordinates(self, states: np.ndarray) -> list[Coordinate]:
        angle = np.stack([np.cos(states[:, 4]), np.sin(states[:, 4])], axis=1)
        return [
            Coordinate("agent", "px", states[:, :2]),
            Coordinate("block", "px", states[:, 2:4]),
            Coordinate("angle", "°", angle, angle=True),
        ]

    def quantities(self, states: np.ndarray) -> list[Coordinate]:
        """Of the published moments: the angle as a number in [0, 2π)."""
        return [
            Coordinate("agent", "px", states[:, :2]),
            Coordinate("block", "px", states[:, 2:4]),
            Coordinate("block angle", "rad", states[:, 4:5]),
            Coordinate("agent velocity", "px/s", states[:, 5:7]),
        ]

    def solved(self, state: np.ndarray, goal_state: np.ndarray) -> bool:
        near = self.distance(state, goal_state) < SUCCESS_RADIUS
        return bool(near and turn(state, goal_state) < SUCCESS_ANGLE)


def turn(state: np.ndarray, goal_state: np.ndarray) -> float:
    """Radians between the angles of the block, at most π."""
    angle = abs(float(state[4]) - float(goal_state[4]))
    return min(angle, 2 * np.pi - angle)


def _set(env: Any, state: np.ndarray) -> None:
    """Positions and velocities; the block is at rest."""
    agent, block = env.agent, env.block
    agent.position, agent.velocity = state[:2].tolist(), state[5:7].tolist()
    block.angle = float(state[4])
    block.position = state[2:4].tolist()  # after the angle, which rotates about the centre of mass
    block.velocity, block.angular_velocity = (0.0, 0.0), 0.0
