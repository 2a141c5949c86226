"""Cube: a reset puts the simulation and the image where a row says; a demonstration follows from its seed."""

import os
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest

from atlas_wm.data.collect import record_episode
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.errors import UserError
from atlas_wm.evaluate.protocol import Protocol, draw_starts
from atlas_wm.tasks import rendering
from atlas_wm.tasks.cube import CUBE, CUBE_JOINT, POSITIONS, Cube

TASK = Cube()
MANY = TASK.with_demonstrator(["targets=many"])
FORMATS = {".h5": "hdf5", ".lance": "lance"}
ROWS = (0, *sorted(1 + np.random.default_rng(0).choice(200, 19, replace=False)))  # of 201: those drawn


@pytest.fixture(scope="module")
def env():
    return TASK.make_env()


@pytest.fixture(scope="module")
def episode(env):
    return record_episode(TASK, env, seed=3, number=0, pixels=False)


@pytest.fixture(scope="module")
def states(episode) -> np.ndarray:
    return np.concatenate([episode["qpos"], episode["qvel"]], axis=1)


@pytest.mark.filterwarnings("ignore:.*WARN")  # gymnasium's, about the precision of the bounds
def test_the_action_bounds_are_those_of_the_environment(env):
    wrapped = env.env.action_space  # the wrapper has one of its own, which it makes before the model is compiled
    for space in (env.action_space, wrapped):
        assert TASK.action_bounds == tuple(zip(space.low.tolist(), space.high.tolist(), strict=True))


@pytest.fixture
def needs_renderer():
    if rendering.pick_renderer() is None:
        pytest.skip(f"MuJoCo cannot draw on this machine: {rendering.remedy()}")


@pytest.fixture
def fresh_choice(monkeypatch):
    """As if nothing had been chosen yet."""
    for function in (rendering.pick_renderer, rendering.asked_for):
        function.cache_clear()
    yield monkeypatch
    for function in (rendering.pick_renderer, rendering.asked_for):
        function.cache_clear()


class DrawSomeRows(gym.Wrapper):
    def render(self):
        drawn = self.env.get_wrapper_attr("steps") in ROWS
        return self.env.render() if drawn else np.zeros((224, 224, 3), np.uint8)


def test_columns_are_those_of_the_published_file_and_the_hidden_ones(env, episode):
    shapes = {name: values.shape[1:] for name, values in episode.items()}
    assert [shapes.pop(name) for name in TASK.hidden_columns] == [(21,), (20,), (20,)]
    assert shapes == {
        "observation": (28,),
        "qpos": (21,),
        "qvel": (20,),
        "privileged_block_0_pos": (3,),
        "privileged_block_0_quat": (4,),
        "action": (5,),
    }
    assert len(episode["action"]) == TASK.max_episode_steps + 1
    cube = np.concatenate([episode["privileged_block_0_pos"], episode["privileged_block_0_quat"]], axis=1)
    assert np.array_equal(episode["qpos"][:, CUBE], cube)
    joint = env.unwrapped.model.joint(CUBE_JOINT)
    assert (joint.qposadr[0], len(joint.qpos0)) == (CUBE.start, CUBE.stop - CUBE.start)


def test_the_probe_reads_the_positions_of_the_simulation_in_metres(env, episode, states):
    cube, gripper = TASK.coordinates(episode["observation"])
    assert [(c.name, c.unit) for c in (cube, gripper)] == [("cube", "m"), ("gripper", "m")]
    np.testing.assert_allclose(cube.values, episode["privileged_block_0_pos"], atol=1e-6)
    for row in (0, 60, 150):
        TASK.reset(env, states[row], states[-1])
        there = env.unwrapped.compute_ob_info()["proprio/effector_pos"]
        np.testing.assert_allclose(gripper.values[row], there, atol=1e-4)


def test_a_reset_puts_the_simulation_exactly_where_asked(env, states):
    rng = np.random.default_rng(0)
    for row, goal in rng.choice(len(states), (50, 2)):
        TASK.reset(env, states[row], states[goal])
        assert np.abs(TASK.state(env) - states[row]).max() <= 1e-9
        assert np.array_equal(env.unwrapped.data.mocap_pos[0], states[goal, CUBE][:3])
        assert np.array_equal(env.unwrapped.data.mocap_quat[0], states[goal, CUBE][3:])
        assert env.unwrapped.data.time == 0


