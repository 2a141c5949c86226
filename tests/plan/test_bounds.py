"""What a plan returns stays in the action space, and what it says is about what it returns."""

import json
import shutil
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch

from atlas_wm.cli.app import main
from atlas_wm.config import PlanConfig
from atlas_wm.data.clips import clip_index, fit_normalizer
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.data.training_set import open_training_set
from atlas_wm.errors import UserError
from atlas_wm.methods import METHODS
from atlas_wm.normalizer import Normalizer
from atlas_wm.plan.planner import Planner
from atlas_wm.recipes import demo, paper
from atlas_wm.rng import make_rng
from atlas_wm.runs.folder import read_run
from atlas_wm.runs.model import load_model, save_model
from atlas_wm.settings import from_dict, to_dict
from atlas_wm.tasks import Task, get_task
from atlas_wm.tasks.tworoom import TwoRoom

QUICK = PlanConfig(candidates=20, iterations=3, elites=5, horizon=4, execute=3)
LOW, HIGH = (2.9, -1.5), (3.2, -0.5)  # of actions with mean (3, -1) and deviation (0.5, 2)
FRAME, GOAL = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)


@pytest.fixture
def bounded(demo_model):
    demo_model.normalizer = replace(demo_model.normalizer, low=LOW, high=HIGH)
    return demo_model


@pytest.mark.parametrize("plain", [False, True])
def test_actions_are_clipped_and_the_rest_of_a_plan_describes_the_clipped_actions(bounded, plain):
    whole = replace(QUICK, execute=4)
    free = Planner(bounded, replace(whole, clip_actions=False), plain=plain).plan(FRAME, GOAL)
    plan = Planner(bounded, whole, plain=plain).plan(FRAME, GOAL)
    assert ((free.actions < LOW) | (free.actions > HIGH)).any(axis=1).mean() > 0.3  # so there is something to clip
    low, high = (np.float32(bound) for bound in (LOW, HIGH))
    assert (plan.actions >= low).all() and (plan.actions <= high).all()  # without a tolerance
    np.testing.assert_allclose(plan.actions, np.clip(free.actions, LOW, HIGH), atol=1e-5)  # candidates are free

    frames = [torch.as_tensor(f).permute(2, 0, 1)[None] for f in (FRAME, GOAL)]
    with torch.no_grad():
        z, goal = (bounded.encode(f) for f in frames)
        blocks = bounded.normalizer.apply(torch.as_tensor(plan.actions)).reshape(1, 1, 4, 10)
        imagined = bounded.rollout(z, blocks)[0, 0]
    np.testing.assert_allclose(plan.latents, imagined.numpy(), atol=1e-4)
    assert plan.cost == pytest.approx(float(bounded.distance(imagined[-1], goal[0])), rel=1e-4)
    assert plan.cost != pytest.approx(free.cost, rel=1e-3)


def test_what_is_left_over_for_the_next_plan_is_clipped_too(bounded):
    rest = torch.as_tensor(Planner(bounded, QUICK).plan(FRAME, GOAL).rest).reshape(-1, 2)
    actions = bounded.normalizer.invert(rest).numpy()
    np.testing.assert_allclose(actions, np.clip(actions, LOW, HIGH), atol=1e-5)


