"""The planning score at validations: the weights stay the same, a saturating latent is reported."""

import logging
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from short_runs import metrics, short_config, short_train

from atlas_wm.data.training_set import open_training_set
from atlas_wm.models.world_model import WorldModel
from atlas_wm.train.score import PlanningScore, SaturationMonitor


@pytest.mark.usefixtures("one_thread")
def test_it_is_logged_and_the_weights_stay_bit_equal(dataset_path, undisturbed, tmp_path, monkeypatch):
    monkeypatch.setattr(PlanningScore, "of", lambda training_set: None)
    run = short_train(short_config(), dataset_path, tmp_path / "run")
    without, scored = (load_file(folder / "model.safetensors") for folder in (run, undisturbed))
    assert all(torch.equal(without[key], scored[key]) for key in without)
    rows, others = metrics(undisturbed), metrics(run)
    found = [(row.pop("val_score"), row.pop("val_saturation")) for row in rows]
    assert rows == others
    assert [bool(score) for score, _ in found] == [bool(row["val_total"]) for row in rows]
    assert all(0 <= float(score) <= 1 and float(share) > 0 for score, share in found if score)


def test_progress_shows_the_score_of_the_last_validation(dataset_path, tmp_path):
    seen = {}
    run = short_train(
        short_config(), dataset_path, tmp_path / "run", on_progress=lambda p: seen.update({p.step: p.score})
    )
    logged = {int(row["step"]): float(row["val_score"]) for row in metrics(run) if row["val_score"]}
    assert seen[14] is seen[21] is None
    assert seen[28] == pytest.approx(logged[21], abs=1e-5) and seen[60] == pytest.approx(logged[42], abs=1e-5)


def test_episodes_are_whole_and_have_validation_clips(dataset_path, task):
    training_set = open_training_set(dataset_path, task, short_config())
    score, data = PlanningScore(training_set), training_set.data
    rows = np.concatenate(score.rows)
    assert len(rows) == len(score.episode) == len(score.actions) <= 1000
    episodes, steps = data.locate(rows)
    assert episodes.tolist() == score.episode.tolist() and set(episodes) <= set(training_set.validation.episode)
    for episode in set(episodes):
        mine = steps[episodes == episode]
        assert mine.tolist() == list(range(0, int(data.lengths[episode]), data.frameskip))
    row = int(rows[1])
    expected = training_set.normalizer.apply(torch.from_numpy(data.actions[row : row + data.frameskip])).flatten()
    torch.testing.assert_close(score.actions[1], expected)


def test_an_untrained_model_has_a_score(dataset_path, task):
    training_set = open_training_set(dataset_path, task, short_config())
    model = WorldModel(training_set.config.model, 2, training_set.normalizer)
    found = PlanningScore(training_set).measure(model, torch.device("cpu"))
    assert model.training and all(math.isfinite(value) for value in found.values())
    assert found == PlanningScore(training_set).measure(model, torch.device("cpu"))


def test_episodes_that_are_too_short_give_none(dataset_path, task, caplog):
    config = short_config()
    config = type(config)(config.model, config.objective, config.train, type(config.plan)(horizon=30))
    with caplog.at_level(logging.INFO):
        assert PlanningScore.of(open_training_set(dataset_path, task, config)) is None
    assert "no planning score" in caplog.text and "weights/best follows the loss" in caplog.text


def test_saturation_is_reported_once_with_its_remedy(caplog):
    monitor = SaturationMonitor(short_config())
    monitor.check({"saturation": 0.8, "rank": 5.0})
    monitor.check({"saturation": 0.95, "rank": 1.1})  # a collapse, for which the remedy is the opposite
    monitor.check({"saturation": float("nan"), "rank": 5.0})
    assert not caplog.text
    for _ in range(2):
        monitor.check({"saturation": 0.95, "rank": 5.0})
    assert caplog.text.count("lower --objective.wemreg (0.2)") == 1
