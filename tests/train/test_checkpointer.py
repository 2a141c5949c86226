"""Checkpoints are whole or refused: damage is seen, and a disk that fails costs nothing that was saved."""

import errno
import logging
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from short_runs import metrics, same_result, short_config, short_train

from atlas_wm.config import TrainConfig
from atlas_wm.errors import Interrupted, UserError
from atlas_wm.models.world_model import WorldModel
from atlas_wm.runs.folder import CHECKPOINTS
from atlas_wm.train import checkpointer as checkpoint
from atlas_wm.train.checkpointer import (
    Checkpointer,
    Damaged,
    Saved,
    bytes_needed,
    checkpoints_in,
    checksum_of,
    last_good,
    read_saved,
    write_saved,
)
from atlas_wm.train.monitors import StopSignals

pytestmark = pytest.mark.usefixtures("one_thread")


def saved_at(step: int) -> Saved:
    return Saved({"model.w": torch.full((40,), float(step)), "losses": torch.empty(0, 3)}, {"step": step})


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """A staging folder with the checkpoints of steps 5 and 10."""
    staging = tmp_path_factory.mktemp("staging")
    for step in (5, 10):
        write_saved(staging / CHECKPOINTS / f"step-{step:08}.safetensors", saved_at(step))
    return staging


@pytest.fixture(scope="module")
def interrupted(dataset_path, tmp_path_factory) -> Path:
    """A run that broke off at its first report, with checkpoints of steps 3 and 6."""

    def stop(progress) -> None:
        raise RuntimeError("broken off")

    out = tmp_path_factory.mktemp("interrupted") / "run"
    with pytest.raises(RuntimeError, match="broken off"):
        short_train(short_config(checkpoint_every=3), dataset_path, out, on_progress=stop)
    return out.with_name("run.partial")


def again(interrupted: Path, tmp_path: Path) -> Path:
    """A copy of that run, to be gone on with as tmp_path / "run"."""
    return Path(shutil.copytree(interrupted, tmp_path / "run.partial"))


def test_a_checkpoint_comes_back_as_it_was(two):
    found = last_good(checkpoints_in(two))
    assert found is not None and found.notes == {"step": 10}
    assert {name: tensor.tolist() for name, tensor in found.tensors.items()} == {
        name: tensor.tolist() for name, tensor in saved_at(10).tensors.items()
    }


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_anywhere_is_seen_and_the_one_before_is_used(two, tmp_path_factory, data):
    """Cut at any byte, or with any byte changed, in the tensors or in the checksum."""
    staging = tmp_path_factory.mktemp("damaged")
    shutil.copytree(two / CHECKPOINTS, staging / CHECKPOINTS)
    last = checkpoints_in(staging)[0]
    victim = data.draw(st.sampled_from([last, checksum_of(last)]))
    content = bytearray(victim.read_bytes())
    end = len(content) if victim == last else 64  # behind the checksum comes the name, for sha256sum alone
    place = data.draw(st.integers(0, end - 1))
    if data.draw(st.booleans()):
        del content[place:]
    else:
        content[place] ^= data.draw(st.integers(1, 255))
    victim.write_bytes(content)
    with pytest.raises(Damaged):
        read_saved(last)
    found = last_good(checkpoints_in(staging))
    assert found is not None and found.step == 5 and torch.equal(found.tensors["model.w"], torch.full((40,), 5.0))
    assert not last.exists()


def test_the_sums_are_those_of_sha256sum(two):
    for sums in (two / CHECKPOINTS).glob("*.sha256"):
        assert subprocess.run(["sha256sum", "-c", sums.name], cwd=sums.parent, capture_output=True).returncode == 0


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    dataset_path, interrupted, undisturbed, tmp_path, caplog
):
    staging = again(interrupted, tmp_path)
    last, before = checkpoints_in(staging)
    last.write_bytes(last.read_bytes()[:-1])
    with caplog.at_level(logging.INFO, "atlas_wm"):
        run = short_train(short_config(), dataset_path, tmp_path / "run")
    assert f"{last} is damaged" in caplog.text and "using the one before it" in caplog.text
    assert "resuming from step 3 of 60" in caplog.text and before.name == "step-00000003.safetensors"
    assert same_result(run, undisturbed)


