"""Training watches itself: what is not finite, what collapses, and loader processes that die are named."""

import json
import logging
import os
import signal
import socket
import time
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.reduction import recvfds

import pytest
import torch
from short_runs import metrics, short_config, short_train

from atlas_wm.data.clips import Batch, ClipDataset
from atlas_wm.errors import UserError
from atlas_wm.losses.objective import TERMS
from atlas_wm.train.checkpointer import checkpoints_in, read_saved
from atlas_wm.train.monitors import CollapseMonitor, name_dead_loaders


def read_bad(out):
    return json.loads((out.with_name(out.name + ".partial") / "not-finite.json").read_text())


def test_a_term_that_is_not_finite_is_named_with_its_step_and_clips(dataset_path, tmp_path, monkeypatch):
    """Found at the report of step 14, but it is step 12 that is named."""
    whole, calls = TERMS["wemreg"], iter(range(1, 10**6))

    def broken(clips, *rest):
        value = whole(clips, *rest)
        return value * float("nan") if next(calls) == 12 else value

    monkeypatch.setitem(TERMS, "wemreg", broken)
    with pytest.raises(UserError) as said:
        short_train(short_config(validate_every=1000), dataset_path, tmp_path / "run")
    message = str(said.value)
    assert "not finite at step 12: wemreg, total, gradient; clips of the batch: row " in message
    assert "prediction" not in message and "\n" not in message and "--overwrite" in message
    record = read_bad(tmp_path / "run")
    assert record["step"] == 12 and record["values"]["wemreg"] == "nan" and len(record["clips"]) == 8
    saved = read_saved(checkpoints_in(tmp_path / "run.partial")[0])
    assert saved.step == 10
    assert all(bool(t.isfinite().all()) for t in saved.tensors.values() if t.is_floating_point())


def test_a_clip_that_is_not_finite_is_named(dataset_path, tmp_path, monkeypatch):
    """The first 200 rows of the dataset are broken behind the check at the start."""
    whole = ClipDataset.__getitems__

    def broken(self, which):
        batch = whole(self, which)
        clips = self.clips.take(torch.tensor(which).numpy())
        bad = torch.from_numpy(self.data.offsets[clips.episode] + clips.start) < 200
        return Batch(batch.frames, torch.where(bad[:, None, None], float("nan"), batch.actions))

    monkeypatch.setattr(ClipDataset, "__getitems__", broken)
    with pytest.raises(UserError, match="these clips hold numbers that are not finite: row") as said:
        short_train(short_config(validate_every=1000), dataset_path, tmp_path / "run")
    assert "Repair the dataset" in str(said.value)
    clips = read_bad(tmp_path / "run")["clips"]
    assert all(clip["finite"] == (clip["row"] >= 200) for clip in clips) and len(clips) == 8


def test_no_step_waits_for_the_device(dataset_path, tmp_path, monkeypatch):
    """Losses are read back where something is reported or saved, and nowhere else."""
    from atlas_wm.train.monitors import LossBuffer

    reads = []
    whole = LossBuffer.read
    monkeypatch.setattr(LossBuffer, "read", lambda self, step: reads.append(step) or whole(self, step))
    short_train(short_config(steps=30, checkpoint_every=15, validate_every=1000), dataset_path, tmp_path / "run")
    assert sorted(set(reads)) == [7, 14, 15, 21, 28, 30]


def test_collapse_is_measured_and_told_once(caplog):
    watch = CollapseMonitor()
    spread = torch.randn(40, 4, 8, generator=torch.Generator().manual_seed(0))
    healthy = watch.measure([spread[:20], spread[20:]])
    assert healthy["rank"] > 7 and healthy["variance"] == pytest.approx(1, abs=0.2) and not caplog.records
    line = spread[..., :1] * torch.ones(8)
    flat = watch.measure([line])
    assert flat["rank"] == pytest.approx(1) and flat["least_variance"] > 0.5
    watch.measure([0 * spread])
    (record,) = caplog.records
    assert "collapse" in record.message and "--objective.wemreg" in record.message


def test_training_without_a_regulariser_is_told_of_its_collapse(dataset_path, tmp_path, caplog):
    config = short_config(steps=28, validate_every=7)
    run = short_train(config, dataset_path, tmp_path / "run")
    assert "collapse" not in caplog.text
    assert 1.5 < float(metrics(run)[-1]["val_rank"]) < 8 and float(metrics(run)[-1]["val_least_variance"]) > 0
    alone = replace(config, objective=replace(config.objective, wemreg=0.0, sigreg=0.0, relational=0.0))
    alone = replace(alone, train=replace(alone.train, lr=1e-2))
    with caplog.at_level(logging.WARNING):
        run = short_train(alone, dataset_path, tmp_path / "alone")
    assert caplog.text.count("the latents collapse") == 1
    assert float(metrics(run)[-1]["val_variance"]) < 0.01


@pytest.mark.parametrize("seconds", [0, 1e-6, 0.05])  # 0: never
def test_the_signal_of_a_dead_loader_may_follow_its_broken_connection(seconds):
    """Torch raises a RuntimeError wherever this process is when the signal comes: it must not replace the line."""

    def as_torch_does(number, frame) -> None:
        raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")

    def read_from_the_dead() -> None:
        ours, theirs = Pipe()
        theirs.close()
        try:
            ours.recv()
        finally:
            signal.setitimer(signal.ITIMER_REAL, seconds)

    before = signal.signal(signal.SIGALRM, as_torch_does)
    try:
        with pytest.raises(UserError, match="a loader process died"), name_dead_loaders():
            read_from_the_dead()
        time.sleep(0.2)  # the rest of the program, which the signal must not reach
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_frames_that_a_dead_loader_did_not_hand_over_are_told_too():
    """A file descriptor that does not come with its message is a RuntimeError of multiprocessing."""
    ours, theirs = socket.socketpair()
    theirs.send(b"x")
    with ours, theirs, pytest.raises(UserError, match="0 items of ancdata"), name_dead_loaders():
        recvfds(ours, 1)


def test_errors_that_are_not_of_a_loader_stay_what_they_are():
    for error in (OSError("full"), EOFError("short"), RuntimeError("shapes")):
        with pytest.raises(type(error), match=str(error)), name_dead_loaders():
            raise error


def test_a_loader_process_that_is_killed_is_told_in_one_line(dataset_path, tmp_path):
    from torch.multiprocessing import active_children

    others = active_children()  # of other tests

    def kill_one(progress) -> None:
        if progress.step >= 14:
            loader = next(child for child in active_children() if child not in others)
            os.kill(loader.pid, signal.SIGKILL)

    config = short_config(steps=28, workers=2)
    with pytest.raises(UserError) as said:
        short_train(config, dataset_path, tmp_path / "run", on_progress=kill_one)
    assert "a loader process died" in str(said.value) and "--train.workers" in str(said.value)
    assert "\n" not in str(said.value)
    fewer = replace(config, train=replace(config.train, workers=0))
    assert metrics(short_train(fewer, dataset_path, tmp_path / "run"))[-1]["step"] == "28"
