"""Fused kernels train a module only if it is the network they were written for."""

from dataclasses import replace

import pytest
import torch
from timm.layers import DropPath, LayerScale
from timm.models.vision_transformer import Block
from torch import nn

from atlas_wm.config import EncoderConfig
from atlas_wm.models.encoders import ViTEncoder
from atlas_wm.models.predictors import CausalPredictor
from atlas_wm.models.world_model import WorldModel
from atlas_wm.recipes import demo
from atlas_wm.train import agreement
from atlas_wm.train.step import fusable

pytest.importorskip("triton")
from atlas_wm.kernels import predictor as fused_predictor


@pytest.fixture
def model(monkeypatch):
    """As small as the kernels go: Triton's interpreter runs them here."""
    monkeypatch.setattr(agreement, "FRAMES", 1)
    monkeypatch.setattr(agreement, "CLIPS", 2)
    config = demo("atlas").model
    predictor = replace(config.predictor, width=32, depth=1, heads=2, head_dim=16, mlp=32, dropout=0.1)
    encoder = EncoderConfig(image_size=16, patch_size=8, width=16, depth=1, heads=1)
    torch.manual_seed(0)
    return WorldModel(replace(config, encoder=encoder, predictor=predictor), action_size=2).train()


class OwnForward(ViTEncoder):
    def forward(self, frames, blocks=()):
        return super().forward(255 - frames, blocks)


class OwnDynamics(CausalPredictor):
    def forward(self, z, embedded_actions):
        return 2 * super().forward(z, embedded_actions)


class OwnHead(CausalPredictor):
    """What it predicts beside is no matter of the kernels."""

    def __init__(self, config, action_chunk):
        super().__init__(config, action_chunk)
        self.reward = nn.Linear(config.latent, 1)


def swap(name, new):
    def change(model):
        *path, last = name.split(".")
        setattr(model.get_submodule(".".join(path)), last, new)

    return change


def hook(model):
    model.encoder.vit.blocks[0].mlp.register_forward_hook(lambda module, given, answer: 2 * answer)


