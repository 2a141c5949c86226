"""OGBench-Cube: a robot arm carries a cube to a target. 3-D; actions move, rotate and close the gripper."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import gymnasium as gym
import numpy as np

from atlas_wm.errors import UserError
from atlas_wm.settings import check_types, within
from atlas_wm.tasks import rendering
from atlas_wm.tasks.base import Columns, Coordinate, Task, import_harness

SUCCESS_RADIUS = 0.04  # m; this and the next are the environment's constants
TABLE_CENTRE = np.array([0.425, 0.0, 0.0])  # m
POSITIONS, VELOCITIES = 21, 20  # lengths of qpos and qvel
STATE = POSITIONS + VELOCITIES
HIDDEN = STATE + VELOCITIES  # numbers in the hidden columns
CUBE_JOINT = "object_joint_0"
CUBE = slice(14, 21)  # the cube's free joint in qpos, position then quaternion; checked against the model
STORED = ("observation", "qpos", "qvel", "privileged/block_0_pos", "privileged/block_0_quat")


@dataclass(frozen=True)
class CubeDemonstrator:
    """targets: where the expert carries the cube. one: to one target per episode, as in stable-worldmodel and so in
    the published data; after that only the arm moves. many: to a new target whenever it has reached the last, as in
    OGBench."""

    targets: Literal["one", "many"] = "one"
    action_noise: float = 0.1  # the largest standard deviation of an episode's noise
    p_random_action: float = 0.0
    min_norm: float = 0.4  # of the expert's steps
    shadow_size: int = 4096  # pixels of the shadow map; 1024 renders twice as fast, and 0.25 % of pixels differ

    def __post_init__(self) -> None:
        check_types("", self)
        within("", self, 0, 1, "action_noise", "p_random_action", "min_norm")
        within("", self, 1, 16384, "shadow_size")


class Cube(Task):
    name = "cube"
    env_id = "swm/OGBCube-v0"
    max_episode_steps = 200  # enough to carry the cube to two or three targets
    demonstrator_config = CubeDemonstrator()
    action_size = 5
    action_bounds = ((-1.0, 1.0),) * 5
    state_columns = (("qpos", "qvel"),)
    novelty_columns = (("observation",),)
    coordinate_columns = (("observation",),)
    hidden_columns = ("qpos_low", "qvel_low", "qacc_warmstart")
    episodes_per_job = 2  # software rendering takes a minute per episode
    most_at_once = 16  # 320 MB each with a renderer
    max_env_processes = 6  # rendering hangs with many EGL contexts
    most_collectors = 6  # the same; more were not faster on one GPU (docs/notes/cube.md)

    def make_env(self) -> gym.Env:
        rendering.set_renderer()  # before anything imports MuJoCo
        import_harness()
        with _without_warnings():
            env = gym.make(
                self.env_id,
                max_episode_steps=-1,  # CubeEpisodes counts
                render_mode="rgb_array",
                disable_env_checker=True,
                env_type="single",
                ob_type="states",
                mode="data_collection",  # any start and target, not OGBench's five tasks
                visualize_info=False,  # do not show the target: the goal is a separate image
                width=224,
                height=224,
            )
        return CubeEpisodes(env, self.max_episode_steps, self.demonstrator_config.shadow_size)

    def demonstrator_settings(self) -> dict[str, Any]:
        return {"policy": "stable_worldmodel ogbench ExpertPolicy", "policy_type": "markov_oracle"}

    def demonstrator(self, env: gym.Env, seed: int) -> Any:
        return CubeExpert(env, seed, self.demonstrator_config)

    def columns(self, env: gym.Env, info: dict[str, Any]) -> Columns:
        """The columns of the published file and the hidden ones: the solver's warm start, and the float32 rounding
        errors of positions and velocities (Lance stores float32), because contacts amplify any difference."""
        stored = {key.replace("/", "_"): np.array(info[key]) for key in STORED}
        warmstart = env.unwrapped.data.qacc_warmstart  # type: ignore[attr-defined]
        low = {f"{key}_low": stored[key] - stored[key].astype(np.float32) for key in ("qpos", "qvel")}
        return {**stored, **low, "qacc_warmstart": warmstart.copy()}

    def reset(self, env: gym.Env, state: np.ndarray, goal_state: np.ndarray) -> None:
        env.get_wrapper_attr("start_at")(np.asarray(state, np.float64), np.asarray(goal_state, np.float64))

    def state(self, env: gym.Env) -> np.ndarray:
        data = env.unwrapped.data  # type: ignore[attr-defined]
        return np.concatenate([data.qpos, data.qvel])

    def full_state(self, env: gym.Env) -> np.ndarray:
        state, data = self.state(env), env.unwrapped.data  # type: ignore[attr-defined]
        return np.concatenate([state, state - state.astype(np.float32), data.qacc_warmstart])

    def distance(self, state: np.ndarray, goal_state: np.ndarray) -> float:
        """Metres between the cube and its goal position."""
        cube, target = (np.asarray(s, np.float64)[CUBE][:3] for s in (state, goal_state))
        return float(np.linalg.norm(cube - target))

    def coordinates(self, states: np.ndarray) -> list[Coordinate]:
        """The observation holds positions relative to the table's centre, in units of 0.1 m."""
        cube, gripper = (states[:, part] / 10 + TABLE_CENTRE for part in (slice(19, 22), slice(12, 15)))
        return [Coordinate("cube", "m", cube), Coordinate("gripper", "m", gripper)]

    def solved(self, state: np.ndarray, goal_state: np.ndarray) -> bool:
        return self.distance(state, goal_state) <= SUCCESS_RADIUS


