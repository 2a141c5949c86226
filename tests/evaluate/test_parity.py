"""Parity with the harness: the same weights and the same noise give stable-worldmodel's own actions and results."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import numpy as np
import pytest
import torch

from atlas_wm.config import PlanConfig
from atlas_wm.data.collect import collect
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.evaluate.protocol import Protocol, draw_starts
from atlas_wm.evaluate.rollout import planning_policy, run_episodes
from atlas_wm.evaluate.stage import Stage
from atlas_wm.frames import reduce_frames
from atlas_wm.models.world_model import WorldModel
from atlas_wm.normalize import Normalizer
from atlas_wm.plan.harness import GoalCost, Standardisation
from atlas_wm.plan.planner import Planner
from atlas_wm.streams import stream
from atlas_wm.tasks import Task
from atlas_wm.tasks.base import import_harness
from atlas_wm.tasks.pusht import PushT
from atlas_wm.tasks.tworoom import TwoRoom

import_harness()
from stable_worldmodel import World  # noqa: E402
from stable_worldmodel.data import load_dataset  # noqa: E402
from stable_worldmodel.policy import PlanConfig as TheirPlanConfig  # noqa: E402
from stable_worldmodel.policy import WorldModelPolicy  # noqa: E402
from stable_worldmodel.solver import CEMSolver  # noqa: E402
from stable_worldmodel.solver.callbacks import Callback  # noqa: E402

SEED = 10
PLAN = PlanConfig(candidates=60, iterations=4, elites=8, clip_actions=False)  # the library clips nothing
BUDGET = 60  # not a multiple of the 25 actions of a plan: the last plan is cut short


@dataclass(frozen=True)
class Case:
    """Episodes near enough to their goals that some arrive, and far enough that some do not."""

    task: type[Task]
    recorded: int  # episodes
    longest: int  # steps of a recorded episode
    offset: int
    starts: Callable[[EpisodeData], np.ndarray]


def published_draw(data: EpisodeData) -> np.ndarray:
    return draw_starts(data, Protocol(offset=12, episodes=12), SEED)


def at_rest_and_clear_of_the_block(data: EpisodeData) -> np.ndarray:
    """Where the physics step in PushT's own reset, which ours leaves out, changes nothing."""
    agent, block = data.states[data.offsets, :2], data.states[data.offsets, 2:4]
    return data.offsets[np.linalg.norm(agent - block, axis=1) > 100]


CASES = [
    Case(TwoRoom, recorded=12, longest=40, offset=12, starts=published_draw),
    Case(PushT, recorded=12, longest=12, offset=2, starts=at_rest_and_clear_of_the_block),
]

# How the published evaluation puts an environment into a row of the dataset.
CALLABLES = [
    {"method": "_set_state", "args": {"state": {"value": "state"}}},
    {"method": "_set_goal_state", "args": {"goal_state": {"value": "goal_state"}}},
]


class Recorder(gym.Wrapper):
    """Keeps the actions an environment was given, and the states they led to."""

    def __init__(self, env: gym.Env, task: Any):
        super().__init__(env)
        self.task, self.actions, self.states = task, [], []

    def reset(self, *, seed=None, options=None):
        """The library resets with no seed before it sets the state; with one its run can be repeated."""
        return self.env.reset(seed=0 if seed is None else seed, options=options)

    def step(self, action):
        result = self.env.step(action)
        self.actions.append(np.array(action))
        self.states.append(self.task.state(self.env))
        return result


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
        self.solver.torch_gen = stream(SEED, row, self.plans[row])
        self.plans[row] += 1

    def __call__(self, **kwargs):
        pass