BLOCK = "encoder.vit.blocks.0"
LAYER_SCALE = swap(f"{BLOCK}.ls1", LayerScale(16, init_values=0.5))
QK_NORM = swap(f"{BLOCK}.attn.q_norm", nn.LayerNorm(16))
CHANGES = {
    "qk norm": (QK_NORM, "blocks.0.attn.q_norm is LayerNorm, not Identity"),
    "layer scale": (LAYER_SCALE, "blocks.0.ls1 is LayerScale, not Identity"),
    "drop path": (swap(f"{BLOCK}.drop_path2", DropPath(0.1)), "blocks.0.drop_path2 is DropPath, not Identity"),
    "tanh": (swap(f"{BLOCK}.mlp.act.approximate", "tanh"), "blocks.0.mlp.act has (approximate='tanh'), not"),
    "eps": (swap(f"{BLOCK}.norm2.eps", 1e-3), "blocks.0.norm2 has ((16,), eps=0.001"),
    "norm": (swap(f"{BLOCK}.norm1", nn.RMSNorm(16)), "blocks.0.norm1 is RMSNorm, not LayerNorm"),
    "norm inside": (swap(f"{BLOCK}.mlp.norm", nn.LayerNorm(64)), "blocks.0.mlp.norm is LayerNorm, not Identity"),
    "heads": (swap(f"{BLOCK}.attn.num_heads", 2), "blocks.0.attn has another num_heads"),
    "scale": (swap(f"{BLOCK}.attn.scale", 1.0), "blocks.0.attn has another scale"),
    "gate": (swap(f"{BLOCK}.attn.gate", nn.Linear(16, 16)), "blocks.0.attn has other children"),
    "dropout": (swap(f"{BLOCK}.attn.proj_drop.p", 0.1), "blocks.0.attn.proj_drop has (p=0.1"),
    "dropout of positions": (swap("encoder.vit.pos_drop.p", 0.1), "pos_drop has (p=0.1"),
    "before the blocks": (swap("encoder.vit.norm_pre", nn.LayerNorm(16)), "norm_pre is LayerNorm, not Identity"),
    "registers": (swap("encoder.vit.reg_token", nn.Parameter(torch.zeros(1, 2, 16))), " has another reg_token"),
    "no bias": (
        swap(f"{BLOCK}.attn.proj.bias", None),
        "attn.proj has (in_features=16, out_features=16",
    ),
    "hook": (hook, "blocks.0.mlp has hooks"),
    "patched": (swap(f"{BLOCK}.forward", lambda x: x), "blocks.0 has a forward of its own"),
    "subclass": (lambda m: setattr(m, "encoder", OwnForward(m.config.encoder)), "OwnForward has a forward of its"),
    "stranger": (lambda m: setattr(m, "encoder", nn.Identity()), "Identity offers none"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_encoder_that_was_changed_is_not_fused(model, name):
    change, why = CHANGES[name]
    assert fusable(model)["encoder"] == ""
    change(model)
    assert why in fusable(model)["encoder"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (swap("predictor.blocks.0.mlp.activation", nn.ReLU()), "blocks.0.mlp.activation is ReLU, not GELU"),
        (swap("predictor.blocks.0.norm.eps", 1e-5), "blocks.0.norm has ((32,), eps=1e-05"),
        (swap("predictor.blocks.0.attention.dropout.p", 0.5), "blocks.0.attention.dropout has (p=0.5"),
        (swap("predictor.blocks.0.attention.heads", 4), "blocks.0.attention has another heads"),
        (
            lambda m: setattr(m, "predictor", OwnDynamics(*m.predictor.settings)),
            "OwnDynamics has a forward of its own",
        ),
        (lambda m: setattr(m, "predictor", OwnHead(*m.predictor.settings)), ""),
    ],
    ids=["activation", "eps", "dropout", "heads", "subclass", "one more head"],
)
def test_a_predictor_that_was_changed_is_not_fused(model, change, why):
    assert model.predictor.fused_obstacle() == ""
    change(model)
    found = model.predictor.fused_obstacle()
    assert found.startswith(why) if why else found == ""


def test_what_agrees_is_told_from_what_does_not(model, bf16_products, monkeypatch):
    """Gates that begin at zero hide nothing, dropout does not matter, and the model stays as it was."""
    before = {name: t.clone() for name, t in model.state_dict().items()}
    drawn = torch.get_rng_state()
    assert agreement.disagreement(model, "encoder") == ""
    assert agreement.disagreement(model, "predictor") == ""
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and all(m.training for m in model.modules())
    assert not model.encoder.fused and not model.predictor.fused

    swap("predictor.blocks.0.mlp.activation", nn.ReLU())(model)
    said = agreement.disagreement(model, "predictor")
    assert said.startswith("fused and plain differ by ") and "where bf16 explains 5.0e-02" in said


@pytest.mark.parametrize("change", [LAYER_SCALE, QK_NORM], ids=["layer scale", "qk norm"])
def test_an_encoder_that_computes_something_else_does_not_agree(model, bf16_products, change):
    change(model)
    assert agreement.encoder_difference(model).error > 3 * agreement.TOLERANCE


def test_a_block_that_was_patched_for_all_does_not_agree(model, bf16_products, monkeypatch):
    """Nothing of the module shows it."""
    plain = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, x, **options: plain(self, x, **options) - 0.5 * x)
    assert model.encoder.fused_obstacle() == ""
    assert agreement.disagreement(model, "encoder").startswith("fused and plain differ by ")


def test_kernels_that_fail_or_return_no_numbers_are_no_agreement(model, monkeypatch):
    def nothing(predictor, x, condition):
        return x * float("nan")

    monkeypatch.setattr(fused_predictor, "fused_blocks", nothing)
    assert "differ by inf in " in agreement.disagreement(model, "predictor")
    monkeypatch.delattr(fused_predictor, "fused_blocks")
    assert agreement.disagreement(model, "predictor").startswith("ImportError: cannot import name 'fused_blocks'")
