"""Models to convert: stable-worldmodel's LeWM with random weights, and one of ours."""

import json
import sys
from functools import partial
from importlib import import_module
from types import ModuleType

import pytest
import torch
from stable_worldmodel.wm.lewm import LeWM
from stable_worldmodel.wm.lewm.module import MLP, Embedder, Predictor
from torch import nn
from transformers import ViTConfig, ViTModel

from atlas_wm.config import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    DataInfo,
    EncoderConfig,
    ModelConfig,
    ObjectiveConfig,
    PredictorConfig,
    RunConfig,
    RunInfo,
)
from atlas_wm.errors import UserError
from atlas_wm.models.world_model import WorldModel
from atlas_wm.runs.model import save_model


def vit(width=192, depth=12, heads=3, mlp=768, patch=14, image=224) -> ViTModel:
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        intermediate_size=mlp,
        patch_size=patch,
        image_size=image,
    )
    return ViTModel(config, add_pooling_layer=False)


def lewm(encoder: ViTModel, *, latent=192, heads=16, dim_head=64, mlp=2048, depth=6, block=10) -> LeWM:
    """Random weights everywhere, also where training starts from 0 or 1, or nothing would be tested."""
    batchnorm = partial(MLP, hidden_dim=mlp, output_dim=latent, norm_fn=nn.BatchNorm1d)
    sizes = {"input_dim": latent, "hidden_dim": latent, "output_dim": latent, "mlp_dim": mlp}
    model = LeWM(
        encoder,
        Predictor(num_frames=3, depth=depth, heads=heads, dim_head=dim_head, **sizes),
        Embedder(input_dim=block, smoothed_dim=10, emb_dim=latent),
        projector=batchnorm(encoder.config.hidden_size),
        pred_proj=batchnorm(latent),
    )
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.endswith("running_var"):
                value.uniform_(0.5, 2)
            elif "num_batches" not in name and value.ndim < 2:
                value.add_(0.2 * torch.randn_like(value))
            elif value.ndim >= 2 and ("adaLN" in name or name.startswith(("encoder.", "action_encoder."))):
                value.normal_(std=0.08 if value.shape[1] > 64 else 0.3)  # they start at 0, or too small to matter
    return model.eval()


TINY_CONFIG = {
    "_target_": "stable_worldmodel.wm.lewm.LeWM",
    "encoder": {"_target_": "stable_pretraining.backbone.utils.vit_hf", "size": "tiny", "patch_size": 14},
    "predictor": {"num_frames": 3, "depth": 6, "heads": 16, "dim_head": 64, "mlp_dim": 2048, "input_dim": 192},
    "action_encoder": {"input_dim": 10, "smoothed_dim": 10, "emb_dim": 192, "mlp_scale": 4},
}


def save(weights, folder, config=TINY_CONFIG):
    folder.mkdir()
    torch.save(weights, folder / "weights.pt")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


SMALL_CONFIG = {"encoder": {"num_attention_heads": 2}, "predictor": {"heads": 2, "dim_head": 16}}


def normalised(frames):
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))
    return (frames / 255 - mean) / std


def largest_difference(ours, theirs) -> float:
    assert ours.shape == theirs.shape and theirs.std() > 0.05  # not a comparison of zeros
    return float((ours - theirs).abs().max())


def refusal(function, *arguments, **options) -> str:
    with pytest.raises(UserError) as refused:
        function(*arguments, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def own_run(folder, config: ModelConfig):
    torch.manual_seed(4)
    model = WorldModel(config, 2)
    data = DataInfo("nowhere.h5", "0" * 16, 1, 1, 1, 1)
    model.run = RunInfo("tworoom", "atlas", "demo", 2, RunConfig(config, ObjectiveConfig(wemreg=1.0)), data, "cpu")
    save_model(model, folder)
    return folder


OWN = ModelConfig(
    EncoderConfig(image_size=28, patch_size=7, width=56, depth=2, heads=4, mlp_ratio=1.5, positions="sincos"),
    PredictorConfig(width=32, depth=1, heads=2, head_dim=24, mlp=40),
    latent=32,
    hidden=24,
    action_smooth=6,
    action_hidden=96,
    history=2,
    frameskip=3,
)


def stand_in_for_hydra(monkeypatch):
    """hydra and stable-pretraining are not installed here: what load_pretrained calls of them, in a few lines."""

    def instantiate(node):
        if not isinstance(node, dict):
            return node
        arguments = {key: instantiate(value) for key, value in node.items() if key not in ("_target_", "_partial_")}
        module, _, name = node["_target_"].rpartition(".")
        target = getattr(import_module(module), name)
        return partial(target, **arguments) if node.get("_partial_") else target(**arguments)

    def vit_hf(size, patch_size, image_size, pretrained, use_mask_token):
        assert size == "tiny" and not pretrained and not use_mask_token
        return vit(patch=patch_size, image=image_size)

    for name, contents in {
        "hydra": {},
        "hydra.utils": {"instantiate": instantiate},
        "stable_pretraining": {},
        "stable_pretraining.backbone": {},
        "stable_pretraining.backbone.utils": {"vit_hf": vit_hf},
    }.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
