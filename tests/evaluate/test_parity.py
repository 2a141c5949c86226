"""Parity with the harness: the same weights and the same noise give stable-worldmodel's own actions and results."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import numpy as np
import pytest
import torch
from parity_cases import (
    AT_REST,
    CALLABLES,
    CUBE_CASE,
    OPTIONS,
    PUSHES,
    REPLAYED_CUBE,
    REPLAYED_PUSHES,
    ROOM,
    SEED,
    Case,
)

from atlas_wm.config import PlanConfig
from atlas_wm.data.collect import record_episode
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.evaluate.env_batch import EnvBatch, Observe
from atlas_wm.evaluate.protocol import Protocol, draw_starts
from atlas_wm.evaluate.rollout import Policy, planning_policy, run_episodes
from atlas_wm.images import reduce_frames
from atlas_wm.models.world_model import WorldModel
from atlas_wm.normalizer import Normalizer
from atlas_wm.plan.harness import GoalCost, Standardisation
from atlas_wm.plan.planner import Planner
from atlas_wm.rng import make_rng
from atlas_wm.runs.results import EpisodeRecord
from atlas_wm.tasks import Task, rendering
from atlas_wm.tasks.base import import_harness
from atlas_wm.tasks.cube import Cube

import_harness()
from stable_worldmodel import World  # noqa: E402
from stable_worldmodel.data import get_format, load_dataset  # noqa: E402
from stable_worldmodel.policy import BasePolicy, WorldModelPolicy  # noqa: E402
from stable_worldmodel.policy import PlanConfig as TheirPlanConfig  # noqa: E402
from stable_worldmodel.solver import CEMSolver  # noqa: E402
from stable_worldmodel.solver.callbacks import Callback  # noqa: E402

PLAN = PlanConfig(candidates=60, iterations=4, elites=8, clip_actions=False)  # the library clips nothing
PLANNED = 25  # actions of a plan, all of which are executed: the policy looks at no frame in between


class Recorder(gym.Wrapper):
    """Keeps the actions an environment was given, and the states they led to."""

    def __init__(self, env: gym.Env, task: Any, drawn_every: int = 1):
        """``drawn_every``: actions from one frame that is drawn to the next, the others are black [0: all are]."""
        super().__init__(env)
        self.task, self.drawn_every, self.actions, self.states = task, drawn_every, [], []
        self.before_acting = lambda: None
        if hasattr(env.unwrapped, "render_multiview"):  # the library calls this one, for the same frame
            env.unwrapped.render_multiview = self.render

    def reset(self, *, seed=None, options=None):
        """The library resets with no seed before it sets the state; with one its run can be repeated."""
        return self.env.reset(seed=0 if seed is None else seed, options=options)

    def step(self, action):
        self.before_acting()
        self.before_acting = lambda: None
        result = self.env.step(action)
        self.actions.append(np.array(action))
        self.states.append(self.task.state(self.env))
        return result

    def render(self):
        drawn = self.drawn_every and len(self.actions) % self.drawn_every == 0
        return self.env.render() if drawn else np.zeros((224, 224, 3), np.uint8)


def task_of(case: Case) -> Task:
    """Episodes begin with the row's frame, as in the library, and go on from where its reset leaves them."""

    class Started(case.task):  # type: ignore[misc, name-defined]
        def reset(self, env, state, goal_state):
            super().reset(env, state, goal_state)
            if case.there is not None:
                env.before_acting = partial(case.there, env.env, state, goal_state)

    return Started()


class OurNoise(Callback):
    """Before each episode of a solve, hands the library's solver the generator that we would use."""

    def __init__(self, solver: CEMSolver, offset: int):
        self.solver, self.offset, self.plans = solver, offset, Counter()
        solve = solver.solve

        def noting_the_rows(info, init_action=None):
            assert init_action is None  # the whole plan is executed: nothing is left to start warm from
            self.rows = iter((info["goal_row"].flatten() - offset).tolist())
            return solve(info, init_action)

        solver.solve = noting_the_rows
        super().__init__()

    def start_batch(self):
        row = next(self.rows)
        self.solver.torch_gen = make_rng(SEED, row, self.plans[row])
        self.plans[row] += 1

    def __call__(self, **kwargs):
        pass