def test_an_episode_does_not_depend_on_what_was_before_it(env, states):
    ends = []
    for before in (10, 150):
        TASK.reset(env, states[before], states[0])
        for action in np.eye(5, dtype=np.float32):
            env.step(action)
        TASK.reset(env, states[60], states[-1])
        for action in np.eye(5, dtype=np.float32):
            env.step(action)
        ends.append(TASK.state(env))
    assert np.array_equal(*ends)


@pytest.fixture(scope="module", params=FORMATS)
def collected(request, env, episode, tmp_path_factory) -> EpisodeData:
    from stable_worldmodel.data import get_format

    path = tmp_path_factory.mktemp("cube") / f"cube{request.param}"
    with get_format(FORMATS[request.param]).open_writer(path) as writer:
        writer.write_episode({column: list(values) for column, values in episode.items()})
    return EpisodeData(path, TASK, image_size=32, frameskip=5)


def replay(env, data: EpisodeData, row: int, start: np.ndarray, steps: int = 50) -> float:
    """How far the recorded actions lead away from the recorded positions."""
    TASK.reset(env, start, data.states[row + steps])
    away = 0.0
    for step in range(row, row + steps):
        env.step(data.actions[step])
        away = max(away, np.abs(TASK.state(env) - data.states[step + 1])[:POSITIONS].max())
    return away


def test_the_recorded_actions_lead_along_the_recorded_states(env, collected):
    """From anywhere: in the air, in the middle of a grasp, with the cube in hand."""
    rows = draw_starts(collected, Protocol(offset=50, episodes=15), seed=0)
    away = [
        replay(env, collected, row, start) for row, start in zip(rows, collected.start_states(rows), strict=True)
    ]
    assert max(away) < 1e-4 and np.median(away) < 1e-6  # radians and metres; Lance keeps float32


def test_without_the_hidden_columns_most_rows_are_repeated(env, collected):
    """As in the published file, or one that was collected before they were stored."""
    rows = draw_starts(collected, Protocol(offset=50, episodes=10), seed=0)
    assert np.median([replay(env, collected, row, collected.states[row]) for row in rows]) < 1e-4


def test_solved_agrees_with_the_environment(env, states):
    rng = np.random.default_rng(1)
    verdicts = []
    for row in rng.choice(len(states), 60):
        goal = states[row].copy()
        goal[CUBE][:3] += rng.uniform(-0.05, 0.05, 3)
        TASK.reset(env, states[row], goal)
        _, _, terminated, _, info = env.step(rng.uniform(-1, 1, 5).astype(np.float32))
        assert TASK.solved(TASK.state(env), goal) == terminated == info["success"]
        verdicts.append(terminated)
    assert 10 < sum(verdicts) < 50


def test_at_the_goal_the_episode_is_won(env, states):
    TASK.reset(env, states[0], states[0])
    assert TASK.distance(states[0], states[0]) == 0 and TASK.solved(TASK.state(env), states[0])
    _, _, terminated, truncated, _ = env.step(np.zeros(5, np.float32))
    assert terminated and not truncated


def test_distance_is_the_cubes_alone(states):
    moved = states[0].copy()
    moved[: CUBE.start] += 1.0
    moved[CUBE][3:] = (0, 0, 0, 1)
    moved[CUBE][:3] += (0.03, 0, 0.04)
    assert TASK.distance(moved, states[0]) == pytest.approx(0.05)


def test_a_state_of_another_length_is_refused(env, states):
    with pytest.raises(UserError, match=r"41 numbers.*102 numbers"):
        TASK.reset(env, states[0, :21], states[0, :21])


def test_a_demonstration_follows_from_its_seed(env, episode):
    np.random.seed(99)  # noqa: NPY002  # the oracles' own source of noise, and no business of theirs here
    used = record_episode(TASK, env, seed=3, number=0, pixels=False)
    assert np.random.uniform() == np.random.RandomState(99).uniform()  # noqa: NPY002
    new = record_episode(TASK, TASK.make_env(), seed=3, number=0, pixels=False)
    other = record_episode(TASK, env, seed=3, number=1, pixels=False)
    for column, values in episode.items():
        assert np.array_equal(values, used[column], equal_nan=True), column
        assert np.array_equal(values, new[column], equal_nan=True), column
        assert not np.array_equal(values, other[column], equal_nan=True), column


def test_the_expert_carries_the_cube_about(env):
    for number in range(3):
        demonstration = record_episode(TASK, env, seed=0, number=number, pixels=False)
        cube = demonstration["privileged_block_0_pos"]
        assert cube[:, 2].max() > 0.1  # lifted
        assert np.linalg.norm(cube - cube[0], axis=1).max() > 0.1
        assert np.abs(demonstration["action"][:-1]).max() <= 1


