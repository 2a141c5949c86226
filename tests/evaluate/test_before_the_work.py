"""What an evaluation checks before it plans, and what its result says of heads and of episodes that were lost."""

import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from atlas_wm.config import PlanConfig
from atlas_wm.errors import UserError
from atlas_wm.evaluate import evaluate as module
from atlas_wm.evaluate.evaluate import _novel_plans, evaluate
from atlas_wm.evaluate.rollout import Episode, random_policy
from atlas_wm.evaluate.worker import Job, JobResult
from atlas_wm.models.temporal_head import TemporalHead
from atlas_wm.normalizer import Normalizer
from atlas_wm.plan.planner import Planner
from atlas_wm.rng import make_rng
from atlas_wm.runs.folder import DEMONSTRATIONS, TEMPORAL_HEAD
from atlas_wm.runs.model import load_model, save_demonstrations, save_temporal_head
from atlas_wm.runs.results import EpisodeRecord, Protocol, read_results
from atlas_wm.tasks.tworoom import TwoRoom

PROTOCOL = Protocol(offset=10, budget=5, episodes=2, seeds=(8,))
OPTIONS = {"films": 0, "device": "cpu"}


@pytest.fixture
def run(run_folder, tmp_path) -> Path:
    return Path(
        shutil.copytree(run_folder, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation", TEMPORAL_HEAD))
    )


@pytest.fixture
def no_plans(monkeypatch):
    monkeypatch.setattr(Planner, "plan_batch", lambda *_: pytest.fail("planned"))


@pytest.mark.usefixtures("render_in_this_process")
def test_the_oracles_episodes_are_counted_first(run, monkeypatch):
    monkeypatch.setattr(module, "run_in_workers", lambda *_: pytest.fail("worked"))
    with pytest.raises(UserError, match="--oracle-episodes must be at least 1, not 0"):
        evaluate(run, [PROTOCOL], policies=("model", "oracle"), oracle_episodes=0, **OPTIONS)


class Keys(TwoRoom):
    """Its action space is none of numbers; the environment takes them all the same."""

    space: gym.Space = gym.spaces.Discrete(4)

    def make_env(self):
        env = super().make_env()
        env.action_space = self.space
        return env


class Unbounded(Keys):
    space = gym.spaces.Box(-np.inf, np.inf, (2,))


@pytest.mark.usefixtures("in_this_process", "render_in_this_process", "no_plans")
def test_random_actions_that_cannot_be_are_refused_before_plans(run):
    with pytest.raises(UserError, match=r"Discrete\(4\) is no box with bounds: leave random out of --policy"):
        evaluate(run, [PROTOCOL], task=Keys(), **OPTIONS)


@pytest.mark.usefixtures("in_this_process", "render_in_this_process")
def test_random_actions_take_the_bounds_of_the_run(run):
    (report,) = evaluate(run, [PROTOCOL], task=Unbounded(), policies=("model", "random"), **OPTIONS)
    assert report.random is not None and report.random.errors == 0


def test_random_actions_keep_the_bounds_that_there_are():
    space = gym.spaces.Box(np.array([-1.0, -np.inf], np.float32), np.array([1.0, np.inf], np.float32))
    normalizer = Normalizer((0.0, 0.0), (1.0, 1.0), (-5.0, -7.0), (5.0, 7.0))
    (actions,) = random_policy(space, 3, normalizer, length=500)([Episode(0)])
    assert np.abs(actions).max(axis=0) == pytest.approx([1, 7], rel=0.05) and (np.abs(actions) <= [1, 7]).all()
    bounded = gym.spaces.Box(-2, 2, (2,))
    (usual,) = random_policy(bounded, 3)([Episode(0)])
    assert np.array_equal(usual, random_policy(bounded, 3, normalizer)([Episode(0)])[0])
    for unknown in (None, Normalizer((0.0, 0.0), (1.0, 1.0))):
        with pytest.raises(UserError, match="leave random out"):
            random_policy(space, 3, unknown)


def job_result(plans: int, novel: int | None) -> JobResult:
    record = EpisodeRecord(7, 0, 7, False, False, 0, None, [], plans, None if plans else "died")
    return JobResult(Job("model", PROTOCOL, 8, (7,)), [record], {}, 0.0, 0.0, 0, novel_plans=novel)


def test_an_episode_that_was_lost_does_not_hide_the_novelty_of_the_others():
    assert _novel_plans([job_result(3, 2), job_result(0, None), job_result(1, 1)]) == 3
    assert _novel_plans([job_result(3, 2), job_result(1, None)]) is None  # there is no bank


@pytest.mark.usefixtures("in_this_process", "render_in_this_process")
def test_results_of_two_heads_stand_side_by_side(run):
    points = load_model(run).bank.points
    results = evaluated_with_each(
        run, TEMPORAL_HEAD, [TemporalHead.initial(points, make_rng(seed)) for seed in (1, 2)], save_temporal_head
    )
    assert len(results) == 3 and sum("temporal_head" in result.settings for result in results) == 2


@pytest.mark.usefixtures("in_this_process", "render_in_this_process")
def test_results_of_two_sets_of_demonstrations_stand_side_by_side(run):
    all_of_them = load_model(run).demonstrations
    rows = {name: getattr(all_of_them, name)[:-5] for name in ("points", "actions", "episodes")}
    fewer = replace(all_of_them, **rows)
    results = evaluated_with_each(run, DEMONSTRATIONS, [fewer, all_of_them], save_demonstrations)
    assert sum("demonstrations" in result.settings for result in results) == 2


def evaluated_with_each(run, file, parts, save):
    """Evaluations that plan with each part, saved to the file, and one that does without."""
    how = {"cost": "temporal"} if file == TEMPORAL_HEAD else {"start": "retrieval"}
    name, plan, hashes = Path(file).stem, PlanConfig(candidates=10, iterations=1, elites=3), []
    for part in parts:
        save(part, run)
        (report,) = evaluate(run, [PROTOCOL], plan=replace(plan, **how), policies=("model",), **OPTIONS)
        hashes.append(sha256((run / file).read_bytes()).hexdigest()[:16])
        assert getattr(report, name) == report.settings[name] == hashes[-1]
    evaluate(run, [PROTOCOL], plan=plan, policies=("model",), **OPTIONS)
    results = read_results(run).values()
    assert {getattr(result, name) for result in results} == {None, *hashes}
    return results
