"""Training never loses work: killed at any moment, the same command resumes it, to the same weights bit for bit."""

import json
import os
import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from short_runs import STEPS, metrics, same_result, short_config, short_train, start, wait_for
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from atlas_wm.errors import Interrupted, UserError
from atlas_wm.models.world_model import WorldModel
from atlas_wm.runs.model import load_model
from atlas_wm.train.checkpointer import checkpoints_in, read_saved

pytestmark = pytest.mark.usefixtures("one_thread")


def interrupt_at(step: int, number: int = signal.SIGTERM):
    def on_progress(progress) -> None:
        if progress.step >= step:
            os.kill(os.getpid(), number)

    return on_progress


def stopped(config, data, out, step: int = 14, **options) -> Path:
    """A run that was interrupted at a step; its staging folder."""
    with pytest.raises(Interrupted):
        short_train(config, data, out, on_progress=interrupt_at(step), **options)
    return out.with_name(out.name + ".partial")


@pytest.mark.slow
def test_killed_at_five_random_moments_it_ends_with_the_same_bits(dataset_path, undisturbed, tmp_path):
    draw = random.Random()
    lives = [draw.randint(2, 8) for _ in range(5)]
    for updates in lives:
        process, reached = start(dataset_path, tmp_path / "run", short_config(), most=updates + 3)
        wait_for(reached, updates, process)
        process.join(draw.uniform(0, 0.03))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not (tmp_path / "run").exists()
    short_train(short_config(), dataset_path, tmp_path / "run")
    assert same_result(undisturbed, tmp_path / "run"), f"killed after {lives} updates"
    assert {p.name for p in tmp_path.iterdir()} == {"run"}


@pytest.mark.parametrize("call", [15, 16], ids=["under no name yet", "without its checksum"])
def test_killed_while_a_checkpoint_reaches_the_disk(dataset_path, undisturbed, tmp_path, call):
    """The 14 calls before belong to the settings, the states, the metrics and the first checkpoint."""
    process, _ = start(dataset_path, tmp_path / "run", short_config(), die_at_sync=call)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (torn,) = (tmp_path / "run.partial" / "checkpoints").glob("step-00000010*")
    assert torn.suffix == (".tmp" if call == 15 else ".safetensors")
    stopped(short_config(), dataset_path, tmp_path / "run", step=7)
    assert not torn.exists()
    short_train(short_config(), dataset_path, tmp_path / "run")
    assert same_result(undisturbed, tmp_path / "run")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_save_first(dataset_path, undisturbed, tmp_path, number):
    process, reached = start(dataset_path, tmp_path / "run", short_config(checkpoint_every=1000))
    wait_for(reached, 9, process)
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == 128 + number
    (saved,) = checkpoints_in(tmp_path / "run.partial")
    assert 9 <= read_saved(saved).step < STEPS
    short_train(short_config(), dataset_path, tmp_path / "run")
    assert same_result(undisturbed, tmp_path / "run")


def test_the_command_line_says_how_to_go_on(dataset_path, tmp_path, monkeypatch, capsys):
    from atlas_wm.cli.app import main
    from atlas_wm.train import loop

    whole = loop.train
    monkeypatch.setattr(loop, "train", lambda *a, **o: whole(*a, **{**o, "on_progress": interrupt_at(1)}))
    given = [
        "--recipe",
        "demo",
        "--device",
        "cpu",
        "--train.steps",
        "2",
        "--train.batch",
        "4",
        "--train.log-every",
        "1",
    ]
    with pytest.raises(SystemExit) as left:
        main(["train", "tworoom", *given, "--data", str(dataset_path), "--out", str(tmp_path / "run")])
    assert left.value.code == 143
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("atlas: ")]
    assert "SIGTERM after step 1 of 2" in line and "run the same command again to resume" in line


def test_loader_processes_go_on_at_the_same_clip(dataset_path, undisturbed, tmp_path):
    """Their number may change between the parts of a run: it changes nothing."""
    config = short_config()
    stopped(replace(config, train=replace(config.train, workers=2)), dataset_path, tmp_path / "run", step=28)
    short_train(config, dataset_path, tmp_path / "run")
    assert same_result(undisturbed, tmp_path / "run")


def test_metrics_have_neither_gaps_nor_doubles(dataset_path, undisturbed, tmp_path):
    """Also where rows were written after the checkpoint, the last of them torn."""
    staging = stopped(short_config(), dataset_path, tmp_path / "run", step=28)
    with (staging / "metrics.csv").open("a") as file:
        file.write("35,1,1\r\n3")
    short_train(short_config(), dataset_path, tmp_path / "run")
    assert metrics(tmp_path / "run") == metrics(undisturbed)
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("total")] == [*range(7, STEPS, 7), STEPS]


def test_the_finished_folder_is_small(undisturbed):
    assert not (undisturbed / "checkpoints").exists() and not (undisturbed / "lock").exists()
    assert not list(undisturbed.rglob("*.tmp"))
    load_model(undisturbed)


def test_weights_are_kept_where_asked_for(dataset_path, tmp_path):
    run = short_train(short_config(steps=12, save_every=4), dataset_path, tmp_path / "run")
    assert {p.name for p in (run / "weights").glob("step-*.safetensors")} == {
        "step-00000004.safetensors",
        "step-00000008.safetensors",
    }
    kept = read_saved(run / "weights" / "step-00000008.safetensors")
    load_model(run).load_state_dict(kept.tensors)


