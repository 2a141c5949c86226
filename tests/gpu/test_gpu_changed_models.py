"""A model that was changed (qk-norm in the encoder, its own predictor) is trained and planned with as it is."""

import pytest
import torch
from on_device import (
    BF16,
    DEVICE,
    FLOAT32,
    clips,
    config_of,
    images,
    random_model,
    relative_error,
    step_of,
    updates,
)
from torch import nn

from atlas_wm.models.predictors import CausalPredictor
from atlas_wm.plan.planner import Planner
from atlas_wm.rng import make_rng
from atlas_wm.train.step import WARM_UP


class Shifted(CausalPredictor):
    """Another function than the one it inherits."""

    def forward(self, z, embedded_actions):
        return super().forward(z, embedded_actions) + 3 * torch.tanh(embedded_actions)


def with_qk_norm(model):
    for block in model.encoder.vit.blocks:
        for name in ("q_norm", "k_norm"):
            norm = nn.LayerNorm(block.attn.head_dim)
            nn.init.constant_(norm.weight, 2.0)
            setattr(block.attn, name, norm.to(DEVICE))
    return model


def with_layer_scale(model):
    class Half(nn.Module):
        def forward(self, x):
            return 0.5 * x

    for block in model.encoder.vit.blocks:
        block.ls1 = Half()
    return model


def with_own_predictor(model):
    model.predictor.__class__ = Shifted
    return model


CHANGES = [with_qk_norm, with_layer_scale, with_own_predictor]


@pytest.mark.parametrize("change", CHANGES)
def test_it_is_trained_as_it_is(change):
    """Every gradient of the plain step is there, and as near to float32 as its own."""
    found = []
    for precision, plain in ((FLOAT32, True), (BF16, True), (BF16, False)):
        config = config_of(precision, clip=1e6)
        model = change(random_model(config))
        batches = clips(config, 1, 64) * (WARM_UP + 2)
        *_, last = updates(step_of(model, config, plain=plain), model, batches, 0.0, same_directions=True)
        found.append(last)
    exact, autocast, captured = found
    assert captured.numbers[:-1] == pytest.approx(autocast.numbers[:-1], rel=2e-2, abs=1e-3)
    allowed = 2 * relative_error(autocast.gradients, exact.gradients)
    assert relative_error(captured.gradients, exact.gradients) < allowed < 0.25


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, None], ids=["float32", "bf16"])
@torch.inference_mode()
def test_it_is_planned_with_as_it_is(change, dtype):
    """What a plan says it costs is what the model says of its actions."""
    config = config_of(FLOAT32)
    model = change(random_model(config)).eval()
    size = model.config.encoder.image_size
    frames, goals = images(3, size, seed=1), images(3, size, seed=2)
    plans = Planner(model, config.plan, dtype=dtype).plan_batch(frames, goals, [make_rng(e) for e in range(3)])
    actions = torch.stack([model.normalizer.apply(torch.from_numpy(p.actions)) for p in plans])
    blocks = actions.to(DEVICE).unflatten(1, (config.plan.horizon, -1)).flatten(2)
    ends = model.terminal(model.encode(frames), blocks[:, None])[:, 0]
    costs = model.distance(ends, model.encode(goals))
    torch.testing.assert_close(torch.tensor([p.cost for p in plans]), costs.cpu(), rtol=2e-3, atol=1e-3)
