"""Every row of metrics reaches a callback, and Weights & Biases through it; neither can stop a run."""

import json
import logging
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from short_runs import metrics, same_result, short_config, short_train

from atlas_wm.cli.app import main
from atlas_wm.errors import Interrupted

SHORT = {"steps": 21, "validate_every": 14}


def rows_of(seen):
    """As metrics.csv has them, without the speed."""
    written = [{"step": str(step)} | {k: f"{v:.6g}" for k, v in row.items()} for step, row in seen]
    return [{k: v for k, v in row.items() if k != "clips_per_second"} for row in written]


def test_every_row_of_the_metrics_is_handed_over(dataset_path, tmp_path):
    seen = []
    out = tmp_path / "run"
    run = short_train(short_config(**SHORT), dataset_path, out, on_metrics=lambda *row: seen.append(row))
    in_file = [{name: value for name, value in row.items() if value} for row in metrics(run)]
    assert rows_of(seen) == in_file and [step for step, _ in seen] == [7, 14, 21]
    assert "val_total" in seen[-1][1]


@pytest.mark.usefixtures("one_thread")
def test_a_callback_that_fails_costs_a_warning(dataset_path, tmp_path, caplog):
    calls = []

    def fail(step, row):
        calls.append(step)
        row.clear()  # it has a copy
        raise ConnectionError("no network\nand more")

    with caplog.at_level(logging.WARNING):
        broken = short_train(short_config(**SHORT), dataset_path, tmp_path / "broken", on_metrics=fail)
    (record,) = [r for r in caplog.records if "on_metrics" in r.message]
    assert "on_metrics failed at step 7 (ConnectionError: no network): training goes on" in record.message
    assert calls == [7, 14, 21]
    assert same_result(broken, short_train(short_config(**SHORT), dataset_path, tmp_path / "whole"))


class FakeRun:
    def __init__(self, settings):
        self.settings, self.rows, self.exit_code = settings, [], None

    def log(self, row, step):
        self.rows.append((step, row))

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package; the runs it was asked for."""
    module = ModuleType("wandb")
    module.runs = []

    def init(**settings):
        module.runs.append(FakeRun(settings))
        return module.runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return module


def atlas_train(data: Path, out: Path, *flags: str) -> None:
    sizes = ("--train.steps", "6", "--train.batch", "4", "--train.log-every", "2", "--train.checkpoint-every", "1")
    where = ("--data", str(data), "--out", str(out), "--log", "wandb")
    main(["train", "tworoom", "--recipe", "demo", "--device", "cpu", *sizes, *where, *flags])


def test_a_run_is_logged_with_its_settings(dataset_path, tmp_path, wandb):
    out = tmp_path / "my-project" / "my-run"
    atlas_train(dataset_path, out)
    (run,) = wandb.runs
    assert run.settings["project"] == "my-project" and run.settings["name"] == "my-run"
    assert run.settings["config"]["train"]["batch"] == 4 and run.settings["config"]["method"] == "atlas"
    assert [step for step, _ in run.rows] == [2, 4, 6] and run.exit_code == 0
    assert json.loads((out / "wandb.json").read_text()) == {"project": "my-project", "id": run.settings["id"]}


@pytest.mark.slow
def test_a_resumed_run_continues_its_wandb_run(dataset_path, tmp_path, wandb, monkeypatch):
    from atlas_wm.train import loop

    whole, out = loop.train, tmp_path / "run"

    def stop(progress):
        if progress.step == 4:
            raise Interrupted("stopped", 15)

    monkeypatch.setattr(loop, "train", lambda *a, **o: whole(*a, **{**o, "on_progress": stop}))
    with pytest.raises(SystemExit):
        atlas_train(dataset_path, out)
    monkeypatch.setattr(loop, "train", whole)
    atlas_train(dataset_path, out)
    first, second = wandb.runs
    assert first.settings == second.settings and second.settings["resume"] == "allow"
    assert (first.exit_code, second.exit_code) == (1, 0)
    assert [step for step, _ in first.rows + second.rows] == [2, 4, 6]
    atlas_train(dataset_path, out, "--overwrite")  # another run
    assert wandb.runs[2].settings["id"] != first.settings["id"]


def test_wandb_that_cannot_start_is_asked_once(dataset_path, tmp_path, wandb, monkeypatch, caplog):
    asked = []

    def refuse(**settings):
        asked.append(settings)
        raise RuntimeError("api_key not configured")

    monkeypatch.setattr(wandb, "init", refuse)
    atlas_train(dataset_path, tmp_path / "run")
    assert len(asked) == 1 and "RuntimeError: api_key not configured" in caplog.text
    assert metrics(tmp_path / "run")[-1]["step"] == "6"


def test_without_the_package_the_remedy_is_named(dataset_path, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SystemExit) as stopped:
        atlas_train(dataset_path, tmp_path / "run")
    assert "pip install 'atlas-wm[wandb]'" in str(stopped.value.code) and list(tmp_path.iterdir()) == []


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is an extra")
def test_the_real_package_takes_the_rows_offline(dataset_path, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    out = tmp_path / "project" / "run"
    atlas_train(dataset_path, out)
    stored = json.loads((out / "wandb.json").read_text())
    (folder,) = (tmp_path / "wandb").glob(f"offline-run-*-{stored['id']}")
    assert os.path.getsize(folder / f"run-{stored['id']}.wandb") > 0