def test_without_a_whole_checkpoint_nothing_is_guessed(dataset_path, interrupted, tmp_path):
    staging = again(interrupted, tmp_path)
    for path in checkpoints_in(staging):
        path.write_bytes(b"")
    with pytest.raises(UserError, match=r"none of its checkpoints is intact: .*--overwrite"):
        short_train(short_config(), dataset_path, tmp_path / "run")
    assert len(checkpoints_in(staging)) == 2
    run = short_train(short_config(steps=7), dataset_path, tmp_path / "run", overwrite=True)
    assert metrics(run)[-1]["step"] == "7"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1.5 MB of our own, where this machine lets us."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1536k", "none", str(place)], capture_output=True
    ).returncode:
        pytest.skip("mounting needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(disk: Path, leave: int) -> Path:
    filler = disk / "filler"
    filler.write_bytes(b"\0" * (shutil.disk_usage(disk).free - leave))
    return filler


@pytest.mark.parametrize("checked", [True, False], ids=["seen before", "met while writing"])
def test_a_full_disk_costs_nothing_that_was_saved(dataset_path, undisturbed, small_disk, monkeypatch, checked):
    monkeypatch.setattr(checkpoint, "SPARE", 2**14 if checked else -(2**40))
    reports = []

    def fill_at_second(progress) -> None:
        reports.append(progress.step)
        if len(reports) == 2:
            fill(small_disk, leave=2**13)

    with pytest.raises(UserError) as said:
        short_train(short_config(), dataset_path, small_disk / "run", on_progress=fill_at_second)
    message = str(said.value)
    assert "free some space" in message and "the same command" in message and "\n" not in message
    assert not (small_disk / "run").exists() and not list(small_disk.rglob("*.tmp"))
    assert read_saved(checkpoints_in(small_disk / "run.partial")[0]).step == 10
    (small_disk / "filler").unlink()
    run = short_train(short_config(), dataset_path, small_disk / "run")
    assert same_result(run, undisturbed)


def test_a_run_that_does_not_fit_the_disk_is_refused_before_it_starts(dataset_path, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**20))
    with pytest.raises(UserError, match=r"has 1 MB left, this run needs \d+ MB"):
        short_train(short_config(), dataset_path, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_the_estimate_covers_what_a_run_holds(dataset_path, tmp_path):
    config, most = short_config(steps=21, save_every=7), 0

    def look(progress) -> None:
        nonlocal most
        files = (tmp_path / "run.partial").rglob("*.safetensors")
        most = max(most, sum(p.stat().st_size for p in files))

    short_train(config, dataset_path, tmp_path / "run", on_progress=look)
    model = WorldModel(config.model, 2)
    assert 0 < most < bytes_needed(model, config.train, 21) + checkpoint.SPARE
    assert bytes_needed(model, TrainConfig(save_every=1), 100) > bytes_needed(model, TrainConfig(), 100)


def test_a_folder_that_may_not_be_written_says_so(dataset_path, tmp_path, monkeypatch):
    """Root may write anywhere, so the refusal is put in where the system would give it."""

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError, match=r"run\.partial cannot be written \(Permission denied\): make it writable"):
        short_train(short_config(), dataset_path, tmp_path / "run")


def test_a_folder_that_becomes_read_only_keeps_its_state(dataset_path, interrupted, tmp_path, monkeypatch):
    staging = again(interrupted, tmp_path)
    before = {p.name: p.read_bytes() for p in (staging / CHECKPOINTS).iterdir()}

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(UserError, match=r"Read-only file system"):
        short_train(short_config(), dataset_path, tmp_path / "run")
    assert {p.name: p.read_bytes() for p in (staging / CHECKPOINTS).iterdir()} == before


def test_a_state_that_is_not_finite_is_never_saved(two, tmp_path):
    checkpointer = Checkpointer(tmp_path, TrainConfig(), None, StopSignals())
    broken = saved_at(5)
    broken.tensors["model.w"][3] = float("inf")
    with pytest.raises(UserError, match=r"model\.w is not finite after step 5"):
        checkpointer._save(broken)
    assert list(tmp_path.iterdir()) == []


def test_by_default_checkpoints_take_a_hundredth_of_the_time(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now[0])
    checkpointer = Checkpointer(tmp_path, TrainConfig(), None, StopSignals())
    now[0] = 59.0
    assert not checkpointer._is_due(1)
    now[0] = 60.0
    assert checkpointer._is_due(2)
    checkpointer.last_save, checkpointer.save_seconds = 60.0, 3.0
    now[0] = 359.0
    assert not checkpointer._is_due(3)
    now[0] = 360.0
    assert checkpointer._is_due(4)


def test_of_several_processes_the_first_writes_and_all_stop_at_the_same_step(tmp_path):
    """They ask at reports; the others take a random state of their own when they go on."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    asked: list[int] = []
    stop = StopSignals()
    settings = TrainConfig(log_every=5, checkpoint_every=1000)
    main, other = (
        Checkpointer(tmp_path, settings, saved_at(0), stop, rank=rank, agree=lambda n: asked.append(n) or 15)
        for rank in (0, 1)
    )
    for checkpointer in (other, main):
        checkpointer.after(4, 100, model, optimizer, lambda: torch.empty(0, 1), {})
        with pytest.raises(Interrupted, match="SIGTERM after step 5 of 100"):
            checkpointer.after(5, 100, model, optimizer, lambda: torch.empty(0, 1), {})
        assert bool(checkpoints_in(tmp_path)) == (checkpointer is main)
    assert asked == [0, 0]
    saved = read_saved(checkpoints_in(tmp_path)[0])
    draws = []
    for rank in (0, 1, 2):
        Checkpointer(tmp_path, settings, saved, stop, rank=rank).restore_random(torch.device("cpu"))
        draws.append(float(torch.rand(())))
    torch.set_rng_state(saved.tensors["random.cpu"])
    assert draws[0] == float(torch.rand(())) and len(set(draws)) == 3
