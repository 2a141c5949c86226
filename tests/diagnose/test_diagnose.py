"""All of it: documented files, nothing measured twice, nothing lost because something else cannot be had."""

import json
import os
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from run_folders import OFFSET, SETTINGS, WANDERED, change_json, change_weights, evaluation_of

from atlas_wm.data.dataset import EpisodeData
from atlas_wm.diagnose import diagnose as module
from atlas_wm.diagnose.catalog import DIAGNOSTICS, QUERY_SETTINGS, DiagnosticName
from atlas_wm.diagnose.diagnose import MEASURE, diagnose
from atlas_wm.diagnose.frozen_run import FrozenRun
from atlas_wm.errors import UserError

DOCS = (Path(__file__).parents[2] / "docs" / "reference" / "diagnostics.md").read_text()
SHARED = {"rollout", "relational", "regret"}
WITH_EVALUATION = {"probe", "cases", "imagined"}


def all_keys(value) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(all_keys, value))
    return set(value).union(*map(all_keys, value.values())) if isinstance(value, dict) else set()


def named(text: str) -> set[str]:
    """What is quoted inside, or stands alone in, backticks."""
    return set(re.findall(r'"(\w+)"', text)) | set(re.findall(r"`(\w+)`", text))


def test_every_diagnostic_of_the_catalog_can_be_measured():
    assert list(MEASURE) == list(DIAGNOSTICS) == list(get_args(DiagnosticName))


@pytest.mark.parametrize("what", DIAGNOSTICS)
def test_results_have_the_documented_keys_and_no_others(diagnosed, what):
    row = next(line for line in DOCS.splitlines() if line.startswith(f"| `{what}.json`"))
    blocks = {"L3", "L6", "L9"}, {"L1", "L2"}  # of twelve blocks, of two
    result = diagnosed.read("evaluated", what)["result"]
    assert all_keys(result) - blocks[1] - {"note"} == named(row) - blocks[0]
    assert set(DIAGNOSTICS[what].keys) <= set(result)


def test_files_have_the_documented_envelope(diagnosed):
    envelope, run = (set(re.findall(r'"(\w+)"', part)) for part in re.findall(r"`(\{\"[^`]*\})`", DOCS)[:2])
    for what in DIAGNOSTICS:
        whole = diagnosed.read("evaluated", what)
        assert set(whole) == envelope and set(whole["run"]) == run
        assert whole["what"] == what and whole["format"] == 1 and whole["seconds"] >= 0
        expected = {"name": "evaluated", "task": "tworoom", "method": "atlas", "recipe": "demo"}
        assert expected.items() <= whole["run"].items()
        assert set(whole["settings"]) == set(DIAGNOSTICS[what].settings)
        assert (whole["queries"] is None) == (what not in SHARED)


def test_sizes_are_those_that_were_asked_for(diagnosed):
    results = {what: diagnosed.read("evaluated", what)["result"] for what in DIAGNOSTICS}
    assert np.shape(results["rollout"]["per_query"]) == (4, 5)
    assert len(results["regret"]["bound"]) == len(results["relational"]["rmse"]["per_query"]) == 4
    assert results["probe"]["episodes"] == len(results["probe"]["failed"]) == 10
    assert results["marginal"]["frames"] == 10 * WANDERED
    assert len(results["geometry"]["points"]) == len(results["geometry"]["novelty_percentile"]) == 2000


def test_runs_of_one_dataset_share_queries_and_rows_and_others_have_their_own(diagnosed, data, other_data, task):
    keys = {run: diagnosed.read(run, "rollout")["queries"] for run in ("evaluated", "changed", "elsewhere")}
    assert keys["evaluated"] == keys["changed"] != keys["elsewhere"]
    hashes = {run: diagnosed.read(run, "rollout")["run"]["data"] for run in keys}
    mine, theirs = data.content_hash(), EpisodeData(other_data, task, 32, 5).content_hash()
    assert hashes == {"evaluated": mine, "changed": mine, "elsewhere": theirs} and mine != theirs
    scales = {run: diagnosed.read(run, "rollout")["result"]["scale"] for run in keys}
    assert len(set(scales.values())) == 2  # encoders are alike, but one looks at other frames
    wandered = [diagnosed.read(run, "marginal")["result"] for run in keys]
    assert wandered[0] == wandered[1] == wandered[2]  # random frames are the task's


def test_the_command_says_what_cannot_be_had_and_lists_the_files(diagnosed):
    for what in WITH_EVALUATION:
        assert f"elsewhere: no {what}: {diagnosed.elsewhere} has no evaluation at offset {OFFSET}" in diagnosed.said
        assert not (diagnosed.elsewhere / f"diagnostics/{what}.json").exists()
    files = [
        run / f"diagnostics/{what}.json" for run in (diagnosed.evaluated, diagnosed.changed) for what in DIAGNOSTICS
    ]
    files += [diagnosed.elsewhere / f"diagnostics/{w}.json" for w in DIAGNOSTICS if w not in WITH_EVALUATION]
    assert diagnosed.printed[: len(files)] == [str(file) for file in files]
    assert all(Path(file).exists() for file in diagnosed.printed)


