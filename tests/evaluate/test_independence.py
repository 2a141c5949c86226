"""What happens in an episode depends on the episode alone: not on batch, workers or order."""

import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
import torch

from atlas_wm.data.dataset import EpisodeData
from atlas_wm.evaluate import evaluate as module
from atlas_wm.evaluate.evaluate import evaluate
from atlas_wm.evaluate.protocol import Protocol, draw_starts
from atlas_wm.evaluate.worker import Job, Setup, Worker
from atlas_wm.runs.results import EpisodeRecord

EPISODES = 16
PROTOCOL = Protocol(offset=20, budget=30, episodes=EPISODES, seeds=(8,))


@pytest.fixture(scope="module")
def rows(dataset_path, task) -> tuple[int, ...]:
    return tuple(draw_starts(EpisodeData(dataset_path, task, 32, 5), PROTOCOL, 8).tolist())


@pytest.fixture(scope="module")
def worker(run_folder, dataset_path, tiny_config) -> Iterator[Worker]:
    """On one thread, as in a worker process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Worker(Setup(str(run_folder), "tworoom", str(dataset_path), tiny_config.plan, "cpu"))
    torch.set_num_threads(threads)


def run(worker: Worker, policy: str, rows: tuple[int, ...], size: int, seed: int = 8) -> dict[int, EpisodeRecord]:
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    return {r.row: r for part in parts for r in worker.run(Job(policy, PROTOCOL, seed, part)).records}


@pytest.fixture(scope="module")
def together(worker, rows) -> dict[str, dict[int, EpisodeRecord]]:
    return {policy: run(worker, policy, rows, EPISODES) for policy in ("model", "random")}


@pytest.mark.parametrize("policy", ["model", "random"])
@pytest.mark.parametrize("size", [1, 3])
def test_an_episodes_result_is_the_same_in_batches_of_1_3_and_16(worker, rows, together, policy, size):
    assert run(worker, policy, rows, size) == together[policy]


@pytest.mark.parametrize("policy", ["model", "random"])
@pytest.mark.parametrize("size", [3, 16])
def test_an_episodes_result_is_the_same_in_the_reverse_order(worker, rows, together, policy, size):
    """Reversed, it also runs in an environment that another episode has used."""
    assert run(worker, policy, rows[::-1], size) == together[policy]


def test_what_a_plan_leaves_for_the_next_one_stays_in_its_episode(run_folder, dataset_path, tiny_config, rows):
    plan = replace(tiny_config.plan, execute=1, cost="nearest")
    replanning = Worker(Setup(str(run_folder), "tworoom", str(dataset_path), plan, "cpu"))
    some = rows[:6]
    expected = run(replanning, "model", some, 6)
    assert run(replanning, "model", some[::-1], 1) == expected
    assert max(r.plans for r in expected.values()) == 6  # one for each block of 5 of the 30 steps


def test_equal_results_mean_equal_noise(worker, rows, together):
    """Another seed gives every episode that ever acted other ends: so the results above do depend on the draws."""
    other = run(worker, "model", rows, EPISODES, seed=9)
    acted = [row for row in rows if together["model"][row].steps > 5]
    assert len(acted) >= 4
    assert all(other[row].final_distance != together["model"][row].final_distance for row in acted)


def test_episodes_fail_and_succeed_and_plan_again(together):
    records = together["model"].values()
    assert {r.success for r in records} == {True, False} and {r.plans for r in records} == {1, 2}


@pytest.mark.slow
@pytest.mark.usefixtures("spawned_workers")
def test_results_are_the_same_from_three_worker_processes(run_folder, tmp_path, together, monkeypatch):
    monkeypatch.setitem(module.EPISODES_PER_JOB, "cpu", 6)  # three jobs for each policy
    folder = shutil.copytree(run_folder, tmp_path / "run")
    (report,) = evaluate(folder, [PROTOCOL], workers=3, films=0, device="cpu")
    for policy, records in together.items():
        written = report.policies[policy].episodes["8"]
        assert [e.row for e in written] == list(records)
        assert all({**asdict(e), **asdict(records[e.row])} == asdict(e) for e in written)
