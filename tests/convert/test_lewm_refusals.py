"""What cannot be converted is refused in one line that says why, and nothing is left behind."""

import os
import pickle
from dataclasses import replace

import pytest
import torch
from lewm_models import OWN, SMALL_CONFIG, own_run, refusal, save

from atlas_wm.convert.lewm import export_lewm, import_lewm, new_name
from atlas_wm.convert.lewm_config import obstacle
from atlas_wm.recipes import demo, paper

QKV = "predictor.transformer.layers.0.attn.to_qkv.weight"
PATCH = "encoder.embeddings.patch_embeddings.projection.weight"


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_file_that_is_more_than_tensors_is_refused(small, task, dataset_path, tmp_path):
    trap = tmp_path / "executed"
    for contents in (
        {**small.state_dict(), "extra": Hostile(trap)},
        Hostile(trap),
        small,
        {"epoch": 3, "state_dict": small.state_dict()},
        [torch.zeros(3)],
    ):
        torch.save(contents, tmp_path / "weights.pt")
        said = refusal(import_lewm, tmp_path, task, dataset_path, tmp_path / "run")
        assert "weights.pt is refused" in said and "named tensors" in said
    for contents in (pickle.dumps({"a": Hostile(trap)}), b"nothing", b""):
        (tmp_path / "weights.pt").write_bytes(contents)
        assert "is refused" in refusal(import_lewm, tmp_path, task, dataset_path, tmp_path / "run")
    assert not trap.exists() and not (tmp_path / "run").exists()
    pickle.loads(pickle.dumps(Hostile(trap)))
    assert trap.exists()  # so it would have been seen
    os.unlink(tmp_path / "weights.pt")
    assert "there is no file" in refusal(import_lewm, tmp_path, task, dataset_path, tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder.layernorm.weight": None}, "missing: encoder.layernorm.weight"),
        ({"predictor.pos_embedding": None}, "missing: predictor.pos_embedding"),
        ({"probe.weight": torch.zeros(1)}, "unexpected: probe.weight"),
        ({"pred_proj.net.0.weight": torch.zeros(47, 32)}, "pred_proj.net.0.weight (47, 32) instead of (48, 32)"),
        ({"predictor.pos_embedding": torch.zeros(3)}, "of wrong shape: predictor.pos_embedding (3,)"),
        (
            {"action_encoder.patch_embed.weight": torch.zeros(10, 9, 1)},
            "action chunk has 9 numbers",
        ),
        ({"encoder.embeddings.position_embeddings": torch.zeros(1, 13, 64)}, "which make no square image"),
        ({"encoder.encoder.layer.0.intermediate.dense.bias": torch.zeros(1)}, "twice"),
        ({"predictor.pos_embedding": torch.zeros(1, 3, 40)}, "a predictor 32 wide for latents of 40"),
        ({QKV: torch.zeros(95, 32)}, f"{QKV} (95, 32) holds queries, keys and values of 31 channels"),
        ({QKV: torch.zeros(98, 32)}, "which are not 2 heads of 16"),
        ({PATCH: torch.zeros(65, 3, 4, 4)}, "encoder.width 65 is not divisible by encoder.heads 2"),
        ({PATCH: torch.zeros(64, 3, 4, 2000)}, "encoder.image_size must lie between"),
        ({"encoder.layers.0.mlp.fc1.weight": torch.zeros(70_000, 64)}, "encoder.mlp_ratio must lie between"),
        ({"predictor.pos_embedding": torch.zeros(1, 3000, 32)}, "model.history must lie between"),
        ({"action_encoder.patch_embed.weight": torch.zeros(10, 10_000, 1)}, "model.frameskip must lie between"),
        ({"encoder.layernorm.weight": torch.ones(64, dtype=torch.int64)}, "encoder.layernorm.weight (int64)"),
        ({QKV: torch.ones(96, 32, dtype=torch.bool)}, f"not floating-point: {QKV} (bool)"),
    ],
)
def test_what_does_not_fit_is_named(change, message, small, task, dataset_path, tmp_path):
    weights = {new_name(name): tensor for name, tensor in small.state_dict().items()} | change
    weights = {name: tensor for name, tensor in weights.items() if tensor is not None}
    folder = save(weights, tmp_path / "x", SMALL_CONFIG)
    said = refusal(import_lewm, folder, task, dataset_path, tmp_path / "run")
    assert message in said and "weights.pt" in said and new_name(next(iter(change))) in said
    assert not (tmp_path / "run").exists() and not (tmp_path / "run.partial").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "32 channels each, which are not 1 heads of 64"),
        ({"predictor": {"heads": 3, "dim_head": 16}}, "32 channels each, which are not 3 heads of 16"),
        (
            {"predictor": {"heads": "two", "dim_head": 16}},
            "heads in its config.json must be a positive int",
        ),
        ({**SMALL_CONFIG, "encoder": {"num_attention_heads": 5}}, "not divisible by encoder.heads 5"),
        ({"predictor": 3}, "predictor must be an object"),
        ([], "encoder must be an object"),
    ],
)
def test_settings_that_contradict_the_weights_are_named(config, message, small, task, dataset_path, tmp_path):
    folder = save(small.state_dict(), tmp_path / "x", config)
    assert message in refusal(import_lewm, folder, task, dataset_path, tmp_path / "run")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (paper("dino-wm").model, "its encoder is of kind dinov2, LeWM's is a ViT"),
        (paper("fast-wm").model, "kind prefix, LeWM's is causal"),
        (demo("lewm").model, "predictor is 64 wide and its latent 32"),
        (replace(OWN, action_hidden=100), "no multiple"),
        (replace(OWN, predictor=replace(OWN.predictor, heads=1, head_dim=32)), "one head as wide as itself"),
        (replace(OWN, inverse_hidden=8), "inverse-dynamics head"),
        (replace(OWN, encoder=replace(OWN.encoder, pixel_mean=(0.5, 0.5, 0.5))), "ImageNet"),
    ],
)
def test_what_lewm_cannot_hold(config, message):
    assert message in (obstacle(config) or "")


def test_an_export_that_cannot_be_leaves_nothing(run_folder, tmp_path):
    said = refusal(export_lewm, run_folder, tmp_path / "out")
    assert str(run_folder) in said and "does not fit LeWM's architecture" in said
    assert list(tmp_path.iterdir()) == []
    own_run(tmp_path / "run", OWN)
    (tmp_path / "out").mkdir()
    assert "--overwrite" in refusal(export_lewm, tmp_path / "run", tmp_path / "out")
    export_lewm(tmp_path / "run", tmp_path / "out", overwrite=True)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "weights.pt"]


def test_paper_runs_of_every_lewm_shaped_method_can_be_exported():
    for method in ("atlas", "lewm", "lewm+ood", "wemreg", "pldm"):
        assert obstacle(paper(method).model) is None
