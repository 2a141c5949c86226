"""A LeWM of stable-worldmodel, imported, is the same function; exported, it is the same file."""

import json
import re
from dataclasses import replace

import pytest
import torch
from lewm_models import (
    OWN,
    SMALL_CONFIG,
    LeWM,
    largest_difference,
    lewm,
    normalised,
    own_run,
    save,
    stand_in_for_hydra,
    vit,
)

from atlas_wm.cli.app import main
from atlas_wm.convert.lewm import export_lewm, import_lewm, new_name, old_name
from atlas_wm.data.training_set import open_training_set
from atlas_wm.models.bank import LatentBank
from atlas_wm.recipes import paper
from atlas_wm.runs.folder import read_run
from atlas_wm.runs.model import load_model, save_bank, save_demonstrations

TOLERANCE = 1e-4  # in float32; the numbers are of the order of 1


@pytest.mark.slow
@torch.no_grad()
def test_an_imported_model_is_the_same_function(theirs, imported):
    ours = load_model(imported)
    torch.manual_seed(3)
    frames = torch.randint(0, 256, (4, 3, 224, 224), dtype=torch.uint8)
    pixels = normalised(frames)
    z = ours.encode(frames)
    their_z = theirs.encode({"pixels": pixels[None]})["emb"][0]
    differences = {"latents": largest_difference(z, their_z)}
    assert largest_difference(z[0], z[1]) > 0.05  # the image matters

    actions = torch.randn(2, 3, 10)
    clips = torch.randn(2, 3, 192)
    predicted = theirs.predict(clips, theirs.action_encoder(actions))
    differences["predictions"] = largest_difference(ours.predict(clips, actions), predicted)
    assert largest_difference(ours.predict(clips, 0 * actions), predicted) > 0.05  # the actions matter

    plans = torch.randn(1, 4, 5, 10)
    start, goal = (pixels[i].expand(1, 4, 1, 3, 224, 224) for i in (0, 1))
    info = theirs.rollout({"pixels": start}, plans)
    differences["rollouts"] = largest_difference(ours.rollout(z[:1], plans), info["predicted_emb"][:, :, 1:])
    costs = theirs.get_cost({"pixels": start, "goal": goal, "action": plans[:, :, :1]}, plans)
    differences["costs"] = largest_difference(ours.distance(ours.terminal(z[:1], plans), z[1]), costs)
    assert max(differences.values()) <= TOLERANCE, differences


def test_the_imported_run_says_what_it_is(imported, dataset_path, task, run_folder):
    info, normalizer = read_run(imported)
    assert (info.method, info.recipe, info.task, info.action_size) == ("lewm", "imported", "tworoom", 2)
    wanted = paper("lewm").model
    assert info.config.model == replace(wanted, encoder=replace(wanted.encoder, norm_eps=1e-12))
    assert info.data.hash == read_run(run_folder)[0].data.hash
    assert normalizer.mean == pytest.approx(read_run(run_folder)[1].mean, abs=0.05)  # another split, the same data
    assert (normalizer.low, normalizer.high) == ((-1.0, -1.0), (1.0, 1.0))  # of the task: a checkpoint has none