def test_the_bank_is_of_the_training_data_whatever_is_diagnosed(
    diagnosed, trained, other_data, data, tmp_path, monkeypatch
):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    elsewhere = FrozenRun(run, None, other_data, torch.device("cpu"))
    usual = FrozenRun(run, None, None, torch.device("cpu"))
    assert elsewhere.data_hash != elsewhere.bank_hash == usual.bank_hash == data.content_hash()
    assert np.array_equal(elsewhere.bank_rows, usual.bank_rows) and torch.equal(elsewhere.bank.z, usual.bank.z)
    assert diagnosed.read("evaluated", "geometry")["run"]["bank"] == data.content_hash()
    change_json(run / "config.json", "data", "path", value="gone.h5")
    monkeypatch.setitem(MEASURE, "marginal", lambda diagnosis: {})
    said = []
    files = diagnose([run], ["geometry", "marginal"], data_path=other_data, device="cpu", say=said.append)
    assert [file.stem for file in files] == ["marginal"]  # which needs no bank
    assert "no geometry: novelty in" in said[0] and "gone.h5" in said[0]


# ---- what is measured again


@pytest.fixture
def again(diagnosed, tmp_path, monkeypatch):
    """diagnose() over copies of the runs, which tells what it measured, and measures nothing really."""
    folders = [shutil.copytree(run, tmp_path / run.name) for run in (diagnosed.evaluated, diagnosed.changed)]
    measured = Counter()

    def stand_in(what):
        return lambda diagnosis: measured.update([what]) or {}

    for what in DIAGNOSTICS:
        monkeypatch.setitem(MEASURE, what, stand_in(what))
    asked_for = type("Asked", (), {"key": "k"})
    monkeypatch.setattr(module, "shared_queries", lambda *_: asked_for)

    def call(settings=SETTINGS, **options) -> set[str]:
        measured.clear()
        diagnose([folders[0], folders[1]], settings=settings, device="cpu", **options)
        assert not measured or set(measured.values()) <= {1, 2}
        return set(measured)

    call.runs = folders
    return call


def test_a_second_call_measures_nothing(again):
    assert again() == set()
    shutil.copytree(again.runs[0], again.runs[0].with_name("new times"), copy_function=shutil.copy)
    again.runs[0] = again.runs[0].with_name("new times")  # as after a download
    assert again() == set()


def test_fresh_measures_everything(again):
    assert again(fresh=True) == set(DIAGNOSTICS)


@pytest.mark.parametrize("setting", QUERY_SETTINGS)
def test_other_settings_measure_what_depends_on_them(again, setting):
    if setting == "offset":
        for run in again.runs:
            change_json(evaluation_of(run), "protocol", "offset", value=OFFSET + 1)
    also = {"offset": WITH_EVALUATION, "seed": {"state", "marginal", "geometry"}}.get(setting, set())
    changed = replace(SETTINGS, **{setting: getattr(SETTINGS, setting) + 1})
    assert again(changed) == SHARED | also
    assert again(changed) == set()


def test_other_weights_are_measured_anew_whatever_the_time_of_the_file(again):
    weights = again.runs[0] / "model.safetensors"
    change_weights(again.runs[0], "predictor.head", 2.0)
    os.utime(weights, (0, 0))
    assert again() == set(DIAGNOSTICS) and again() == set()


def test_another_evaluation_is_measured_anew(again):
    report = json.loads(evaluation_of(again.runs[0]).read_text())
    report["model"]["episodes"]["3"][0]["steps"] += 1
    evaluation_of(again.runs[0]).write_text(json.dumps({**report, "workers": 5}))
    assert again() == WITH_EVALUATION and again() == set()
    evaluation_of(again.runs[0]).write_text(json.dumps({**report, "workers": 6}))
    assert again() == set()


def test_a_damaged_file_is_measured_again(again):
    for what, text in {"marginal": "{", "rollout": "[]", "geometry": '{"format": 0}', "regret": ""}.items():
        (again.runs[1] / f"diagnostics/{what}.json").write_text(text)
    (again.runs[1] / "diagnostics/relational.json").unlink()
    assert again() == {"marginal", "rollout", "geometry", "regret", "relational"}


# ---- what cannot be had


def test_an_unknown_diagnostic_is_refused_before_anything_is_done(tmp_path):
    with pytest.raises(UserError, match=r"unknown diagnostic 'prob'\. Did you mean 'probe'"):
        diagnose([tmp_path / "no run"], ["marginal", "prob"])


def test_a_run_that_is_not_there_is_refused_before_anything_is_done(diagnosed, tmp_path):
    run = shutil.copytree(diagnosed.elsewhere, tmp_path / "run", ignore=shutil.ignore_patterns("diagnostics"))
    with pytest.raises(UserError, match="there is no run folder"):
        diagnose([run, tmp_path / "no run"], ["geometry"], device="cpu")
    assert not (run / "diagnostics").exists()


def test_a_run_without_an_evaluation_does_not_keep_others_from_their_films(diagnosed, tmp_path):
    run = shutil.copytree(diagnosed.evaluated, tmp_path / "run")
    shutil.rmtree(run / "diagnostics")
    said = []
    files = diagnose(
        [run, diagnosed.elsewhere], ["cases", "geometry"], settings=SETTINGS, device="cpu", say=said.append
    )
    names = [(f.parts[-3], f.stem) for f in files]
    assert names == [("run", "cases"), ("run", "geometry"), ("elsewhere", "geometry")]
    assert len(said) == 1 and "elsewhere: no cases" in said[0]


def test_cube_has_fewer_queries_unless_told_otherwise(diagnosed, monkeypatch):
    seen = []
    monkeypatch.setitem(MEASURE, "marginal", lambda diagnosis: seen.append(diagnosis.settings) or {})
    for name in ("cube", "tworoom"):
        monkeypatch.setattr("atlas_wm.tasks.tworoom.TwoRoom.name", name)
        diagnose([diagnosed.elsewhere], ["marginal"], device="cpu", fresh=True)
    assert [s.queries for s in seen] == [16, 100] and {s.candidates for s in seen} == {128}
