"""PLDM's terms: equal to the published ones, and right where the answer is known."""

import pytest
import torch
from stable_worldmodel.wm.loss import PLDMLoss

from atlas_wm.config import EncoderConfig, ModelConfig, ObjectiveConfig, PredictorConfig, RunConfig
from atlas_wm.errors import UserError
from atlas_wm.losses import ClipLatents, objective
from atlas_wm.losses.variance import centred, cov, std, temporal
from atlas_wm.methods import METHODS
from atlas_wm.models.world_model import WorldModel
from atlas_wm.rng import make_rng

PUBLISHED = {
    "std": "std_loss",
    "std_t": "std_t_loss",
    "cov": "cov_loss",
    "cov_t": "cov_t_loss",
    "temporal": "temp_align_loss",
    "inverse": "idm_loss",
}
ALL = ObjectiveConfig(prediction=0.0, **dict.fromkeys(PUBLISHED, 1.0))
SMALL = ModelConfig(
    EncoderConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2),
    PredictorConfig(width=8, depth=1, heads=2, head_dim=4, mlp=8),
    latent=6,
    hidden=8,
    action_hidden=8,
    inverse_hidden=7,
)


def latents(b, t, d, seed=0):
    """Steps and coordinates of different scale, position and correlation: a wrong axis would show."""
    draw = make_rng(seed)
    mixed = torch.randn(b, t, d, generator=draw) @ torch.randn(d, d, generator=draw) / d**0.5
    return mixed * torch.linspace(0.2, 1.5, t)[:, None] + torch.linspace(-2, 2, d)


def clip(z, inverse=None):
    b, t = z.shape[:2]
    actions = torch.randn(b, t - 1, 3, generator=make_rng(9))
    inverse = torch.randn(b, t - 1, 3, generator=make_rng(10)) if inverse is None else inverse
    return ClipLatents(z, z, z[:, 1:], actions, inverse)


@pytest.mark.parametrize(("b", "t", "d"), [(2, 2, 2), (7, 4, 5), (3, 6, 24), (64, 4, 192)])
def test_every_term_equals_the_published_one(b, t, d):
    clips = clip(latents(b, t, d))
    expected = PLDMLoss()(clips.z, clips.inverse, clips.actions)
    terms = objective(clips, ALL).terms
    assert set(terms) == set(PUBLISHED)
    for name, theirs in PUBLISHED.items():
        torch.testing.assert_close(terms[name], expected[theirs], atol=1e-5, rtol=1e-5, msg=name)


def test_the_table_has_the_weights_of_pldm():
    weights = METHODS["pldm"].objective
    assert [getattr(weights, name) for name in PUBLISHED] == [18.0, 0.7, 12.0, 0.0, 0.2, 0.0]
    assert set(weights.weights) == {"prediction", "std", "std_t", "cov", "temporal"}


@pytest.mark.parametrize(
    ("deviation", "cost"), [(0.0, 0.99), (0.5, 1 - (0.25 + 1e-4) ** 0.5), (1.0, 0.0), (30.0, 0.0)]
)
def test_a_collapsed_coordinate_costs_nearly_one_and_a_spread_one_nothing(deviation, cost):
    signs = torch.tensor([-1.0, 1.0]).repeat(4)[:, None, None].expand(8, 3, 5)
    assert std(deviation * (7 / 8) ** 0.5 * signs).item() == pytest.approx(cost, abs=1e-6)


def test_decorrelated_coordinates_cost_nothing_and_copies_their_variance_squared():
    signs = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])[:, None]
    assert cov(signs) == 0
    copies = signs[..., :1].repeat(1, 1, 5)  # every entry of C is 4/3
    assert cov(copies).item() == pytest.approx((4 / 3) ** 2, rel=1e-6)


def test_standing_still_costs_nothing_and_a_step_its_square():
    assert temporal(torch.ones(4, 3, 2)) == 0
    assert temporal(torch.arange(3.0)[None, :, None].repeat(4, 1, 2) * 3) == 9


def test_where_the_batch_lies_does_not_matter():
    z = latents(16, 4, 5)
    torch.testing.assert_close(centred(z + 100), centred(z), atol=1e-4, rtol=0)


@pytest.mark.parametrize("z", [torch.zeros(6, 4, 5), latents(6, 4, 5)], ids=["collapsed", "random"])
def test_gradients_are_finite(z):
    z = z.clone().requires_grad_()
    objective(clip(z), ALL).total.backward()
    assert z.grad.isfinite().all()


def test_half_precision_latents_are_judged_in_float32():
    z = latents(16, 4, 8).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        terms = objective(clip(z), ALL).terms
    expected = PLDMLoss()(z.float())
    for name in ("std", "std_t", "cov", "cov_t", "temporal"):
        assert terms[name].dtype == torch.float32
        torch.testing.assert_close(terms[name], expected[PUBLISHED[name]], atol=1e-5, rtol=1e-5, msg=name)


def test_the_inverse_head_tells_the_action_from_the_two_latents_around_it():
    torch.manual_seed(0)
    model = WorldModel(SMALL, action_size=1).eval()
    frames = torch.randint(0, 256, (3, 4, 3, 8, 8), generator=make_rng(0), dtype=torch.uint8)
    actions = torch.randn(3, 3, 5, generator=make_rng(1))
    clips = model(frames, actions)
    for t in range(3):
        predicted = model.inverse(torch.cat([clips.z[:, t + 1], clips.z[:, t]], dim=-1))
        torch.testing.assert_close(clips.inverse[:, t], predicted)
    term = objective(clips, ObjectiveConfig(inverse=1.0)).terms["inverse"]
    torch.testing.assert_close(term, PLDMLoss()(clips.z, clips.inverse, actions)["idm_loss"])
    term.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.inverse.parameters())
    assert model.encoder.vit.patch_embed.proj.weight.grad.abs().sum() > 0


def test_the_inverse_term_without_its_head_is_refused():
    with pytest.raises(UserError, match=r"objective\.inverse needs the head model\.inverse_hidden"):
        RunConfig(objective=ObjectiveConfig(inverse=1.0))
