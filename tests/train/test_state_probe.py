"""Training with state probes: the same weights, and R² in the metrics."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from short_runs import metrics, short_config, short_train

from atlas_wm.data.training_set import TrainingSet, open_training_set
from atlas_wm.errors import UserError
from atlas_wm.models.probes import explained, ridge_probe
from atlas_wm.models.world_model import WorldModel
from atlas_wm.train.validation import StateProbe


def open_short(dataset_path, task, **changes) -> TrainingSet:
    return open_training_set(dataset_path, task, short_config(probe=True, **changes))


@pytest.mark.usefixtures("one_thread")
def test_the_columns_are_written_and_the_weights_stay_bit_equal(dataset_path, undisturbed, tmp_path):
    run = short_train(short_config(probe=True), dataset_path, tmp_path / "run")
    without, with_probe = (load_file(folder / "model.safetensors") for folder in (undisturbed, run))
    assert without.keys() == with_probe.keys()
    assert all(torch.equal(without[key], with_probe[key]) for key in without)
    rows, others = metrics(run), metrics(undisturbed)
    found = [row.pop("val_probe_agent") for row in rows]
    assert rows == others
    assert [bool(value) for value in found] == [bool(row["val_total"]) for row in rows] and any(found)
    assert all(math.isfinite(float(value)) and float(value) <= 1 for value in found if value)


@pytest.mark.parametrize("split", ["clips", "episodes"])
def test_rows_are_frames_of_their_clips_and_judged_ones_are_not_fitted(dataset_path, task, split):
    training_set = open_short(dataset_path, task, split=split)
    fitted, judged = training_set.probe_rows(300)
    assert len(fitted) == 300 and 0 < len(judged) <= 500 and not set(fitted) & set(judged)
    for rows, clips in ((fitted, training_set.training), (judged, training_set.validation)):
        first = training_set.data.offsets[clips.episode] + clips.start
        frames = first[:, None] + 5 * np.arange(training_set.config.model.clip_frames)
        assert set(rows) <= set(frames.reshape(-1))
    if split == "episodes":
        assert not set(training_set.data.locate(fitted)[0]) & set(training_set.data.locate(judged)[0])


def test_r2_is_that_of_a_ridge_from_z_of_these_rows(dataset_path, task):
    training_set = open_short(dataset_path, task)
    model = WorldModel(training_set.config.model, 2, training_set.normalizer)
    probe = StateProbe(training_set)
    found = probe.measure(model, torch.device("cpu"))
    assert model.training and probe.names == ["probe_agent"]
    data = training_set.data
    with torch.no_grad():
        model.eval()
        x, queries = (model.encode(data.frames_of(rows)) for rows in (probe.fitted, probe.judged))
    y = torch.from_numpy(data.states)
    expected = explained(ridge_probe(x, y[probe.fitted], queries), y[probe.judged])
    assert found["probe_agent"] == pytest.approx(expected, abs=1e-3)


def test_cached_tokens_are_averaged(dataset_path, task):
    """As of a frozen DINOv2: the state is spread over the tokens, and their mean is the state."""
    training_set = open_short(dataset_path, task)
    states = torch.from_numpy(training_set.data.states).half()

    class Tokens:
        def read(self, rows):
            return torch.stack([states[rows] + 8, states[rows] - 8], dim=1)

    training_set.cache = Tokens()
    model = WorldModel(training_set.config.model, 2, training_set.normalizer)
    assert StateProbe(training_set).measure(model, torch.device("cpu"))["probe_agent"] > 0.99


def test_data_without_a_state_are_refused_at_the_start(dataset_path, tmp_path, monkeypatch):
    monkeypatch.setattr("atlas_wm.tasks.tworoom.TwoRoom.coordinate_columns", ((),))
    with pytest.raises(UserError, match=r"--train\.probe cannot be used: .* has no state"):
        short_train(short_config(probe=True), dataset_path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_too_few_frames_are_refused(dataset_path, task):
    training_set = open_short(dataset_path, task)
    training_set = replace(training_set, training=training_set.validation)  # all its frames are judged
    with pytest.raises(UserError, match="too few episodes"):
        StateProbe(training_set)
