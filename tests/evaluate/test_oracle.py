"""The oracle: the planner's search in the environment itself."""

import shutil
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from atlas_wm.cli.app import main
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.errors import UserError
from atlas_wm.evaluate.env_batch import EnvBatch, EpisodeStart
from atlas_wm.evaluate.evaluate import evaluate
from atlas_wm.evaluate.oracle import Oracle, oracle_plan
from atlas_wm.evaluate.protocol import Protocol
from atlas_wm.normalizer import Normalizer
from atlas_wm.plan_config import PlanConfig
from atlas_wm.report.table import ceiling_line, print_results, success_rows
from atlas_wm.rng import make_rng
from atlas_wm.runs.results import EvaluationResult
from atlas_wm.tasks import get_task
from atlas_wm.tasks.tworoom import TwoRoom
from atlas_wm.tasks.variation import make_varied_env, parse_variation


class OpenField(TwoRoom):
    """A point that moves by its action; only the first coordinate can be moved in the left half-plane."""

    def make_env(self) -> Any:
        return Point()

    def reset(self, env, state, goal_state):
        env.position, env.goal = np.array(state, np.float64), np.array(goal_state, np.float64)

    rewind = reset

    def cost_to_goal(self, env, state, goal_state):
        return self.distance(state, goal_state)

    def state(self, env):
        return env.position.copy()

    def solved(self, state, goal_state):
        return self.distance(state, goal_state) < 0.5


class Point(gym.Env):
    action_space = gym.spaces.Box(-1, 1, (2,))

    def step(self, action):
        move = np.clip(action, -1, 1)
        self.position = self.position + (move if self.position[0] >= 0 else [move[0], 0])
        return None, 0.0, bool(np.linalg.norm(self.position - self.goal) < 0.5), False, {}


@pytest.fixture
def model(demo_model):
    demo_model.normalizer = Normalizer((0.0, 0.0), (0.5, 0.5), (-1.0, -1.0), (1.0, 1.0))
    return demo_model