def targets_of(task: Cube, env) -> tuple[list, set]:
    """The targets of a demonstration in order, and those the cube was brought to."""
    policy = task.demonstrator(env, seed=1)
    _, info = env.reset(seed=2)
    targets, reached = [], set()
    for _ in range(task.max_episode_steps):
        target = tuple(info["privileged/target_block_pos"])
        targets += [target] if target not in targets else []
        reached |= {target} if info["success"] else set()
        _, _, terminated, _, info = env.step(policy.get_action(info))
        assert not terminated  # a demonstration goes on
    return targets, reached


def test_an_episode_has_one_target_or_a_new_one_whenever_the_last_was_reached(env):
    (only,), reached = targets_of(TASK, env)
    assert reached == {only}
    targets, reached = targets_of(MANY, env)
    assert len(targets) >= 2 and set(targets[:-1]) <= reached
    assert targets[0] == only


def test_the_target_rules_differ_only_after_the_first_target(env, episode):
    many = record_episode(MANY, env, seed=3, number=0, pixels=False)["privileged_block_0_pos"]
    one = episode["privileged_block_0_pos"]
    apart = np.flatnonzero((one != many).any(axis=1))[0]
    assert apart > 30 and np.linalg.norm(one[apart] - one[0]) > 0.1
    assert np.linalg.norm(one[apart:] - one[apart], axis=1).max() < 0.04  # it stays, so later goals are solved
    assert np.linalg.norm(many[apart:] - many[apart], axis=1).max() > 0.1


@pytest.mark.slow
def test_rows_look_like_their_stored_frames(needs_renderer, env, episode, states):
    stored = record_episode(TASK, DrawSomeRows(TASK.make_env()), seed=3, number=0, pixels=True)
    assert np.array_equal(stored["qpos"], episode["qpos"])  # drawing does not touch the simulation
    for row in ROWS:
        frame = stored["pixels"][row].astype(int)
        assert frame.shape == (224, 224, 3) and frame.std() > 10
        TASK.reset(env, states[row], states[-1])
        assert np.abs(env.render() - frame).max() <= 2  # rounding of positions; an outline off by a step is 100
    coarse = TASK.with_demonstrator(["shadow_size=256"]).make_env()
    TASK.reset(coarse, states[ROWS[-1]], states[-1])
    assert 0 < (np.abs(coarse.render() - frame) > 8).any(axis=-1).mean() < 0.05  # edges of shadows
    with_this_goal = env.render()
    TASK.reset(env, states[ROWS[-1]], states[0])
    assert np.array_equal(with_this_goal, env.render())  # the target is not in the image


@pytest.mark.parametrize(
    ("works", "chosen"), [(("egl", "osmesa"), "egl"), (("osmesa",), "osmesa"), (("glfw",), None), ((), None)]
)
def test_egl_is_preferred_then_osmesa(fresh_choice, works, chosen):
    fresh_choice.delenv("MUJOCO_GL", raising=False)
    fresh_choice.setattr(sys, "platform", "linux")
    fresh_choice.setattr(rendering, "try_renderer", lambda backend: None if backend in works else "no")
    assert rendering.pick_renderer() == chosen


def test_the_users_backend_is_respected(fresh_choice):
    fresh_choice.setenv("MUJOCO_GL", "OSMesa")
    fresh_choice.setattr(rendering, "try_renderer", lambda backend: None if backend == "egl" else "no")
    assert rendering.pick_renderer() is None
    with pytest.raises(UserError, match="MUJOCO_GL=osmesa is set: unset it"):
        rendering.require_renderer()


def test_a_try_says_why_not():
    rendering.try_renderer.cache_clear()
    assert "nonsense" in rendering.try_renderer("nonsense")
    assert "no image" in rendering.try_renderer("egl", timeout=0.01)
    assert "off" in rendering.try_renderer("disable")


@pytest.mark.slow
def test_without_a_renderer_only_frames_are_missing():
    code = """
import numpy as np
from atlas_wm.errors import UserError
from atlas_wm.tasks.cube import Cube
env = Cube().make_env()
env.reset(seed=0)
env.step(np.zeros(5, np.float32))
try:
    env.render()
except UserError as error:
    print(error)
"""
    surroundings = {**os.environ, "MUJOCO_GL": "nonsense"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=surroundings, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "MUJOCO_GL=nonsense is set" in done.stdout and "libegl1" in done.stdout
