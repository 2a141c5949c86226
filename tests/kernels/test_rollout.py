"""The fast way to the ends of action sequences gives the numbers of the plain one."""

from dataclasses import replace

import pytest
import torch

from atlas_wm.kernels.rollout import FastTerminal, PackedProduct
from atlas_wm.models.world_model import WorldModel
from atlas_wm.recipes import demo, paper
from atlas_wm.rng import make_rng


def random_everything(model: WorldModel) -> WorldModel:
    """No weight at a value (0, 1) that would hide a mistake, BatchNorm's statistics included."""
    draw = make_rng(0)
    for name, tensor in model.predictor.state_dict().items():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=draw)
            scale = tensor.shape[1] ** -0.5 if tensor.ndim == 2 else 1.0
            tensor.copy_(noise.abs() + 0.5 if "running_var" in name else noise * scale)
    return model.eval()


@pytest.fixture(scope="module", params=[demo, paper], ids=["demo", "paper"])
def model(request):
    return random_everything(WorldModel(request.param("atlas").model, action_size=2))


@pytest.mark.parametrize("horizon", [1, 2, 3, 4, 5, 7])
def test_ends_are_those_of_the_plain_rollout(model, horizon):
    z = torch.randn(3, model.config.latent, generator=make_rng(1))
    actions = torch.randn(3, 4, horizon, 10, generator=make_rng(2))
    with torch.inference_mode():
        plain, fast = model.terminal(z, actions), FastTerminal(model.predictor)(z, actions)
        packed = FastTerminal(model.predictor, pack=PackedProduct.supported())(z, actions)
    assert plain.std(dim=1).mean() > 0.05  # actions matter
    torch.testing.assert_close(fast, plain, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(packed, plain, atol=2e-5, rtol=1e-4)


def test_other_histories():
    for history in (1, 2, 4):
        model = random_everything(WorldModel(replace(demo("atlas").model, history=history), action_size=2))
        z, actions = torch.randn(2, 32, generator=make_rng(1)), torch.randn(2, 3, 5, 10, generator=make_rng(2))
        with torch.inference_mode():
            torch.testing.assert_close(
                FastTerminal(model.predictor)(z, actions), model.terminal(z, actions), atol=2e-5, rtol=1e-4
            )


def test_gradients_reach_the_actions(model):
    """Gradient planners go through it too."""
    z = torch.randn(1, model.config.latent, generator=make_rng(1))
    actions = torch.randn(1, 2, 5, 10, generator=make_rng(2)).requires_grad_()
    expected = torch.autograd.grad(model.terminal(z, actions).square().sum(), actions)[0]
    gradient = torch.autograd.grad(FastTerminal(model.predictor)(z, actions).square().sum(), actions)[0]
    torch.testing.assert_close(gradient, expected, atol=1e-3, rtol=1e-3)


def test_bf16_stays_close(model):
    z = torch.randn(2, model.config.latent, generator=make_rng(1))
    actions = torch.randn(2, 8, 5, 10, generator=make_rng(2))
    with torch.inference_mode():
        exact = FastTerminal(model.predictor)(z, actions)
        rough = FastTerminal(model.predictor, torch.bfloat16)(z, actions)
    assert rough.dtype == torch.float32
    assert (rough - exact).norm() < 0.05 * exact.norm()
