"""Models on the Hugging Face hub, with the hub replaced: nothing here needs a network."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from atlas_wm.errors import UserError
from atlas_wm.models.temporal_head import TemporalHead
from atlas_wm.models.world_model import WorldModel
from atlas_wm.rng import make_rng
from atlas_wm.runs.model import load_model, push_to_hub, save_model

FILES = {"config.json", "model.safetensors", "normalizer.json", "bank.safetensors", "states.safetensors"}
FILES |= {"demonstrations.safetensors", "temporal_head.safetensors"}


@pytest.fixture(scope="module")
def run_folder(run_folder):
    """With a temporal head, which training does not write."""
    model = load_model(run_folder)
    model.temporal_head = TemporalHead.initial(model.bank.points, make_rng(0))
    save_model(model, run_folder)
    return run_folder


def same(one: WorldModel, other: WorldModel) -> bool:
    weights = other.state_dict()
    equal = all(torch.equal(tensor, weights[name]) for name, tensor in one.state_dict().items())
    banks = [model.bank and (model.bank.points.tolist(), model.bank.novelty.tolist()) for model in (one, other)]
    shown = [
        model.demonstrations and [t.tolist() for t in vars(model.demonstrations).values()] for model in (one, other)
    ]
    equal = equal and shown[0] == shown[1]
    heads = [vars(model.temporal_head) if model.temporal_head else {} for model in (one, other)]
    equal = equal and heads[0].keys() == heads[1].keys()
    equal = equal and all(torch.equal(tensor, heads[1][name]) for name, tensor in heads[0].items())
    return equal and banks[0] == banks[1] and one.normalizer == other.normalizer and one.config == other.config


def test_a_saved_model_is_loaded_again(run_folder, tmp_path):
    model = load_model(str(run_folder))
    save_model(model, tmp_path / "a" / "b")
    assert {p.name for p in (tmp_path / "a" / "b").iterdir()} == FILES
    again = load_model(tmp_path / "a" / "b")
    assert same(model, again) and again.run == model.run and not again.training


def test_a_model_without_a_run_is_not_saved(demo_model, tmp_path):
    with pytest.raises(UserError, match="trained or loaded"):
        save_model(demo_model, tmp_path)


def test_exactly_the_files_of_a_model_are_fetched(run_folder, tmp_path, monkeypatch):
    asked = []

    def snapshot_download(repo_id, *, revision, allow_patterns):
        asked.append((repo_id, revision, set(allow_patterns)))
        for name in allow_patterns:
            shutil.copy(run_folder / name, tmp_path)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    model = load_model("someone/tworoom", revision="v2")
    assert asked == [("someone/tworoom", "v2", FILES)]
    assert same(model, load_model(run_folder))


@pytest.mark.parametrize(
    "error", [LocalEntryNotFoundError("no\nnetwork"), HFValidationError("bad name"), ConnectionError("refused")]
)
def test_what_the_hub_says_becomes_one_line(error, run_folder, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", fail)
    with pytest.raises(UserError) as fetched:
        load_model("someone/missing")
    with pytest.raises(UserError) as pushed:
        push_to_hub(load_model(run_folder), "someone/missing")
    for refused in (fetched, pushed):
        said = str(refused.value)
        assert "someone/missing" in said and type(error).__name__ in said and "network" in said and "\n" not in said


def test_a_model_is_pushed_with_a_card_and_comes_back(run_folder, tmp_path, monkeypatch):
    created = []

    def create_repo(self, repo_id, *, private, exist_ok):
        created.append((repo_id, private, exist_ok))
        return f"https://huggingface.co/{repo_id}"

    def upload_folder(self, *, repo_id, folder_path, allow_patterns):
        assert {p.name for p in Path(folder_path).iterdir()} == set(allow_patterns)
        shutil.copytree(folder_path, tmp_path / repo_id)

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload_folder)
    model = load_model(run_folder)
    assert push_to_hub(model, "someone/tworoom", private=True) == "https://huggingface.co/someone/tworoom"
    assert created == [("someone/tworoom", True, True)]
    repo = tmp_path / "someone" / "tworoom"
    assert {p.name for p in repo.iterdir()} == FILES | {"README.md"}
    assert 'load_model("someone/tworoom")' in (repo / "README.md").read_text()
    assert same(model, load_model(repo))
    assert (
        json.loads((repo / "config.json").read_text())["data"]["path"] == "tworoom.h5"
    )  # no folder of this machine
    assert model.run is not None and model.run.data.path != "tworoom.h5"