def library_evaluation(
    model: WorldModel, task: Task, path: Path, data: EpisodeData, rows: np.ndarray, offset: int
) -> tuple[np.ndarray, list[Recorder], Counter[int]]:
    """World.evaluate on these rows → successes, recorders, plans for each row."""
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
    recorders: list[Recorder] = []

    def recorder(env):
        recorders.append(Recorder(env, task))
        return recorders[-1]

    episodes = np.searchsorted(data.offsets, rows, side="right") - 1
    world = World(task.env_id, len(rows), (224, 224), max_episode_steps=2 * BUDGET, pre_wrappers=[recorder])
    world.set_policy(policy)
    result = world.evaluate(
        dataset=load_dataset(str(path)),
        episodes_idx=episodes.tolist(),
        start_steps=(rows - data.offsets[episodes]).tolist(),
        goal_offset=offset,
        eval_budget=BUDGET,
        callables=CALLABLES,
    )
    world.close()
    return result["episode_successes"], recorders, noise.plans


def record(case: Case, path: Path) -> None:
    """Lossless, so that the first frame of the library, the dataset's, is the one that we render."""
    task = case.task()
    task.max_episode_steps = case.longest
    card = collect(task, path, case.recorded, seed=3, pixels=True, workers=1)
    with h5py.File(path, "a") as file:  # the library hands every column to its solver, which so can tell episodes
        file["row"] = np.arange(card["rows"])[:, None]


def calibrate(model: WorldModel, data: EpisodeData) -> None:
    """Random weights hardly look at the picture; with BatchNorm statistics of the data, plans depend on it."""
    episodes = np.arange(len(data.lengths))
    frames = data.frames(episodes, np.zeros_like(episodes), 3)
    for layer in model.modules():
        if isinstance(layer, torch.nn.BatchNorm1d):
            layer.momentum = 1.0
    block = model.config.frameskip * model.action_size
    with torch.no_grad():
        model.train()(frames, torch.randn(len(frames), 2, block, generator=stream(0)))
    model.eval().normalizer = Normalizer.fit(data.actions)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*WARN")  # gymnasium's, about the library's environments
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.task.name)
def test_actions_and_successes_are_the_librarys(case, demo_model, tmp_path):
    task, path, model = case.task(), tmp_path / "data.h5", demo_model
    record(case, path)
    data = EpisodeData(path, task, model.config.encoder.image_size, model.config.frameskip)
    calibrate(model, data)
    rows = case.starts(data)
    assert len(rows) >= 8
    theirs, their_envs, their_plans = library_evaluation(model, task, path, data, rows, case.offset)

    planner, envs = Planner(model, PLAN), [Recorder(task.make_env(), task) for _ in rows]
    stage = Stage(task, data.image_size)
    stage.envs = envs
    ours, _ = run_episodes([stage], data, planning_policy(planner, SEED), rows.tolist(), case.offset, BUDGET)

    assert [r.success for r in ours] == theirs.tolist()
    for result, mine, library in zip(ours, envs, their_envs, strict=True):
        assert result.steps == len(mine.actions) == len(library.actions)
        assert result.plans == their_plans[result.row]
        np.testing.assert_allclose(mine.actions, library.actions, rtol=0, atol=1e-4)
        np.testing.assert_allclose(mine.states, library.states, rtol=0, atol=1e-3)

    # And the comparison means something: some arrive by acting, some never do, and plans follow the pictures.
    assert any(r.success and not r.solved_at_start for r in ours) and not all(r.success for r in ours)
    assert max(r.plans for r in ours) == 3
    frames, goals = (torch.cat([data.frame(row) for row in some]) for some in (rows, rows + case.offset))
    streams = [[stream(SEED, row, 0) for row in rows.tolist()] for _ in range(2)]
    other_frames = planner.plan_batch(frames.roll(1, 0), goals, streams[0])
    other_goals = planner.plan_batch(frames, goals.roll(1, 0), streams[1])
    for mine, *others in zip(envs, other_frames, other_goals, strict=True):
        steps = min(25, len(mine.actions))
        assert all(np.abs(plan.actions[:steps] - mine.actions[:steps]).max() > 1e-2 for plan in others)


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
