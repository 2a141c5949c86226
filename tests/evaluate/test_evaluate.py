"""Evaluation: the draw is the published one, and an episode's result depends on nothing but itself."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from atlas_wm.data.clips import held_out_episodes
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.errors import UserError
from atlas_wm.evaluate.env_batch import EnvBatch
from atlas_wm.evaluate.evaluate import _rows_to_film, evaluate
from atlas_wm.evaluate.protocol import draw_starts
from atlas_wm.evaluate.rollout import RISK, run_episodes
from atlas_wm.evaluate.worker import Job, Setup, Worker
from atlas_wm.rng import make_rng
from atlas_wm.runs.films import films_path
from atlas_wm.runs.folder import read_run
from atlas_wm.runs.results import EvaluationResult, Protocol


@pytest.fixture(scope="module")
def data(dataset_path, task) -> EpisodeData:
    return EpisodeData(dataset_path, task, 32, 5)


@pytest.mark.parametrize("offset", [5, 25, 60])
def test_the_draw_is_uniform_over_rows_with_enough_rows_left(data, offset):
    protocol = Protocol(offset, episodes=20)
    valid = [o + s for o, n in zip(data.offsets, data.lengths, strict=True) for s in range(max(0, n - offset))]
    expected = np.sort(np.random.default_rng(42).choice(valid, 20, replace=False))
    assert np.array_equal(draw_starts(data, protocol, 42), expected)


def test_held_out_starts_come_from_held_out_episodes(data, run_folder):
    info, _ = read_run(run_folder)
    rows = draw_starts(data, Protocol(10, episodes=30, part="heldout"), 0, info)
    episodes = np.searchsorted(data.offsets, rows, side="right") - 1
    assert held_out_episodes(len(data.lengths), info.config.train)[episodes].all()


def test_an_offset_longer_than_every_episode_names_the_remedy(data):
    with pytest.raises(UserError, match="lower --offset"):
        draw_starts(data, Protocol(500), 0)


@pytest.fixture(scope="module")
def worker(run_folder, dataset_path, tiny_config) -> Worker:
    return Worker(Setup(str(run_folder), "tworoom", str(dataset_path), tiny_config.plan, "cpu"))


def test_an_episodes_record_does_not_depend_on_its_company(worker, data):
    protocol = Protocol(25, 30, 6, (1,))
    rows = tuple(draw_starts(data, protocol, 1).tolist())
    together = worker.run(Job("model", protocol, 1, rows)).records
    alone = [worker.run(Job("model", protocol, 1, (row,))).records[0] for row in reversed(rows)]
    assert together == alone[::-1]
    assert {r.plans for r in together} > {1}  # some had to plan again


def test_a_record_has_what_the_first_plan_said(worker, data):
    protocol = Protocol(25, 30, 6, (1,))
    rows = tuple(draw_starts(data, protocol, 1).tolist())
    again = [r for r in worker.run(Job("model", protocol, 1, rows)).records if r.plans > 1]
    assert again
    for record in again:
        frame, goal = data.frames_of(np.array([record.row, record.row + 25])).split(1)
        (plan,) = worker.planner.plan_batch(frame, goal, [make_rng(1, record.row, 0)])
        assert all(getattr(record, name) == getattr(plan, name) for name in RISK)
    others = worker.run(Job("random", protocol, 1, rows)).records
    assert {getattr(r, name) for r in others for name in RISK} == {None}


def test_success_is_the_environments_and_the_budget_holds(worker, data, task):
    """A policy that walks straight to the goal succeeds where nothing is in the way; one that waits does not."""

    def straight(episodes):
        ways = [data.states[e.row + 25] - task.state(envs.envs[0]) for e in episodes]
        return [np.repeat(way[None] / np.abs(way).max(), 25, axis=0) for way in ways]

    def wait(episodes):
        return [np.zeros((25, 2)) for _ in episodes]

    rows = [
        r
        for r in draw_starts(data, Protocol(25, episodes=60), 0).tolist()
        if len({bool(x) for x in data.states[[r, r + 25], 0] < 112}) == 1
        and not task.solved(*data.states[[r, r + 25]])
    ][:5]
    envs = EnvBatch(task, data.image_size)
    for row in rows:
        ((walked,), _) = run_episodes([envs], data, straight, [row], 25, budget=60, observe=None)
        ((waited,), _) = run_episodes([envs], data, wait, [row], 25, budget=30, observe=None)
        assert walked.success and walked.steps < 60 and walked.final_distance < 16
        assert not waited.success and waited.steps == 30 and waited.plans == 2


def test_films_begin_at_the_start_and_end_with_the_goal(worker, data, task):
    protocol = Protocol(25, 30, 3, (1,))
    rows = tuple(draw_starts(data, protocol, 1).tolist())
    films = worker.run(Job("random", protocol, 1, rows, films=rows[:1])).films
    assert list(films) == [rows[0]]
    drawn = task.draw(data.states[[rows[0], rows[0] + 25]], 224).permute(0, 2, 3, 1).numpy()
    assert np.array_equal(films[rows[0]][0], drawn[0]) and np.array_equal(films[rows[0]][-1], drawn[1])


def test_films_show_episodes_that_are_not_solved_at_the_start(data, task):
    protocol = Protocol(6, 10, 40, (1,))
    rows = draw_starts(data, protocol, 1).tolist()
    solved = {row for row in rows if task.solved(*data.states[[row, row + 6]])}
    assert 0 < len(solved) < len(rows)
    filmed = _rows_to_film(data, protocol, rows, 4)
    assert len(filmed) == 4 and solved.isdisjoint(filmed)
    assert len(_rows_to_film(data, protocol, sorted(solved), 2)) == min(2, len(solved))  # rather than none


@pytest.mark.slow
def test_results_are_written_and_the_same_for_any_number_of_workers(run_folder, tmp_path):
    protocols = [Protocol(25, 30, 7, (3, 4), "heldout"), Protocol(10, None, 5, (3,))]
    one, two = (evaluate(run_folder, protocols, workers=n, films=1, device="cpu") for n in (1, 2))
    for a, b in zip(one, two, strict=True):
        assert list(a.policies) == ["model", "random", "replay"]
        for name in a.policies:
            assert a.policies[name].episodes == b.policies[name].episodes
    path = run_folder / "evaluation" / f"{two[0].name}.json"
    assert path.name.startswith("heldout_offset25_budget30-") and films_path(path).exists()
    on_disk = json.loads(path.read_text())
    assert on_disk["protocol"] == json.loads(json.dumps({**asdict(protocols[0]), "budget": 30}))
    assert EvaluationResult.read(path) == two[0]
    episodes = two[0].model.episodes["3"]
    assert len(episodes) == 7
    assert two[0].model.success_by_seed["3"] == pytest.approx(100 * np.mean([e.success for e in episodes]))
    assert two[0].random.solved_at_start == two[0].model.solved_at_start
    for result in (two[0].random, two[0].replay):
        assert (result.plans, result.seconds_per_plan, result.planning_seconds) == (0, None, None)
    assert two[0].model.seconds_per_plan == two[0].model.planning_seconds / two[0].model.plans


@pytest.mark.slow
def test_replayed_actions_reach_every_goal_in_as_many_steps_as_the_demonstration(worker, data):
    protocol = Protocol(25, 50, 20, (1,))
    rows = tuple(draw_starts(data, protocol, 1).tolist())
    records = worker.run(Job("replay", protocol, 1, rows)).records
    assert all(r.success and r.steps <= 25 and r.plans == 0 for r in records)
    short = worker.run(Job("replay", Protocol(25, 10, 20, (1,)), 1, rows)).records
    assert {r.steps for r in short if not r.success} == {10}  # the budget holds for them too