class CubeEpisodes(gym.Wrapper):
    """The harness' environment with reproducible episodes.

    The harness' ``reset`` ignores the seed and compiles the model every time. Here :meth:`reset` starts a
    demonstration, which continues when the target is reached; :meth:`start_at` starts an evaluation episode, which
    then ends.
    """

    def __init__(self, env: gym.Env, max_steps: int, shadow_size: int):
        super().__init__(env)
        self.inner: Any = env.unwrapped
        self.max_steps, self.steps, self.shadow_size = max_steps, 0, shadow_size
        self.action_space = gym.spaces.Box(-1.0, 1.0, (Cube.action_size,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """``options`` are ignored: the scene is a function of the seed. Colours and sizes are the defaults."""
        rng, space = np.random.default_rng(seed), self.inner.variation_space
        scene = {**draw_pose(space, "start", rng), **draw_pose(space, "goal", rng)}
        self.inner.np_random = rng
        with _without_warnings():
            observation, info = self.env.reset(options={"variation": (), "variation_values": scene})
        self.inner.mark_dirty = lambda: None  # do not compile the model again
        self.inner.model.vis.quality.shadowsize = self.shadow_size  # the renderer reads it when it is made
        self.inner._terminate_at_goal = False
        self.steps = 0
        return observation, self._complete(info, observation)

    def start_at(self, state: np.ndarray, goal: np.ndarray) -> None:
        """Set the simulation to ``state`` and the target to the cube's pose in ``goal``.

        A control step ends with an integration. Derived quantities, such as the rendered poses and the effector
        position that actions are relative to, are then one physics step older than qpos. To reproduce this,
        the last integration is undone exactly, which needs only qpos and qvel.
        """
        import mujoco

        if self.inner._model is None:
            self.reset(seed=0)
        model, data = self.inner.model, self.inner.data
        if (model.nq, model.nv, model.joint(CUBE_JOINT).qposadr[0]) != (POSITIONS, VELOCITIES, CUBE.start):
            raise RuntimeError("the Cube environment has another qpos layout than atlas_wm.tasks.cube expects")
        if state.shape not in ((STATE,), (STATE + HIDDEN,)):
            raise UserError(
                f"a state of cube is qpos and qvel, {STATE} numbers, or these and "
                f"{', '.join(Cube.hidden_columns)}, {STATE + HIDDEN} numbers, not {state.shape}"
            )
        state, low, warmstart = np.split(state, [STATE, 2 * STATE])
        if len(low):
            state = state.astype(np.float32) + low
        positions, velocities = state[:POSITIONS], state[POSITIONS:]
        before = positions.copy()
        mujoco.mj_integratePos(model, before, velocities, -model.opt.timestep)
        mujoco.mj_resetData(model, data)  # also resets time, controls and the solver's warm start
        self.inner.set_target_pos(0, goal[CUBE][:3], goal[CUBE][3:])
        self.inner.set_state(before, velocities)
        data.qpos[:] = positions
        if len(warmstart):
            data.qacc_warmstart[:] = warmstart
        self.inner.pre_step()
        self.inner.post_step()
        self.inner._terminate_at_goal = True
        self.steps = 0

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.steps += 1
        truncated = truncated or self.steps >= self.max_steps
        return observation, reward, bool(terminated), truncated, self._complete(info, observation)

    def render(self) -> Any:
        rendering.require_renderer()
        try:
            return self.env.render()
        except Exception as error:
            if self.inner._renderer is not None:  # it has rendered before, so the backend works
                raise
            raise UserError(
                f"MuJoCo cannot render ({error}), because it was imported before its backend was chosen: "
                f"set MUJOCO_GL={rendering.pick_renderer()} when you start Python"
            ) from error

    def _complete(self, info: dict[str, Any], observation: Any) -> dict[str, Any]:
        return {**info, "observation": observation, "step_idx": self.steps}


class CubeExpert:
    """The harness' vectorised expert for a single environment; an episode is a function of the seed.

    OGBench's oracles draw from NumPy's global generator, so its state is replaced while they act. The harness draws
    a target once per episode and sets it again after it is reached; ``many`` draws a new one before that.
    """

    def __init__(self, env: gym.Env, seed: int, settings: CubeDemonstrator):
        from stable_worldmodel.envs.ogbench.expert_policy import ExpertPolicy

        self._space = env.unwrapped.variation_space  # type: ignore[attr-defined]
        self._targets = np.random.default_rng([seed, 1])
        self._oracle_state = np.random.RandomState(seed).get_state()
        self._many = settings.targets == "many"
        self._policy = ExpertPolicy(
            "markov_oracle",
            action_noise=settings.action_noise,
            p_random_action=settings.p_random_action,
            min_norm=settings.min_norm,
            seed=seed,
        )
        actions = SimpleNamespace(shape=(1, *env.action_space.shape))  # type: ignore[misc]
        self._policy.set_env(SimpleNamespace(envs=[env], num_envs=1, action_space=actions))

    def get_action(self, info: dict[str, Any]) -> np.ndarray:
        if self._many:
            self._space.set_value(draw_pose(self._space, "goal", self._targets))  # read when a target is set
        with self._own_global_generator():
            return self._policy.get_action({key: [[value]] for key, value in info.items()})[0]

    @contextmanager
    def _own_global_generator(self) -> Iterator[None]:
        before = np.random.get_state()  # noqa: NPY002
        np.random.set_state(self._oracle_state)  # noqa: NPY002
        try:
            yield
        finally:
            self._oracle_state = np.random.get_state()  # noqa: NPY002
            np.random.set_state(before)  # noqa: NPY002


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Hide gymnasium's warnings about types and metadata of the harness' environment."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="gymnasium")
        yield


def draw_pose(space: Any, which: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A position and yaw of the cube, uniform over the harness' bounds, in the format of its ``reset``."""
    boxes = {f"cube.{which}_{part}": space["cube"][f"{which}_{part}"] for part in ("position", "yaw")}
    return {key: rng.uniform(box.low, box.high) for key, box in boxes.items()}