def test_the_validation_of_the_lowest_loss_is_kept(dataset_path, tmp_path):
    worsening = short_config(lr=0.5, best="loss")  # from the first validation on
    run = short_train(worsening, dataset_path, tmp_path / "run")
    totals = {int(row["step"]): float(row["val_total"]) for row in metrics(run) if row["val_total"]}
    step = min(totals, key=totals.__getitem__)
    assert step != STEPS, "choose a larger rate"
    kept = read_saved(run / "weights" / "best.safetensors")
    assert kept.step == step and kept.notes["val_total"] == pytest.approx(totals[step], rel=1e-5)


@pytest.mark.parametrize("resumed", [False, True])
def test_the_validation_of_the_highest_score_is_kept(dataset_path, tmp_path, monkeypatch, resumed):
    scores = iter([0.7, 0.9, 0.8])

    def measure(self, model, device, *, mixed=False):
        return {"score": next(scores), "saturation": 0.5}

    monkeypatch.setattr("atlas_wm.train.score.PlanningScore.measure", measure)
    if resumed:
        stopped(short_config(), dataset_path, tmp_path / "run", step=49)
    run = short_train(short_config(), dataset_path, tmp_path / "run")
    steps = {float(row["val_score"]): int(row["step"]) for row in metrics(run) if row["val_score"]}
    assert list(steps) == [0.7, 0.9, 0.8]
    kept = read_saved(run / "weights" / "best.safetensors")
    assert kept.step == steps[0.9] and kept.notes["val_score"] == 0.9


def test_no_best_weights_where_the_last_validation_is_the_best(dataset_path, tmp_path):
    config = replace(short_config(), train=replace(short_config().train, validate_every=STEPS))
    run = short_train(config, dataset_path, tmp_path / "run")
    assert not (run / "weights").exists()


def test_other_settings_are_refused_by_name(dataset_path, tmp_path):
    config = short_config()
    staging = stopped(config, dataset_path, tmp_path / "run")
    before = read_saved(checkpoints_in(staging)[0]).step
    other = replace(config, train=replace(config.train, lr=0.5))
    with pytest.raises(UserError, match=r"train\.lr was 0\.001, is 0\.5: .*--overwrite"):
        short_train(other, dataset_path, tmp_path / "run")
    with pytest.raises(UserError, match="method was atlas, is lewm"):
        short_train(config, dataset_path, tmp_path / "run", method="lewm")
    assert read_saved(checkpoints_in(staging)[0]).step == before
    run = short_train(short_config(steps=7), dataset_path, tmp_path / "run", overwrite=True)
    assert metrics(run)[-1]["step"] == "7"


def test_other_data_are_refused(dataset_path, tmp_path):
    config = stopped(short_config(), dataset_path, tmp_path / "run") / "config.json"
    stored = json.loads(config.read_text())
    stored["data"]["hash"] = "0123456789abcdef"
    config.write_text(json.dumps(stored))
    with pytest.raises(UserError, match="hash of the data was 0123456789abcdef, is "):
        short_train(short_config(), dataset_path, tmp_path / "run")


def test_the_command_that_replaces_a_run_also_goes_on(dataset_path, undisturbed, tmp_path):
    """--overwrite is part of the same command; the run it replaces stays until the new one is whole."""
    shutil.copytree(undisturbed, tmp_path / "run")
    stopped(short_config(), dataset_path, tmp_path / "run", step=42, overwrite=True)
    assert same_result(undisturbed, tmp_path / "run")
    first: list[int] = []
    seen = {"on_progress": lambda progress: first.append(progress.step), "overwrite": True}
    short_train(short_config(), dataset_path, tmp_path / "run", **seen)
    assert first[0] == 49 and same_result(undisturbed, tmp_path / "run")
    assert {p.name for p in tmp_path.iterdir()} == {"run"}


def test_two_processes_do_not_train_into_one_folder(dataset_path, tmp_path):
    process, reached = start(dataset_path, tmp_path / "run", short_config())
    wait_for(reached, 3, process)
    with pytest.raises(UserError, match=f"is being trained by process {process.pid}"):
        short_train(short_config(), dataset_path, tmp_path / "run", overwrite=True)
    process.join()
    assert process.exitcode == 0 and metrics(tmp_path / "run")[-1]["step"] == str(STEPS)


def test_restoring_keeps_the_rate_a_captured_step_fills(dataset_path, tmp_path):
    """Its graph reads the learning rate from one tensor; loading the optimiser must not replace it."""
    from atlas_wm.train.checkpointer import Checkpointer
    from atlas_wm.train.monitors import StopSignals
    from atlas_wm.train.step import adamw

    config = short_config()
    staging = stopped(config, dataset_path, tmp_path / "run")
    saved = read_saved(checkpoints_in(staging)[0])
    model = WorldModel(config.model, 2)
    rate = torch.tensor(1.0)
    optimizer = adamw(model, config.train, lr=rate, capturable=True)
    Checkpointer(staging, config.train, saved, StopSignals()).restore(model, optimizer)
    assert optimizer.param_groups[0]["lr"] is rate
    first = next(model.parameters())
    assert optimizer.state[first]["step"] == saved.step
    assert torch.equal(optimizer.state[first]["exp_avg"], saved.tensors["optimizer.0.exp_avg"])
