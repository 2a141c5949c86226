"""State probe: what a representation holds is found in it, on episodes that the probes have not seen."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from atlas_wm.data.clips import held_out_episodes
from atlas_wm.diagnose import state as module
from atlas_wm.diagnose.frozen_run import FrozenRun
from atlas_wm.diagnose.state import state
from atlas_wm.errors import UserError
from atlas_wm.models import probes
from atlas_wm.models.world_model import Features


@pytest.fixture
def run(trained, monkeypatch) -> FrozenRun:
    monkeypatch.setattr(probes, "STEPS", 100)
    return FrozenRun(trained, None, None, torch.device("cpu"))


@pytest.fixture
def known(run, monkeypatch) -> FrozenRun:
    """z is the state, the mean patch lacks one of its two numbers, CLS is noise."""

    def features(frames, blocks=()):
        x = torch.from_numpy(run.data.states[np.asarray(frames)])
        noise = torch.randn(len(x), 3, generator=torch.Generator().manual_seed(len(x)))
        return Features([], x[:, :1], noise, x)

    monkeypatch.setattr(run, "features", features)
    monkeypatch.setattr(run.training, "frames_of", lambda rows: rows)
    return run


def test_a_coordinate_is_found_where_it_is(known):
    found = state(known, seed=0)["representations"]
    z, patch, cls = (found[name]["linear"]["agent"] for name in ("z", "patch", "cls"))
    assert z["r2"] > 0.999 and z["error"] < 0.5
    assert 0.2 < patch["r2"] < 0.9 and patch["error"] > 10
    assert cls["r2"] < 0.1 and cls["error"] > patch["error"]
    assert found["z"]["mlp"]["agent"]["r2"] > 0.9 > 0.2 > found["cls"]["mlp"]["agent"]["r2"]


def test_probes_are_judged_on_episodes_they_were_not_fitted_on(known, monkeypatch):
    monkeypatch.setattr(module, "FITTED", 300)
    monkeypatch.setattr(module, "JUDGED", 50)
    seen, whole = [], module.features_of
    monkeypatch.setattr(module, "features_of", lambda run, rows: seen.append(rows) or whole(run, rows))
    result = state(known, seed=0)
    episodes = [known.data.locate(rows)[0] for rows in seen]
    held_out = held_out_episodes(len(known.data.lengths), known.info.config.train)
    assert not held_out[episodes[0]].any() and held_out[episodes[1]].all()
    assert (result["fitted"], result["judged"]) == (300, 50) == tuple(len(set(rows)) for rows in seen)
    state(known, seed=1)
    assert not np.array_equal(seen[0], seen[2])


def test_features_do_not_depend_on_the_batches_they_are_read_in(run, monkeypatch):
    rows = np.arange(20)
    whole = module.features_of(run, rows)
    monkeypatch.setattr(module, "FRAMES_PER_BATCH", 7)
    for name, part in module.features_of(run, rows).items():
        torch.testing.assert_close(part, whole[name], rtol=0, atol=1e-3)  # products round by batch size


def test_a_note_says_when_the_model_has_seen_the_held_out_episodes(known):
    config = known.info.config
    assert config.train.split == "episodes" and "note" not in state(known, 0)
    known.info = replace(known.info, config=replace(config, train=replace(config.train, split="clips")))
    assert "trained on clips of all episodes" in state(known, 0)["note"]


def test_data_without_a_state_are_refused(known, monkeypatch):
    monkeypatch.setattr(type(known.training.task), "state_columns", ((),))
    with pytest.raises(UserError, match="has no state, which state probes need"):
        state(known, 0)