@pytest.mark.parametrize("settings", [{}, {"cost": "nearest", "execute": 1}])
def test_it_reaches_what_can_be_reached_and_nothing_else(model, settings):
    """The first goal is twelve steps away, with a horizon of 25; the other one farther than the budget."""
    plan = oracle_plan(PlanConfig(**settings))
    assert (plan.candidates, plan.iterations, plan.elites) == (100, 10, 10)
    task = OpenField()
    ends = {}
    for goal in ((8.0, -9.0), (200.0, 0.0)):
        oracle, env, rest = Oracle(task, model, plan), task.make_env(), None
        task.reset(env, np.array([2.0, 1.0]), np.array(goal))
        best = []
        for number in range(50 // (5 * plan.execute)):
            actions, rest = oracle.plan(env.position, env.goal, make_rng(1, number), rest)
            assert actions.shape == (5 * plan.execute, 2) and np.abs(actions).max() <= 1
            best += [(env.step(action), task.distance(env.position, env.goal))[1] for action in actions]
        ends[goal] = min(best)
    assert ends[8.0, -9.0] < 0.5
    assert ends[200.0, 0.0] > 198 - 50


def test_candidates_are_judged_by_what_really_happens(model):
    """In the left half-plane the second coordinate stays, whatever a candidate does."""
    oracle = Oracle(OpenField(), model, oracle_plan(PlanConfig()))
    oracle.simulation.start(np.array([-500.0, 3.0]), np.zeros(2))
    states = oracle.simulation.rollout(torch.empty(0), torch.randn(1, 4, 5, 10))[0].numpy()
    assert states.shape == (4, 5, 2)
    assert (states[..., 1] == 3).all() and len(np.unique(states[..., 0])) == 20


@pytest.mark.parametrize("name", ["tworoom", "pusht", "cube"])
def test_a_rewound_environment_continues_as_the_original(name):
    """From a full state in the middle of an episode, also after other candidates and after a fresh reset."""
    task, rng = get_task(name), np.random.default_rng(3)
    original, other = task.make_env(), task.make_env()
    original.reset(seed=4)
    goal = task.state(original)
    if name == "pusht":  # touching the block
        task.reset(original, np.array([215.0, 215.0, 250.0, 250.0, 0.5, 0.0, 0.0]), goal)

    def run(env: Any, actions: np.ndarray) -> np.ndarray:
        return np.stack([(env.step(action), task.state(env))[1] for action in actions])

    before, candidate, after = (rng.uniform(-1, 1, (n, *original.action_space.shape)) for n in (12, 10, 15))
    run(original, before.astype(np.float32))
    if name == "pusht":
        assert task.state(original)[2:5].tolist() != [250.0, 250.0, 0.5]
    state = task.full_state(original)
    task.reset(other, state, goal)
    first = run(other, after.astype(np.float32))
    for _ in range(2):
        task.rewind(other, state, goal)
        run(other, candidate.astype(np.float32))
    task.rewind(other, state, goal)
    again = run(other, after.astype(np.float32))
    assert np.array_equal(first, again)
    assert run(original, after.astype(np.float32)) == pytest.approx(first, abs=1e-9)


def test_pushts_cost_is_small_only_where_solved():
    task, goal = get_task("pusht"), np.array([100.0, 100, 200, 200, 6.2, 0, 0])
    near, turned = goal + np.array([3, 0, 4, 0, 0.1, 5, 5]), goal - np.array([0, 0, 0, 0, 3.0, 0, 0])
    assert task.cost_to_goal(None, goal, goal) == 0
    assert task.cost_to_goal(None, near - [0, 0, 0, 0, 2 * np.pi, 0, 0], goal) == pytest.approx(
        np.hypot(5, 0.1 * 180 / np.pi)
    )
    assert task.distance(turned, goal) == 0 and not task.solved(turned, goal)
    assert task.cost_to_goal(None, turned, goal) > 20


def test_tworooms_cost_leads_through_the_door():
    task = get_task("tworoom")
    for name, door in (("wall.axis=1", (112, 49)), ("wall.axis=0", (49, 112))):
        env = make_varied_env(task, parse_variation(task, [name]))
        env.reset(seed=0)
        near, far = np.array([100.0, 100.0]), np.array([124.0, 124.0])
        assert task.cost_to_goal(env, near, near + 9) == pytest.approx(9 * 2**0.5)
        ways = [np.linalg.norm(point - np.array(door)) for point in (near, far)]
        assert task.cost_to_goal(env, near, far) == task.cost_to_goal(env, far, near) == pytest.approx(sum(ways))


PROTOCOL = Protocol(offset=15, budget=20, episodes=5, seeds=(8, 9))
SEARCH = {"oracle_candidates": 12, "oracle_iterations": 2, "oracle_episodes": 2}


@pytest.fixture(scope="module")
def reports(run_folder) -> list[EvaluationResult]:
    options = {"policies": ("oracle", "model"), "films": 0, "device": "cpu", **SEARCH}
    return [evaluate(run_folder, [PROTOCOL], workers=n, **options)[0] for n in (1, 3)]


@pytest.mark.slow
def test_the_result_does_not_depend_on_the_number_of_workers_and_names_its_search(reports, run_folder):
    one, three = reports
    assert one.oracle.episodes == three.oracle.episodes and one.name == three.name
    path = run_folder / "evaluation" / f"{three.name}.json"
    assert EvaluationResult.read(path) == three
    assert list(three.policies) == ["model", "oracle"] and three.oracle.count == 4
    rows = {seed: [e.row for e in mine] for seed, mine in three.model.episodes.items()}
    assert all(
        [e.row for e in mine] == [rows[seed][0], rows[seed][-1]] for seed, mine in three.oracle.episodes.items()
    )
    assert (three.oracle_plan.candidates, three.oracle_plan.elites, three.plan.candidates) == (12, 2, 40)
    assert three.oracle.plans >= 4 and three.oracle.seconds_per_plan > 0
    other = replace(three, oracle_plan=replace(three.oracle_plan, candidates=13))
    without = replace(three, oracle=None, oracle_plan=None, share_of_oracle=None)
    assert len({three.name, other.name, without.name}) == 3


@pytest.mark.slow
def test_the_share_is_over_the_episodes_of_the_oracle(reports, capsys):
    report = reports[0]
    oracle = {(s, e.row) for s, mine in report.oracle.episodes.items() for e in mine if e.success}
    ran = {(s, e.row) for s, mine in report.oracle.episodes.items() for e in mine}
    reached = {(s, e.row) for s, mine in report.model.episodes.items() for e in mine if e.success}
    assert oracle
    assert report.share_of_oracle == pytest.approx(100 * len(reached & ran) / len(oracle))
    row = {r["policy"]: r for r in success_rows([report])}
    assert row["ATLAS"]["of_oracle_percent"] == pytest.approx(report.share_of_oracle, abs=0.01)
    assert row["Oracle planner"]["episodes"] == 4 and row["Oracle planner"]["of_oracle_percent"] is None
    said = f"{report.share_of_oracle:.0f} % of the oracle's {report.oracle.success_mean:.1f} %"
    assert ceiling_line(report).startswith(f"{said}, over the same 4 episodes (oracle: 12×2×5 with 2 elites; ")
    print_results([report])
    assert "Oracle planner" in capsys.readouterr().out


class Broken(TwoRoom):
    """Its environments fail in a rewind, which only the oracle needs."""

    def rewind(self, env, state, goal_state):
        raise ValueError("broken")


@pytest.mark.usefixtures("in_this_process")
def test_a_search_that_fails_ends_its_episode(run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    with pytest.raises(UserError, match=r"episodes all failed with an error.*ValueError: broken"):
        evaluate(folder, [PROTOCOL], task=Broken(), policies=("model", "oracle"), films=0, device="cpu", **SEARCH)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--policy", "oracle"), "--policy needs model"),
        (("--policy", "model", "oracle", "--oracle-candidates", "1"), "--oracle-candidates must be at least 2"),
        (("--policy", "model", "oracle", "--cost", "my_cost:Mine"), "my_cost"),
    ],
)
def test_what_cannot_be_searched_is_refused(run_folder, flags, said):
    with pytest.raises(SystemExit, match=said):
        main(["eval", str(run_folder), *flags])


def test_it_retrieves_nothing():
    assert oracle_plan(PlanConfig(start="retrieval")).start == "zero"


def test_your_own_cost_is_refused():
    with pytest.raises(
        UserError, match=r"knows --solver cem and the costs terminal, nearest, temporal, not .* cost a:B"
    ):
        oracle_plan(PlanConfig(cost="a:B"))


def test_a_task_without_environment_is_refused(run_folder):
    with pytest.raises(UserError, match="needs an environment"):
        evaluate(run_folder, [PROTOCOL], task=get_task("offline"), policies=("model", "oracle"))


def test_states_are_observed_without_rendering(dataset_path, task):
    data, batch = EpisodeData(dataset_path, task, 32, 5), EnvBatch(task, 32)
    seen = batch.step({0: EpisodeStart(data.states[3], data.states[9], 10, "state")})
    assert np.array_equal(seen[0], data.states[3])
