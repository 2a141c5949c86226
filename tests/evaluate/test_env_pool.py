"""Stages: the same episodes in this process and in others, no image too many, and no silence when one fails."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

from atlas_wm.data.dataset import EpisodeData
from atlas_wm.errors import UserError
from atlas_wm.evaluate.env_batch import EnvBatch, EpisodeStart, Observations
from atlas_wm.evaluate.env_pool import EnvPool
from atlas_wm.evaluate.evaluate import evaluate
from atlas_wm.evaluate.protocol import Protocol, draw_starts
from atlas_wm.evaluate.rollout import planning_policy, random_policy, run_episodes
from atlas_wm.evaluate.worker import Job, JobResult, Setup, Worker
from atlas_wm.tasks.tworoom import TwoRoom

PROTOCOL = Protocol(offset=20, budget=30, episodes=16, seeds=(8,))


@pytest.fixture(scope="module")
def data(dataset_path, task) -> EpisodeData:
    return EpisodeData(dataset_path, task, 32, 5)


@pytest.fixture(scope="module")
def rows(data) -> tuple[int, ...]:
    return tuple(draw_starts(data, PROTOCOL, 8).tolist())


@pytest.fixture(scope="module")
def setup(run_folder, dataset_path, tiny_config) -> Iterator[Setup]:
    """With one thread for the planner, as in a worker process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Setup(str(run_folder), "tworoom", str(dataset_path), tiny_config.plan, "cpu")
    torch.set_num_threads(threads)


def jobs(rows: tuple[int, ...], size: int) -> list[Job]:
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [Job(policy, PROTOCOL, 8, part, rows[:2]) for policy in ("model", "random") for part in parts]


def merged(results: list[JobResult]) -> tuple[list, dict]:
    records = [(r.job.policy, record) for r in results for record in r.records]
    films = {(r.job.policy, row): film.tobytes() for r in results for row, film in r.films.items()}
    return records, films


@pytest.fixture(scope="module")
def local(setup, rows):
    return merged([Worker(setup).run(job) for job in jobs(rows, 16)])


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3])
def test_records_and_films_are_the_same_from_any_number_of_stage_processes(setup, rows, local, processes):
    with closing(Worker(setup, processes)) as worker:
        for size in (1, 3, 16):
            assert merged([worker.run(job) for job in jobs(rows, size)]) == local, size
    assert {record.plans for policy, record in local[0] if policy == "model"} == {1, 2} and len(local[1]) == 4


@pytest.mark.slow
def test_reports_are_the_same_from_worker_and_from_stage_processes(setup, run_folder, tmp_path):
    protocol = Protocol(20, 30, 6, (8, 9))
    folder = shutil.copytree(run_folder, tmp_path / "run")
    workers, pool = (
        evaluate(folder, [protocol], workers=2, films=1, device="cpu", environments=where)[0]
        for where in ("local", "remote")
    )
    assert (workers.environments, pool.environments, pool.workers) == ("local", "remote", 2)
    for policy in ("model", "random", "replay"):
        assert workers.policies[policy].episodes == pool.policies[policy].episodes


class Counting(gym.Wrapper):
    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.calls: Counter[str] = Counter()

    def step(self, action):
        self.calls["step"] += 1
        return self.env.step(action)

    def render(self):
        self.calls["render"] += 1
        return self.env.render()


def test_a_frame_is_drawn_for_each_plan_and_none_for_random_actions(setup, data, rows, task):
    batch, planner = EnvBatch(task, 32), Worker(setup).planner
    batch.envs = envs = [Counting(task.make_env()) for _ in rows]
    records, _ = run_episodes([batch], data, planning_policy(planner, 8), rows, 20, budget=60)
    for env, record in zip(envs, records, strict=True):
        assert env.calls == {"render": record.plans, "step": record.steps}
        env.calls.clear()
    assert max(record.plans for record in records) == 3
    run_episodes([batch], data, random_policy(batch.open(), 8), rows, 20, budget=60, observe=None)
    assert all(env.calls["render"] == 0 < env.calls["step"] for env in envs)
    assert batch.envs is envs and len(envs) == len(rows)  # kept


