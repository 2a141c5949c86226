"""Training runs on the device: frames from disk or kept there, interrupted and not."""

import csv
import logging
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partialmethod
from pathlib import Path

import numpy as np
import pytest
import torch

import atlas_wm
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.data.frame_cache import cache_on_device
from atlas_wm.data.training_set import TrainingSet
from atlas_wm.recipes import demo
from atlas_wm.runs.model import load_model
from atlas_wm.train import step as step_module
from atlas_wm.train.loop import train

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def steps_made(monkeypatch):
    """The captured steps of the test's runs."""
    made = []

    class Recorded(step_module.CapturedStep):
        def __init__(self, *given, **options):
            super().__init__(*given, **options)
            made.append(self)

    monkeypatch.setattr(step_module, "CapturedStep", Recorded)
    monkeypatch.setattr(
        TrainingSet, "sample_frames", partialmethod(TrainingSet.sample_frames, 60)
    )  # a smaller bank
    return made


def run(task, data, out, **settings):
    config = demo("atlas")
    settings = {"steps": 60, "batch": 32, "log_every": 10, "validate_every": 30, "batchnorm_batches": 2} | settings
    config = replace(config, train=replace(config.train, **settings))
    return train(config, task, data, out, method="atlas", recipe="demo", device=DEVICE)


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def totals(folder: Path, name: str = "total") -> np.ndarray:
    return np.array([float(row[name]) for row in rows_of(folder)])


@pytest.mark.parametrize("workers", [0, 2])
def test_streamed_frames_do_not_disturb_the_capture(task, dataset_path, tmp_path, steps_made, caplog, workers):
    """A thread pins the memory of batches that come, also while the step is captured."""
    with caplog.at_level(logging.INFO, "atlas_wm"):
        folder = run(task, dataset_path, tmp_path / "run", cache_frames="never", workers=workers)
    assert "fast path: off" not in caplog.text
    (step,) = steps_made
    assert step.graph is not None and [int(row["step"]) for row in rows_of(folder)] == [10, 20, 30, 40, 50, 60]
    assert load_model(folder).bank is not None


def test_frames_kept_on_the_device_train_the_same_model(task, dataset_path, tmp_path, steps_made, caplog):
    with caplog.at_level(logging.INFO, "atlas_wm"):
        kept = run(task, dataset_path, tmp_path / "kept", cache_frames="always")
    assert "frames on the device" in caplog.text
    streamed = run(task, dataset_path, tmp_path / "streamed", cache_frames="never")
    np.testing.assert_allclose(totals(kept), totals(streamed), rtol=0.05)
    assert all(step.graph is not None for step in steps_made) and len(steps_made) == 2


@pytest.mark.parametrize("size", [225, 224, 187])
def test_kept_frames_are_the_frames(task, dataset_path, size):
    data = EpisodeData(dataset_path, task, image_size=size, frameskip=5)
    data.actions = data.actions[:300]
    kept = cache_on_device(data, torch.device(DEVICE), workers=1, always=True)
    rows = np.random.default_rng(0).integers(0, 300, (20, 4))
    expected = data.frames_of(rows.reshape(-1)).unflatten(0, (20, 4))
    assert torch.equal(kept.read(rows).cpu(), expected)


STEPS, EVERY = 1500, 50
FLAGS = {
    "method": "atlas", "recipe": "demo", "device": DEVICE, "train.steps": STEPS, "train.batch": 32,
    "train.log-every": 25, "train.validate-every": 500, "train.checkpoint-every": EVERY,
}  # fmt: skip


def atlas_train(data: Path, out: Path) -> subprocess.Popen:
    """A real process, as a user starts it."""
    flags = [
        part for name, value in {**FLAGS, "data": data, "out": out}.items() for part in (f"--{name}", str(value))
    ]
    path = os.pathsep.join([str(Path(atlas_wm.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with out.with_suffix(".txt").open("a") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "atlas_wm", "train", "tworoom", *flags],
            env={**os.environ, "PYTHONPATH": path},
            stdout=said,
            stderr=said,
        )


def last_checkpoint(out: Path) -> int:
    found = out.with_name(f"{out.name}.partial").glob("checkpoints/step-*.sha256")
    return max((int(path.stem.removeprefix("step-")) for path in found), default=0)


def test_killed_and_started_again_a_run_ends_where_it_would_have(dataset_path, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    undisturbed, victim = started = [atlas_train(dataset_path, out) for out in (whole, broken)]
    try:
        until = time.monotonic() + 150
        while last_checkpoint(broken) < 4 * EVERY and victim.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        victim.kill()
        assert victim.wait() == -9, broken.with_suffix(".txt").read_text()[-3000:]
        reached = last_checkpoint(broken)
        assert 4 * EVERY <= reached < STEPS and not broken.exists()
        started.append(atlas_train(dataset_path, broken))
        assert started[-1].wait(150) == 0, broken.with_suffix(".txt").read_text()[-3000:]
        assert undisturbed.wait(150) == 0, whole.with_suffix(".txt").read_text()[-3000:]
    finally:
        for process in started:
            process.kill()
    said = broken.with_suffix(".txt").read_text()
    assert f"resuming from step {reached} of {STEPS}" in said and "fast path: off" not in said
    assert [int(row["step"]) for row in rows_of(broken)] == list(range(25, STEPS + 1, 25))
    expected, found = totals(whole), totals(broken)
    assert expected[-1] < 0.8 * expected[0]
    # Not to the same bits: some kernels on a GPU add up in another order each time.
    np.testing.assert_allclose(found[:4], expected[:4], rtol=0.05)
    assert np.mean(found[-12:]) == pytest.approx(np.mean(expected[-12:]), rel=0.1)
    assert float(rows_of(broken)[-1]["val_total"]) == pytest.approx(float(rows_of(whole)[-1]["val_total"]), rel=0.2)
