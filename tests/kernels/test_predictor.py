"""The fused predictor is the plain one: same answers, same gradients. Triton's interpreter runs its kernels."""

from dataclasses import replace

import pytest
import torch

from atlas_wm.kernels import predictor_triton as kernels
from atlas_wm.kernels.predictor import fused_blocks, supports
from atlas_wm.models.predictors import CausalPredictor
from atlas_wm.recipes import demo, paper
from atlas_wm.rng import make_rng


def small_predictor(dropout: float = 0.0) -> CausalPredictor:
    """A width that is no power of two, and weights that are nowhere zero."""
    config = demo("atlas").model
    size = replace(config.predictor, width=24, depth=2, heads=2, head_dim=16, mlp=40, dropout=dropout)
    torch.manual_seed(0)
    predictor = CausalPredictor(replace(config, latent=24, predictor=size), action_chunk=10).train()
    for parameter in predictor.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return predictor


def plain_blocks(predictor, x, condition):
    for block in predictor.blocks:
        x = block(x, condition)
    return predictor.norm(x)


@pytest.mark.parametrize("tokens", [3, 1])
def test_answers_and_all_gradients_are_those_of_the_plain_predictor(tokens):
    predictor = small_predictor()
    x, condition = (torch.randn(5, tokens, 24, generator=make_rng(i)).requires_grad_() for i in range(2))
    weights = torch.randn(5, tokens, 24, generator=make_rng(2))
    taught = [*predictor.blocks.parameters(), *predictor.norm.parameters()]
    answers = [plain_blocks(predictor, x, condition), fused_blocks(predictor, x, condition, torch.float32)]
    torch.testing.assert_close(*answers, atol=1e-5, rtol=1e-5)
    plain, fused = (torch.autograd.grad((y.sin() * weights).sum(), [x, condition, *taught]) for y in answers)
    for got, expected in zip(fused, plain, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-4)


def test_with_dropout_the_gradients_are_those_of_what_was_drawn():
    predictor = small_predictor(dropout=0.3)
    x, condition = (torch.randn(4, 3, 24, generator=make_rng(i)).requires_grad_() for i in range(2))
    places = [x, condition, *predictor.blocks.parameters(), *predictor.norm.parameters()]
    way = [torch.randn(t.shape, generator=make_rng(9, i)) for i, t in enumerate(places)]

    def loss() -> torch.Tensor:
        torch.manual_seed(5)  # always the same draw
        return fused_blocks(predictor, x, condition, torch.float32).sin().sum()

    def loss_after(step: float) -> torch.Tensor:
        """Along the way."""
        with torch.no_grad():
            for place, direction in zip(places, way, strict=True):
                place += step * direction
            return loss()

    gradients = torch.autograd.grad(loss(), places)
    slope = sum((g * w).sum() for g, w in zip(gradients, way, strict=True))
    measured = (loss_after(1e-3) - loss_after(-2e-3)) / 2e-3
    torch.testing.assert_close(slope, measured, rtol=2e-3, atol=1e-3)
    torch.manual_seed(6)
    other = fused_blocks(predictor, x, condition, torch.float32).sin().sum()
    assert abs(other - loss()) > 0.01  # another draw


def test_dropout_drops_its_share_and_every_place_has_its_own_draw():
    x, dropout = torch.full((100, 100), 8.0), kernels.Dropout(torch.tensor([77]), 0.25)

    def drawn(place: int) -> torch.Tensor:
        out = torch.empty_like(x)
        kernels.gelu(x, out, dropout, place)
        return out

    first = drawn(1)
    assert torch.equal(first, drawn(1))
    assert ((first == 0) | (first - 8 / 0.75).abs().lt(1e-5)).all()
    assert abs((first == 0).float().mean() - 0.25) < 0.02  # five standard errors
    both = ((first == 0) & (drawn(2) == 0)).float().mean()
    assert abs(both - 0.25**2) < 0.012


def test_shapes_that_do_not_fit_are_left_to_the_plain_predictor():
    model = paper("atlas").model
    assert supports(model)
    assert not supports(replace(model, predictor=replace(model.predictor, head_dim=48)))
    assert not supports(paper("dino-wm").model)
