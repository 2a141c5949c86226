"""Environments that raise, die or hang, folders that cannot be written: the episode is named, the rest goes on."""

import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

from atlas_wm.cli.app import main
from atlas_wm.data import collect as collect_module
from atlas_wm.data.collect import collect
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.diagnose.evaluated import find_evaluated
from atlas_wm.diagnose.simulate import Environments, Simulator
from atlas_wm.errors import UserError
from atlas_wm.evaluate import evaluate as evaluate_module
from atlas_wm.evaluate.evaluate import evaluate
from atlas_wm.evaluate.protocol import Protocol, draw_starts
from atlas_wm.evaluate.worker import Job, JobResult, Setup, Worker
from atlas_wm.runs.results import PolicyResult, read_results
from atlas_wm.tasks.tworoom import TwoRoom

PROTOCOL = Protocol(offset=20, budget=25, episodes=6, seeds=(8,))
ERRORS = {
    "raise": "ValueError: broken",
    "die": "its process died (SIGKILL): out of memory?",
    "hang": "an environment took longer than --timeout",
}


def act(mood: str | None) -> None:
    if mood == "raise":
        raise ValueError("broken")
    if mood == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if mood == "hang":
        time.sleep(600)


class Moody(TwoRoom):
    """Fails as $MOODS says: by the state it starts from, or by the seed of a demonstration.

    Processes inherit the variable.
    """

    episodes_per_job = 3

    def mood(self, key: object) -> str | None:
        moods = json.loads(os.environ.get("MOODS", "{}"))
        return moods.get(str(key), moods.get("always"))

    def make_env(self):
        return MoodyEnv(super().make_env())

    def reset(self, env, state, goal_state):
        env.mood = None
        super().reset(env.env, state, goal_state)
        env.mood = self.mood(np.asarray(state).tolist())

    def demonstrator(self, env, seed):
        env.mood = self.mood(seed)
        return super().demonstrator(env.env, seed)


class MoodyEnv(gym.Wrapper):
    mood: str | None = None

    def step(self, action):
        act(self.mood)
        return self.env.step(action)


@pytest.fixture
def run(run_folder, tmp_path, monkeypatch) -> Path:
    """A run of the moody task."""
    monkeypatch.delenv("MOODS", raising=False)
    folder = shutil.copytree(run_folder, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "task": Moody().spec}))
    return folder


def here(setup: Setup, data: EpisodeData, jobs: list[Job], workers: int) -> Iterator[JobResult]:
    """What worker processes do, without them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield from map(Worker(setup).run, jobs)
    torch.set_num_threads(threads)


def one_evaluation(run: Path, env_batches: str) -> PolicyResult:
    options = {"policies": ("model",), "films": 0, "workers": 2, "device": "cpu"}
    return evaluate(run, [PROTOCOL], environments=env_batches, timeout=3, **options)[0].model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env_batches", "moods"), [("local", ("raise", "die", "hang")), ("remote", ("die", "raise"))]
)
def test_failing_episodes_are_recorded_and_the_others_are_as_they_would_be(
    run, dataset_path, monkeypatch, env_batches, moods
):
    with monkeypatch.context() as patch:
        patch.setattr(evaluate_module, "run_in_workers", here)
        undisturbed = one_evaluation(run, "local")
    assert undisturbed.errors == 0
    data = EpisodeData(dataset_path, Moody(), 32, 5)
    rows = draw_starts(data, PROTOCOL, 8).tolist()
    sad = dict(zip(rows[1:], moods, strict=False))
    monkeypatch.setenv("MOODS", json.dumps({str(data.states[row].tolist()): mood for row, mood in sad.items()}))
    result = one_evaluation(run, env_batches)
    (stored,) = read_results(run).values()  # the settings are the same: the first result is replaced
    assert stored.model == result
    assert result.errors == len(moods)
    for before, after in zip(undisturbed.episodes["8"], result.episodes["8"], strict=True):
        mood = sad.get(after.row)
        if mood is None:
            assert after == before
        else:
            assert (after.row, after.success) == (before.row, False)
            assert after.error.startswith(ERRORS[mood])
            assert ("test_failures.py:" in after.error) == (mood == "raise")  # where in the user's own code
    share = np.mean([e.success for e in result.episodes["8"]])
    assert result.success_mean == pytest.approx(100 * share)  # of all episodes, the failed ones included
    found = find_evaluated(run, 20, data.content_hash())
    assert len(found.episodes) == 6 - len(moods)  # what an environment failed over says nothing about the model


def test_where_every_episode_fails_nothing_is_written(run, monkeypatch):
    monkeypatch.setenv("MOODS", json.dumps({"always": "raise"}))
    monkeypatch.setattr(evaluate_module, "run_in_workers", here)
    with pytest.raises(UserError, match=r"the first 6 episodes all failed with an error.*ValueError: broken"):
        one_evaluation(run, "local")
    assert not list((run / "evaluation").iterdir())


@contextmanager
def files_at_most(size: int):
    """As on a disk that is nearly full: writing more is an OSError."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