def test_one_stage_acts_while_another_is_planned_for(data, rows, task):
    happened = []

    class Noting(EnvBatch):
        def __init__(self, name):
            super().__init__(task, 32)
            self.name = name

        def ask(self, asked):
            starts = {isinstance(item, EpisodeStart) for item in asked.values()}
            happened.append(f"{'start' if starts == {True} else 'act'} {self.name}")
            super().ask(asked)

        def answer(self):
            happened.append(f"wait {self.name}")
            return super().answer()

    def wait(episodes):
        happened.append(f"plan for {len(episodes)}")
        return [np.zeros((25, 2)) for _ in episodes]

    far = [r for r in rows if not task.solved(*data.states[[r, r + 20]])][:3]
    run_episodes([Noting("a"), Noting("b")], data, wait, far, 20, budget=50, observe=None)
    first = "start a, start b, wait a, plan for 2, act a, wait b, plan for 1, act b"
    assert happened == f"{first}, {first[18:]}, wait a, wait b".split(", ")


@pytest.mark.parametrize("at_once", [1, 3, 4])
def test_episodes_that_wait_for_a_free_environment_end_as_if_all_ran_at_once(setup, data, rows, task, at_once):
    planner, sizes = Worker(setup).planner, []

    def run(at_once):
        batches, policy = [EnvBatch(task, 32), EnvBatch(task, 32)], planning_policy(planner, 8)

        def noted(episodes):
            sizes.append(len(episodes))
            return policy(episodes)

        found = run_episodes(batches, data, noted, rows, 20, 60, films=rows[::5], at_once=at_once)
        return found, [len(batch.envs) for batch in batches]

    (everything, films), made = run(None)
    assert sum(made) == len(rows) and len({record.plans for record in everything}) > 1
    sizes.clear()
    (records, some), made = run(at_once)
    assert records == everything and made == [max(1, (at_once + 1) // 2), max(1, at_once // 2)]
    assert films.keys() == some.keys() and all(np.array_equal(films[row], some[row]) for row in films)
    assert np.mean(sizes) > 0.7 * sum(made) / 2  # the environments are busy until the end


class Moody(TwoRoom):
    """Does something else than to move where the first coordinate of an action says so."""

    def make_env(self):
        return MoodyEnv(super().make_env())


class MoodyEnv(gym.Wrapper):
    def step(self, action):
        if action[0] == 7:
            raise ValueError(f"stuck, on {torch.get_num_threads()} thread")
        if action[0] == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        if action[0] == 9:
            time.sleep(600)
        return self.env.step(action)


def two_moody_processes(timeout: float = 0) -> EnvPool:
    envs = EnvPool(Moody().spec, 32, 2, timeout)
    begin(envs)
    return envs


def begin(envs: EnvPool) -> None:
    start = EpisodeStart(np.array([50.0, 50.0], np.float32), np.array([150.0, 150.0], np.float32), 50, "frame")
    envs.ask({0: start, 1: start})
    assert [frame.shape for frame in envs.answer().values()] == [(3, 32, 32)] * 2


def provoke(envs: EnvPool, mood: int) -> Observations:
    envs.ask({0: np.zeros((1, 2)), 1: np.full((1, 2), mood)})
    return envs.answer()


@pytest.mark.slow
def test_an_environment_that_raises_dies_or_hangs_ends_its_episode_and_no_other():
    with closing(two_moody_processes(timeout=3)) as envs:
        for mood, error, lost in (
            (7, "ValueError: stuck, on 1 thread", False),
            (8, "its process died (SIGKILL): out of memory?", True),
            (9, "an environment took longer than --timeout", True),
        ):
            begin(envs)
            asked = time.monotonic()
            other, ending = provoke(envs, mood).values()
            assert other.shape == (3, 32, 32)
            assert (ending.success, ending.lost) == (False, lost) and ending.error.startswith(error)
            assert time.monotonic() - asked < 30


def test_a_task_that_a_stage_process_cannot_import_is_named(spawned_workers):
    with closing(EnvPool("no_such_module:Task", 32, 1)) as envs, pytest.raises(UserError, match="no_such"):
        envs.open()


INTERRUPTED = """
import multiprocessing, signal, sys; sys.path.insert(0, sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored by what it runs in the background
from contextlib import closing
from atlas_wm.parallel import workers
from test_env_pool import provoke, two_moody_processes
workers.get_context = lambda method: multiprocessing.get_context("fork")  # no process imports everything again
with closing(two_moody_processes()) as envs:
    print(*(p.process.pid for p in envs._processes), flush=True)
    provoke(envs, 9)
"""


@pytest.mark.slow
def test_an_interrupt_ends_everything_even_a_stage_that_hangs():
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as program:
        pids = [int(pid) for pid in program.stdout.readline().split()]
        time.sleep(1)
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does: to all of them
        try:
            _, said = program.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)  # else leaving the block would wait for ever
            raise
    assert "KeyboardInterrupt" in said and said.count("Traceback") == 1
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