def test_without_clipping_a_plan_is_that_of_a_model_without_bounds(bounded, demo_model):
    plan = Planner(bounded, replace(QUICK, clip_actions=False)).plan(FRAME, GOAL)
    demo_model.normalizer = replace(demo_model.normalizer, low=None, high=None)
    for config in (QUICK, replace(QUICK, clip_actions=False)):
        other = Planner(demo_model, config).plan(FRAME, GOAL)
        assert all(np.array_equal(a, b) for a, b in zip(plan, other, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_the_paper_recipe_does_not_clip_and_the_demo_does(method):
    assert not paper(method).plan.clip_actions
    assert demo(method).plan.clip_actions


def test_the_setting_is_stored_and_strict():
    config = replace(QUICK, clip_actions=False)
    assert from_dict(PlanConfig, json.loads(json.dumps(to_dict(config)))) == config
    with pytest.raises(UserError, match=r"plan\.clip_actions must be bool, not 1"):
        from_dict(PlanConfig, {"clip_actions": 1}, "plan")


# ---- where bounds come from


@pytest.mark.parametrize("name", ["tworoom", "pusht"])  # cube, whose environment takes long, is in its own file
def test_the_bounds_of_a_task_are_those_of_its_environment(name):
    task = get_task(name)
    space = task.make_env().action_space
    assert task.action_bounds == tuple(zip(space.low.tolist(), space.high.tolist(), strict=True))


class Own(TwoRoom):
    """As a task of one's own is: it does not say what its bounds are."""

    space: gym.Space | None = None
    action_bounds = Task.action_bounds

    def make_env(self):
        if self.space is None:
            raise gym.error.NamespaceNotFound("no such environment")
        env = gym.Env()
        env.action_space = self.space
        return env


@pytest.mark.parametrize(
    ("space", "low", "high", "said"),
    [
        (gym.spaces.Box(np.float32([-2, -3]), np.float32([4, 5])), (-2, -3), (4, 5), None),
        (gym.spaces.Box(np.float32([-2, -np.inf]), np.float32([np.inf, 5])), (-2, None), (None, 5), None),
        (gym.spaces.Box(-1, 1, (3,)), (None, None), (None, None), "is not a box of 2 numbers"),
        (gym.spaces.Discrete(2), (None, None), (None, None), "is not a box of 2 numbers"),
        (None, (None, None), (None, None), "so plans are clipped to the training actions"),
    ],
    ids=["finite", "half open", "other size", "discrete", "no environment"],
)
def test_bounds_of_an_own_task(dataset_path, tiny_config, caplog, space, low, high, said):
    """From its environment, and where that has none (None) from the training part of the data."""
    task = Own()
    task.space = space
    ready = open_training_set(dataset_path, task, tiny_config)
    rows = ready.data.actions[
        (ready.data.offsets[ready.training.episode] + ready.training.start)[:, None] + range(15)
    ]
    smallest, largest = rows.min(axis=(0, 1)).tolist(), rows.max(axis=(0, 1)).tolist()
    assert ready.normalizer.low == tuple(s if x is None else x for x, s in zip(low, smallest, strict=True))
    assert ready.normalizer.high == tuple(s if x is None else x for x, s in zip(high, largest, strict=True))
    assert [said in r.message for r in caplog.records] == [True] * (said is not None)


def test_training_data_outside_the_bounds_are_told_of(dataset_path, task, tiny_config, caplog):
    data = EpisodeData(dataset_path, task, 32, 5)
    clips = clip_index(data.lengths, tiny_config.model.clip_rows)
    fit_normalizer(data, clips, tiny_config.model, ((-1.0, 1.0),) * 2)
    assert not caplog.records
    fit_normalizer(data, clips, tiny_config.model, ((-0.5, 0.5),) * 2)
    assert "of the training actions lie outside the action bounds (-0.5, -0.5) to (0.5, 0.5)" in caplog.text
    with pytest.raises(UserError, match=r"action_bounds must be 2 pairs \(low, high\)"):
        fit_normalizer(data, clips, tiny_config.model, ((-0.5, 0.5),) * 3)


# ---- in run folders


def test_training_stores_the_bounds_of_the_task(trained):
    assert json.loads((trained / "normalizer.json").read_text())["action"]["low"] == [-1.0, -1.0]
    model = load_model(trained)
    assert (model.normalizer.low, model.normalizer.high) == ((-1.0, -1.0), (1.0, 1.0))
    frames = torch.randint(0, 256, (2, 3, 32, 32), generator=make_rng(0), dtype=torch.uint8)
    (plan,) = Planner(model).plan_batch(frames[:1], frames[1:], [make_rng(0)])
    assert abs(plan.actions).max() <= 1


def test_a_run_without_bounds_plans_as_before_says_so_once_and_atlas_bank_adds_them(
    trained, dataset_path, tmp_path, caplog
):
    run = shutil.copytree(trained, tmp_path / "run")
    bounds = json.loads((run / "normalizer.json").read_text())["action"]
    old = {"action": {key: bounds[key] for key in ("mean", "std")}}
    (run / "normalizer.json").write_text(json.dumps(old))
    settings = json.loads((run / "config.json").read_text())
    del settings["config"]["plan"]["clip_actions"]
    (run / "config.json").write_text(json.dumps(settings))

    model = load_model(run)
    planner = Planner(model)
    plans = [planner.plan(FRAME, GOAL) for _ in range(2)]
    assert [r.message for r in caplog.records if "clipped" in r.message] == [
        "plans are not clipped: the run has no action bounds (`atlas bank RUN` adds them)"
    ]
    free = Planner(load_model(trained), replace(planner.config, clip_actions=False)).plan(FRAME, GOAL)
    assert np.array_equal(plans[1].actions, free.actions)
    save_model(model, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "normalizer.json").read_text()) == old

    main(["bank", str(run), "--data", str(dataset_path)])
    assert read_run(run)[1] == read_run(trained)[1]


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ('"low": [-1, -1]', "need both low and high"),
        ('"high": [1, 1]', "need both low and high"),
        ('"low": [-1], "high": [1]', "one low and one high per action coordinate"),
        ('"low": [-1, -1], "high": [1, 1, 1]', "one low and one high per action coordinate"),
        ('"low": [-1, 2], "high": [1, 1]', "low <= high"),
        ('"low": [-1, NaN], "high": [1, 1]', "NaN is not valid JSON"),
        ('"low": [-1, -1], "high": [1, 1e999]', "must be finite"),
        ('"low": null, "high": null', "must hold"),
        ('"low": "ab", "high": [1, 1]', "must hold"),
        ('"low": [true, -1], "high": [1, 1]', "must hold"),
        ('"low": [-1, -1], "high": [1, %s]' % ("9" * 400), "must hold"),
    ],
)
def test_bounds_that_are_none_are_refused(trained, tmp_path, bounds, said):
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(trained / "config.json", run)
    (run / "normalizer.json").write_text(f'{{"action": {{"mean": [0, 0], "std": [1, 1], {bounds}}}}}')
    with pytest.raises(UserError, match=said):
        read_run(run)


def test_a_coordinate_that_never_moves_stays_where_it_is():
    normalizer = Normalizer.fit(np.array([[0.0, 7.0], [1.0, 7.0]]))
    assert (normalizer.low, normalizer.high) == ((0.0, 7.0), (1.0, 7.0))