def planning_there(model: WorldModel, offset: int) -> tuple[WorldModelPolicy, Counter[int]]:
    """The library's policy with our noise, and its count of the plans for each row."""
    size = model.config.encoder.image_size

    def reduce(image):
        return reduce_frames(torch.as_tensor(image).as_subclass(torch.Tensor)[None], size)[0]

    solver = CEMSolver(
        GoalCost(model), batch_size=1, num_samples=PLAN.candidates, n_steps=PLAN.iterations, topk=PLAN.elites
    )
    noise = OurNoise(solver, offset)
    solver.callbacks = [noise]
    policy = WorldModelPolicy(
        solver,
        TheirPlanConfig(PLAN.horizon, PLAN.execute, action_block=model.config.frameskip),
        process={"action": Standardisation(model.normalizer)},
        transform={"pixels": reduce, "goal": reduce},
    )
    return policy, noise.plans


class ReplayThere(BasePolicy):
    """The recorded actions, in the library's loop."""

    def __init__(self, data: EpisodeData, rows: np.ndarray):
        super().__init__()
        self.data, self.rows, self.steps = data, rows, 0

    def get_action(self, info, **kwargs):
        self.steps += 1
        return self.data.actions[self.rows + self.steps - 1]


def library_evaluation(
    policy: BasePolicy, case: Case, data: EpisodeData, rows: np.ndarray, offset: int, drawn_every: int
) -> tuple[np.ndarray, list[Recorder]]:
    """World.evaluate on these rows → successes, recorders. It renders after every action."""
    recorders: list[Recorder] = []

    def recorder(env):
        recorders.append(Recorder(env, data.task, drawn_every))
        return recorders[-1]

    episodes, steps = data.locate(rows)
    options = OPTIONS.get(data.task.name, {})
    world = World(
        *(data.task.env_id, len(rows), (224, 224)),
        max_episode_steps=2 * case.budget,
        pre_wrappers=[recorder],
        **options,
    )
    world.set_policy(policy)
    result = world.evaluate(
        dataset=load_dataset(str(data.path)),
        episodes_idx=episodes.tolist(),
        start_steps=steps.tolist(),
        goal_offset=offset,
        eval_budget=case.budget,
        callables=CALLABLES,
    )
    world.close()
    return result["episode_successes"], recorders


class SomeFrames(gym.Wrapper):
    """Draws only the rows that the case needs."""

    def __init__(self, env: gym.Env, case: Case):
        super().__init__(env)
        self.case, self.row = case, 0

    def reset(self, **options):
        self.row = 0
        return self.env.reset(**options)

    def step(self, action):
        self.row += 1
        return self.env.step(action)

    def render(self):
        drawn = self.case.drawn is None or self.row in self.case.drawn
        return self.env.render() if drawn else np.zeros((224, 224, 3), np.uint8)


def record(case: Case, folder: Path, image_size: int = 32, frameskip: int = 5) -> EpisodeData:
    """Lossless, so that the first frame of the library, the dataset's, is the one that we render."""
    task, path = task_of(case), folder / "data.h5"
    task.max_episode_steps = case.longest
    env = SomeFrames(task.make_env(), case)
    episodes = [record_episode(task, env, seed=3, number=number, pixels=True) for number in range(case.recorded)]
    with get_format("hdf5").open_writer(path) as writer:
        writer.write_episodes([{column: list(values) for column, values in e.items()} for e in episodes])
    with h5py.File(path, "a") as file:  # the library hands every column to its solver, which so can tell episodes
        file["row"] = np.arange(sum(len(e["action"]) for e in episodes))[:, None]
    return EpisodeData(path, task_of(case), image_size, frameskip)


def calibrate(model: WorldModel, data: EpisodeData, rows: np.ndarray, offset: int) -> None:
    """Random weights hardly look at frames; with BatchNorm statistics of the data, plans depend on them."""
    frames = data.frames_of(np.stack([rows, rows + offset, np.roll(rows, 1)], axis=1).reshape(-1))
    frames = frames.unflatten(0, (len(rows), 3))
    for layer in model.modules():
        if isinstance(layer, torch.nn.BatchNorm1d):
            layer.momentum = 1.0
    block = model.config.frameskip * model.action_size
    with torch.no_grad():
        model.train()(frames, torch.randn(len(frames), 2, block, generator=make_rng(0)))
    model.eval().normalizer = Normalizer.fit(data.actions)


def run_here(
    policy: Policy, case: Case, data: EpisodeData, rows: np.ndarray, offset: int, observe: Observe = "frame"
) -> tuple[list[EpisodeRecord], list[Recorder]]:
    envs = [Recorder(data.task.make_env(), data.task) for _ in rows]
    batch = EnvBatch(data.task, data.image_size)
    batch.envs = envs
    return run_episodes([batch], data, policy, rows.tolist(), offset, case.budget, observe=observe)[0], envs


