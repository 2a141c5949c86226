"""ID and OOD labels come from the states that a run was trained on, whatever data it is evaluated on."""

import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from atlas_wm.data.dataset import EpisodeData
from atlas_wm.data.states import TrainingStates, training_rows
from atlas_wm.errors import UserError
from atlas_wm.evaluate.evaluate import evaluate
from atlas_wm.evaluate.novelty import draw_and_label
from atlas_wm.evaluate.protocol import draw_starts
from atlas_wm.evaluate.split import path_scores, state_bank
from atlas_wm.runs.folder import STATES, read_run
from atlas_wm.runs.results import NoveltyBank, Protocol
from atlas_wm.train.bank import write_bank

PROTOCOL = Protocol(10, 12, 30, (1,))


@pytest.fixture(scope="module")
def training(dataset_path, task) -> EpisodeData:
    return EpisodeData(dataset_path, task, 32, 5)


@pytest.fixture(scope="module")
def other(dataset_path, task, tmp_path_factory) -> EpisodeData:
    """The first 12 of the demonstrations."""
    path = tmp_path_factory.mktemp("other") / "few.h5"
    with h5py.File(dataset_path) as all_of_them, h5py.File(path, "w") as few:
        rows = int(all_of_them["ep_len"][:12].sum())
        for name, column in all_of_them.items():
            few[name] = column[:12] if name.startswith("ep_") else column[:rows]
    return EpisodeData(path, task, 32, 5)


@pytest.fixture
def run(run_folder, tmp_path) -> Path:
    return Path(shutil.copytree(run_folder, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation")))


def change(run: Path, path: str | None = None, **values: object) -> None:
    config = json.loads((run / "config.json").read_text()) | values
    config["data"]["path"] = path or config["data"]["path"]
    (run / "config.json").write_text(json.dumps(config))


def columns(data: EpisodeData) -> np.ndarray:
    return data.columns(data.task.novelty_columns)


def scores_by(bank_of: np.ndarray, data: EpisodeData) -> list[float]:
    rows = draw_starts(data, PROTOCOL, 1)
    return path_scores(columns(data), rows, PROTOCOL.offset, state_bank(bank_of)).tolist()


def expected(training: EpisodeData, run: Path, data: EpisodeData) -> list[float]:
    return scores_by(columns(training)[training_rows(training, read_run(run)[0])], data)


def found(run: Path, data: EpisodeData) -> tuple[list[float], NoveltyBank]:
    draws = draw_and_label(run, read_run(run)[0], data, [PROTOCOL])
    return [score for score, _ in draws.starts[PROTOCOL][1].values()], draws.bank


def test_the_labels_of_other_data_are_told_by_the_training_data(run, training, other):
    scores, bank = found(run, other)
    assert scores == expected(training, run, other) != scores_by(columns(other), other)
    assert (bank.source, bank.data, bank.neighbours) == ("training data", training.content_hash(), 50)
    own, bank = found(run, training)
    assert own == expected(training, run, training) and bank.data == training.content_hash()


def test_the_run_folder_is_enough(run, training, other):
    change(run, path="gone.h5")
    assert found(run, other)[0] == expected(training, run, other)


def test_a_folder_without_states_takes_the_training_data_where_they_are(run, training, other):
    (run / STATES).unlink()
    scores, bank = found(run, other)
    assert scores == expected(training, run, other) and bank.source == "training data"


@pytest.mark.parametrize("instead", ["gone.h5", "other"])
def test_without_either_the_remedy_is_named_and_works(run, training, other, instead):
    (run / STATES).unlink()
    change(run, path=str(other.path) if instead == "other" else instead)
    with pytest.raises(UserError, match=rf"with hash {training.content_hash()}.*`atlas bank {run} --data"):
        found(run, other)
    write_bank(run, training.path, "cpu")
    assert found(run, other)[0] == expected(training, run, other)


def test_an_imported_run_without_its_data_says_whose_states_stood_in(run, other, caplog):
    (run / STATES).unlink()
    change(run, path="gone.h5", recipe="imported")
    scores, bank = found(run, other)
    assert scores == scores_by(columns(other), other)
    assert (bank.source, bank.data) == ("evaluated data", other.content_hash())
    assert "novelty is measured against" in caplog.text


@pytest.mark.parametrize("damage", ["bytes", "hash", "nan"])
def test_states_that_are_not_the_runs_are_refused(run, training, damage):
    info, _ = read_run(run)
    states = TrainingStates.read(run, info)
    assert np.array_equal(states.states, columns(training)[training_rows(training, info)])
    if damage == "bytes":
        (run / STATES).write_bytes(b"x" * 100)
    elif damage == "hash":
        TrainingStates(states.states, states.columns, "another").write(run)
    else:
        TrainingStates(np.full_like(states.states, np.nan), states.columns, states.data).write(run)
    with pytest.raises(UserError, match=rf"{STATES} cannot be used .*`atlas bank {run}`"):
        found(run, training)


def test_data_without_the_columns_of_the_states_are_refused(run, training):
    info, _ = read_run(run)
    states = TrainingStates.read(run, info)
    TrainingStates(states.states, ("nowhere",), states.data).write(run)
    with pytest.raises(UserError, match="has no column 'nowhere'"):
        found(run, training)


@pytest.mark.usefixtures("in_this_process")
def test_a_result_records_whose_bank_it_was(run, training, other):
    options = {"films": 0, "policies": ("model",), "device": "cpu"}
    (result,) = evaluate(run, [Protocol(10, 12, 4, (1,))], data_path=other.path, **options)
    assert result.data.hash == other.content_hash()
    assert (result.novelty_bank.source, result.novelty_bank.data) == ("training data", training.content_hash())