@pytest.mark.parametrize("command", ["eval --offset 10 --episodes 2 --seeds 1", "diagnose"])
def test_a_full_disk_is_noticed_before_the_work(run_folder, tmp_path, command):
    run = shutil.copytree(run_folder, tmp_path / "run")
    started = time.monotonic()
    with (
        files_at_most(1000),
        pytest.raises(SystemExit, match=r"atlas: .*/run/\w+ cannot be written \(File too large\): free some space"),
    ):
        main([*command.split(), str(run)])
    assert time.monotonic() - started < 20


def test_a_folder_that_cannot_be_made_is_noticed_before_the_work(run_folder, tmp_path):
    run = shutil.copytree(run_folder, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation"))
    (run / "evaluation").write_text("in the way")
    with pytest.raises(UserError, match="evaluation cannot be written"):
        evaluate(run, [PROTOCOL])


def demonstration_seed(number: int) -> int:
    return np.random.SeedSequence([5, number]).generate_state(2).tolist()[1]


@pytest.mark.slow
def test_demonstrations_that_fail_are_left_out_and_named(dataset_path, tmp_path, monkeypatch):
    sad = {1: "raise", 3: "die"}
    monkeypatch.setenv("MOODS", json.dumps({str(demonstration_seed(n)): mood for n, mood in sad.items()}))
    said = []
    card = collect(Moody(), tmp_path / "x.h5", 6, seed=5, pixels=False, workers=2, say=said.append)
    assert list(card["failed"]) == [1, 3] and card["failed"][3] == ERRORS["die"] and card["episodes"] == 4
    assert card["failed"][1].startswith("ValueError: broken (at ") and "test_failures.py:" in card["failed"][1]
    (line,) = said
    assert line.startswith("2 of 6 episodes failed and are left out, the first is number 1: ValueError: broken")
    whole, rest = (EpisodeData(p, TwoRoom(), 32, 5) for p in (dataset_path, tmp_path / "x.h5"))
    for episode, number in enumerate((0, 2, 4, 5)):
        mine, theirs = (
            slice(d.offsets[n], d.offsets[n] + d.lengths[n]) for d, n in ((rest, episode), (whole, number))
        )
        assert np.array_equal(rest.states[mine], whole.states[theirs])


def test_where_every_demonstration_fails_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(
        collect_module, "_recorded", lambda pool, seed, pixels, jobs: (["broken"] * len(j) for j in jobs)
    )
    with pytest.raises(UserError, match="the first 6 episodes all failed, nothing is written: broken"):
        collect(Moody(), tmp_path / "y.h5", 6)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_simulation_tries_again_and_then_says_what_failed(monkeypatch):
    states, actions = np.array([[50.0, 50.0]], np.float32), np.zeros((1, 1, 1, 2, 2))
    monkeypatch.setenv("MOODS", json.dumps({"always": "raise"}))
    with pytest.raises(UserError, match="an environment of test_failures:Moody failed: ValueError: broken"):
        Environments(0).run(0, "futures", Moody().spec, states[0], actions[0])
    monkeypatch.setenv("MOODS", json.dumps({"always": "die"}))
    with Simulator(1, timeout=20) as simulator, pytest.raises(UserError, match=r"Moody failed, .*SIGKILL"):
        list(simulator.futures(Moody(), states, actions))