@torch.no_grad()
def test_an_imported_run_has_a_bank_of_training_frames(imported, dataset_path, task):
    model = load_model(imported)
    first = next(open_training_set(dataset_path, task, read_run(imported)[0].config).sample_frames())
    assert model.bank is not None and len(model.bank.points) == 60
    torch.testing.assert_close(model.bank.points[: len(first)], model.encode(first), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("names", ["installed", "new", "old"])
def test_an_export_is_the_file_that_was_imported(names, theirs, imported, tmp_path):
    export_lewm(imported, tmp_path / "out", names=names)
    weights = torch.load(tmp_path / "out" / "weights.pt", weights_only=True)
    wanted = theirs.state_dict()
    if names != "installed":
        rename = {"old": old_name, "new": new_name}[names]
        wanted = {rename(name): tensor for name, tensor in wanted.items()}
    assert weights.keys() == wanted.keys()
    assert all(
        torch.equal(weights[name], wanted[name]) and weights[name].dtype == wanted[name].dtype for name in wanted
    )
    if names == "installed":
        lewm(vit()).load_state_dict(weights, strict=True)


def test_published_names(theirs):
    """Those of transformers before it renamed the ViT's layers, written out."""
    old = {old_name(new_name(name)) for name in theirs.state_dict()}
    in_layer = {
        *("attention.attention.query", "attention.attention.key", "attention.attention.value"),
        *("attention.output.dense", "intermediate.dense", "output.dense", "layernorm_before", "layernorm_after"),
    }
    layers = {
        f"encoder.encoder.layer.{n}.{part}.{leaf}"
        for n in range(12)
        for part in in_layer
        for leaf in ("weight", "bias")
    }
    assert {name for name in old if re.search(r"^encoder\..*\d", name)} == layers
    assert "encoder.embeddings.patch_embeddings.projection.weight" in old and "encoder.layernorm.bias" in old
    assert {new_name(name) for name in old} == {new_name(name) for name in theirs.state_dict()}


def test_old_names_mixed_with_new_ones_and_unused_parts(small, task, dataset_path, tmp_path):
    """Half precision, the .pt file itself, and what a Hugging Face ViT may carry along without using it."""
    mixed = {
        (old_name if "fc" in name or "layers.1" in name else str)(new_name(name)): tensor.half()
        if tensor.is_floating_point()
        else tensor
        for name, tensor in small.state_dict().items()
    }
    mixed |= {"encoder.pooler.dense.weight": torch.zeros(64, 64), "encoder.embeddings.mask_token": torch.zeros(1)}
    folder = save(mixed, tmp_path / "x", SMALL_CONFIG)
    ours = load_model(import_lewm(folder / "weights.pt", task, dataset_path, tmp_path / "run"))
    assert ours.encoder.vit.blocks[1].mlp.fc1.weight.dtype == torch.float32
    frames = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    with torch.no_grad():
        wanted = small.encode({"pixels": normalised(frames)[None]})["emb"][0]
        assert largest_difference(ours.encode(frames), wanted) < 0.02  # half precision


def test_their_loader_makes_the_model_from_an_export(theirs, imported, tmp_path, monkeypatch):
    from stable_worldmodel.wm.utils import load_pretrained

    stand_in_for_hydra(monkeypatch)
    export_lewm(imported, tmp_path / "checkpoints" / "tiny")
    config = json.loads((tmp_path / "checkpoints" / "tiny" / "config.json").read_text())
    assert config["encoder"]["_target_"] == "stable_pretraining.backbone.utils.vit_hf"
    loaded = load_pretrained("tiny", cache_dir=tmp_path)
    assert isinstance(loaded, LeWM) and loaded.predictor.num_frames == 3
    wanted = theirs.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in loaded.state_dict().items())


@torch.no_grad()
def test_our_own_model_there_and_back(task, dataset_path, tmp_path, monkeypatch):
    from stable_worldmodel.wm.utils import load_pretrained

    stand_in_for_hydra(monkeypatch)
    run = own_run(tmp_path / "run", OWN)
    main(["export", str(run), "--format", "lewm", "--out", str(tmp_path / "checkpoints" / "own")])
    ours = load_model(run)
    loaded = load_pretrained("own", cache_dir=tmp_path).eval()
    frames = torch.randint(0, 256, (3, 3, 28, 28), dtype=torch.uint8)
    z = loaded.encode({"pixels": normalised(frames)[None]})["emb"][0]
    assert largest_difference(ours.encode(frames), z) < 1e-5

    back = tmp_path / "back"
    flags = ["--task", "tworoom", "--data", str(dataset_path), "--out", str(back)]
    main(["import", str(tmp_path / "checkpoints" / "own"), "--format", "lewm", *flags])
    again = load_model(back)
    # How the positions started is not in a checkpoint.
    assert again.config == replace(OWN, encoder=replace(OWN.encoder, positions="random"))
    assert all(torch.equal(tensor, ours.state_dict()[name]) for name, tensor in again.state_dict().items())


def test_an_export_says_what_stays_behind(tmp_path, caplog):
    run = own_run(tmp_path / "run", OWN)
    main(["export", str(run), "--out", str(tmp_path / "bare")])
    assert "not exported" not in caplog.text
    model = load_model(run)
    save_bank(LatentBank.of([torch.randn(60, 32)]), run)
    model.build_demonstrations([(torch.zeros(6, 3, 28, 28, dtype=torch.uint8), torch.zeros(6, 6), 0)])
    save_demonstrations(model.demonstrations, run)
    main(["export", str(run), "--out", str(tmp_path / "out")])
    assert "not exported, as LeWM's format has no place for them: bank, demonstrations\n" in caplog.text
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"weights.pt", "config.json"}


def test_without_settings_heads_are_64_wide(theirs, task, dataset_path, tmp_path, small_banks):
    torch.save(theirs.state_dict(), tmp_path / "epoch_3.pt")
    config = read_run(import_lewm(tmp_path / "epoch_3.pt", task, dataset_path, tmp_path / "run"))[0].config.model
    assert (config.encoder.heads, config.predictor.heads, config.predictor.head_dim) == (3, 16, 64)