def compare(
    ours: list[EpisodeRecord], envs: list[Recorder], theirs: np.ndarray, their_envs: list[Recorder]
) -> None:
    assert [r.success for r in ours] == theirs.tolist()
    for result, mine, library in zip(ours, envs, their_envs, strict=True):
        assert result.steps == len(mine.actions) == len(library.actions)
        np.testing.assert_allclose(mine.actions, library.actions, rtol=0, atol=1e-4)
        np.testing.assert_allclose(mine.states, library.states, rtol=0, atol=1e-3)


@pytest.fixture
def can_draw(case):
    if case.task is Cube and rendering.pick_renderer() is None:
        pytest.skip(f"MuJoCo cannot draw on this machine: {rendering.remedy()}")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*WARN")  # gymnasium's, about the library's environments
@pytest.mark.parametrize(
    ("case", "demo_model"),
    [pytest.param(case, case.task.action_size, id=case.name) for case in (ROOM, AT_REST, PUSHES, CUBE_CASE)],
    indirect=["demo_model"],
)
def test_actions_and_successes_are_the_librarys(case, demo_model, can_draw, tmp_path):
    model = demo_model
    data = record(case, tmp_path, model.config.encoder.image_size, model.config.frameskip)
    rows = case.starts(data)
    calibrate(model, data, rows, case.offset)
    policy, their_plans = planning_there(model, case.offset)
    theirs, their_envs = library_evaluation(policy, case, data, rows, case.offset, drawn_every=PLANNED)
    planner = Planner(model, PLAN)
    ours, envs = run_here(planning_policy(planner, SEED), case, data, rows, case.offset)
    compare(ours, envs, theirs, their_envs)
    assert [r.plans for r in ours] == [their_plans[r.row] for r in ours]

    # And the comparison means something: some arrive (where goals are near by acting, else from the start), some
    # never do, blocks are pushed, and plans follow the frames.
    assert not all(r.success for r in ours) and max(r.plans for r in ours) == -(-case.budget // PLANNED)
    if case is PUSHES:
        moved = [np.linalg.norm(np.subtract(env.states[-1], env.states[0])[2:4]) for env in envs]
        assert np.mean(np.array(moved) > 5) >= 0.5
    else:
        assert any(r.success and (case is CUBE_CASE or not r.solved_at_start) for r in ours)
    frames, goals = (torch.cat([data.frame(row) for row in some]) for some in (rows, rows + case.offset))
    shown = ((frames, goals), (frames.roll(1, 0), goals), (frames, goals.roll(1, 0)))
    plans = [planner.plan_batch(*pair, [make_rng(SEED, row, 0) for row in rows.tolist()]) for pair in shown]
    for mine, *others in zip(*plans, strict=True):
        assert all(np.abs(plan.actions - mine.actions).max() > 1e-2 for plan in others)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*WARN")
@pytest.mark.parametrize("case", [REPLAYED_PUSHES, REPLAYED_CUBE], ids=lambda case: case.name)
def test_what_was_demonstrated_is_judged_as_the_library_does(case, tmp_path):
    """Recorded actions push the T and carry the cube: the same states, and success in the same step."""
    data = record(case, tmp_path)
    rows = case.starts(data)
    theirs, their_envs = library_evaluation(ReplayThere(data, rows), case, data, rows, case.offset, drawn_every=0)
    ours, envs = run_here(
        lambda episodes: [data.actions[e.row : e.row + case.budget] for e in episodes],
        *(case, data, rows, case.offset),
        observe=None,
    )
    compare(ours, envs, theirs, their_envs)
    assert sum(r.success and not r.solved_at_start for r in ours) >= len(rows) / 2


@pytest.mark.parametrize("seed", [42, 46])
@pytest.mark.parametrize("offset", [25, 50])
def test_starts_are_drawn_as_the_published_script_draws_them(dataset_path, task, offset, seed):
    """That script goes by columns that number the episodes and the rows within them."""
    data = EpisodeData(dataset_path, task, 32, 5)
    episode = np.repeat(np.arange(len(data.lengths)), data.lengths)
    step = np.concatenate([np.arange(n) for n in data.lengths])
    last_start = (data.lengths - offset - 1)[episode]
    valid = np.nonzero(step <= last_start)[0]
    chosen = np.random.default_rng(seed).choice(len(valid), size=30, replace=False)
    assert np.array_equal(draw_starts(data, Protocol(offset, episodes=30), seed), np.sort(valid[chosen]))
