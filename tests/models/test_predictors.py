"""DINO-WM's and FAST-WM's predictors beside their sources, and all three kinds on dynamics they have to learn."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from stable_worldmodel.wm.prejepa.module import CausalPredictor as PublishedPatchPredictor
from stable_worldmodel.wm.prejepa.module import Embedder

from atlas_wm.config import EncoderConfig, ModelConfig, PlanConfig, PredictorConfig
from atlas_wm.errors import UserError
from atlas_wm.models.predictors import PREDICTORS, PrefixPredictor, sinusoids
from atlas_wm.models.world_model import WorldModel
from atlas_wm.plan.planner import Planner
from atlas_wm.rng import make_rng

TOKENS, TOKEN, LATENT, ACTION = 4, 8, 6, 10  # tokens of a frame, numbers of a token, of z, of an action block
SIZES = PredictorConfig(width=16, depth=2, heads=2, head_dim=8, mlp=32, prefixes=4, prefix_heads=2)
CAUSAL = ModelConfig(
    EncoderConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2), SIZES, LATENT, hidden=32, action_hidden=16
)
PREFIX = replace(CAUSAL, predictor=replace(SIZES, kind="prefix"))
PATCH = replace(
    CAUSAL,
    encoder=EncoderConfig(kind="dinov2", image_size=8, patch_size=4, width=TOKEN, depth=1, heads=2),
    predictor=replace(SIZES, kind="patch"),
)
CONFIGS = {"causal": CAUSAL, "prefix": PREFIX, "patch": PATCH}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=make_rng(seed))


def make_model(config):
    """Random weights in eval mode, the modulation (zero at the start) too, so that conditions matter."""
    torch.manual_seed(0)
    model = WorldModel(config, action_size=2)
    for name, weight in model.named_parameters():
        if "modulation" in name:
            torch.nn.init.normal_(weight, std=0.5)
    return model.eval().requires_grad_(False)


@pytest.fixture
def patch():
    return make_model(PATCH).predictor


@pytest.fixture
def prefix():
    return make_model(PREFIX).predictor


def changed(after, before):
    """Whether each clip and step changed: (B, T, …) → (B, T)"""
    return (after - before).abs().flatten(2).amax(dim=-1) > 1e-4


# ---- DINO-WM


def published_names(name):
    """Where stable-worldmodel keeps what we call ``name``."""
    for ours, theirs in (
        ("positions", "pos_embedding"),
        ("blocks.", "transformer.layers."),
        (".attention_norm.", ".0.norm."),
        (".attention.to_qkv.", ".0.to_qkv."),
        (".attention.out.", ".0.to_out.0."),
        (".mlp_norm.", ".1.net.0."),
        (".mlp.up.", ".1.net.1."),
        (".mlp.down.", ".1.net.4."),
    ):
        name = name.replace(ours, theirs)
    return f"transformer.{name}" if name.startswith("norm.") else name


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_patch_predictor_equals_the_published_one_with_the_same_weights(patch, steps):
    p = PATCH.predictor
    embed = Embedder(in_chans=ACTION, emb_dim=10)
    published = PublishedPatchPredictor(
        num_patches=TOKENS, num_frames=3, dim=TOKEN + 10, depth=2, heads=2, dim_head=8, mlp_dim=p.mlp, dropout=0.1
    ).eval()
    weights = patch.state_dict()
    embed.patch_embed.weight.data = weights.pop("action_encoder.weight")[..., None]
    embed.patch_embed.bias.data = weights.pop("action_encoder.bias")
    weights = {published_names(name): value for name, value in weights.items()}
    weights["pos_embedding"] = weights["pos_embedding"][None]
    published.load_state_dict(weights | dict(published.named_buffers()))  # strict: every weight has its place
    z, actions = normal(5, steps, TOKENS, TOKEN), normal(5, steps, ACTION, seed=1)
    with torch.no_grad():
        tiled = embed(actions)[:, :, None].repeat(1, 1, TOKENS, 1)
        expected = published(torch.cat([z, tiled], dim=-1).flatten(1, 2))
    expected = expected.unflatten(1, (steps, TOKENS))[..., :TOKEN]
    torch.testing.assert_close(patch.predict(z, actions), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("t", [0, 1, 2])
@pytest.mark.parametrize("perturbed", ["actions", *range(TOKENS)])
def test_a_patch_prediction_sees_its_own_step_and_those_before_it(patch, perturbed, t):
    z, actions = normal(5, 3, TOKENS, TOKEN), normal(5, 3, ACTION, seed=1)
    before = patch.predict(z, actions)
    if perturbed == "actions":
        actions[:, t] += 1
    else:
        z[:, t, perturbed] += normal(TOKEN, seed=2)
    after = patch.predict(z, actions)
    assert torch.equal(after[:, :t], before[:, :t])
    assert changed(after, before)[:, t:].all()
    if perturbed != "actions":  # tokens of a step see one another, later ones of the same step too
        assert ((after - before)[:, t].abs().amax(dim=-1) > 1e-4).all()


@pytest.mark.parametrize("horizon", [1, 3, 5])
def test_a_patch_rollout_equals_a_loop_over_the_last_three_frames(patch, horizon):
    z, actions = normal(2, TOKENS, TOKEN), normal(2, 3, horizon, ACTION, seed=1)
    imagined = patch.rollout(z, actions)
    assert imagined.shape == (2, 3, horizon, TOKENS, TOKEN)
    for b in range(2):
        for s in range(3):
            latents = [z[b]]
            for step in range(horizon):
                seen, acted = torch.stack(latents[-3:]), actions[b, s, : step + 1][-3:]
                latents.append(patch.predict(seen[None], acted[None])[0, -1])
            torch.testing.assert_close(imagined[b, s], torch.stack(latents[1:]), atol=1e-5, rtol=1e-5)
    assert torch.equal(patch.terminal(z, actions), imagined[:, :, -1])


@pytest.mark.parametrize("chunk", [1, 7, 20])
def test_planning_over_patches_in_chunks_gives_the_same_plan_within_the_bound(chunk):
    model = make_model(PATCH)
    sizes = []
    model.predictor.blocks[0].register_forward_pre_hook(lambda _module, inputs: sizes.append(len(inputs[0])))
    whole = PlanConfig(candidates=20, iterations=2, elites=5)
    frame, goal = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
    expected = Planner(model, whole).plan(frame, goal)
    assert max(sizes) == 20
    sizes.clear()
    plan = Planner(model, replace(whole, candidate_chunk=chunk)).plan(frame, goal)
    assert max(sizes) == chunk
    for a, b in zip(plan[:4], expected[:4], strict=True):  # there is no bank for the novelty
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


# ---- FAST-WM


@pytest.mark.parametrize("t", range(4))
def test_a_prefix_is_unaffected_by_later_actions_and_affected_by_each_of_its_own(prefix, t):
    z, actions = normal(5, 4, LATENT), normal(5, 4, ACTION, seed=1)
    before = prefix.predict(z, actions)
    actions[:, t] += 1
    after = prefix.predict(z, actions)
    assert torch.equal(after[:, :t], before[:, :t])
    assert changed(after, before)[:, t:].all()


def test_prefixes_look_at_the_first_latent_alone(prefix):
    z, actions = normal(5, 4, LATENT), normal(5, 4, ACTION, seed=1)
    before = prefix.predict(z, actions)
    assert torch.equal(prefix.predict(torch.cat([z[:, :1], z[:, 1:] + 1], dim=1), actions), before)
    z[:, 0] += normal(LATENT, seed=2)
    assert changed(prefix.predict(z, actions), before).all()


def test_the_order_of_the_actions_matters(prefix):
    z, actions = normal(5, LATENT), normal(5, 1, 4, ACTION, seed=1)
    assert changed(prefix.terminal(z, actions.flip(2)), prefix.terminal(z, actions)).all()


@pytest.mark.parametrize("horizon", [1, 3, 4])
def test_rollout_predict_and_terminal_of_prefixes_agree(prefix, horizon):
    z, actions = normal(2, LATENT), normal(2, 3, horizon, ACTION, seed=1)
    imagined = prefix.rollout(z, actions)
    assert imagined.shape == (2, 3, horizon, LATENT)
    for b in range(2):
        for s in range(3):
            alone = prefix.predict(z[b].expand(1, horizon, LATENT), actions[b, s][None])[0]
            torch.testing.assert_close(imagined[b, s], alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(prefix.terminal(z, actions), imagined[:, :, -1], atol=1e-5, rtol=1e-5)


def test_the_end_of_a_plan_costs_the_pointwise_blocks_one_prefix_and_one_pass(prefix):
    shapes = []
    for block in prefix.blocks:
        block.register_forward_pre_hook(lambda _module, inputs: shapes.append(tuple(inputs[0].shape)))
    prefix.terminal(normal(2, LATENT), normal(2, 3, 4, ACTION))
    assert shapes == [(6, 1, 16)] * 2
    shapes.clear()
    prefix.rollout(normal(2, LATENT), normal(2, 3, 4, ACTION))
    assert shapes == [(6, 4, 16)] * 2


@pytest.mark.parametrize("verb", ["rollout", "terminal"])
def test_a_plan_longer_than_the_longest_prefix_is_refused(prefix, verb):
    with pytest.raises(UserError, match=r"5 action chunks are more than the 4 .*--model\.predictor\.prefixes"):
        getattr(prefix, verb)(normal(2, LATENT), normal(2, 3, 5, ACTION))


def test_a_new_model_carries_the_current_latent_past_every_action():
    torch.manual_seed(0)
    prefix = WorldModel(PREFIX, action_size=2).eval().requires_grad_(False).predictor
    z = normal(5, 4, LATENT)
    expected = prefix.head(prefix.norm(prefix.enter(z[:, :1])))  # the modulation starts at zero
    torch.testing.assert_close(prefix.predict(z, normal(5, 4, ACTION, seed=1)), expected.expand(-1, 4, -1))


def test_positions_of_prefixes_are_fixed_sinusoids(prefix):
    entered = []
    prefix.prefix_blocks[0].register_forward_pre_hook(lambda _module, inputs: entered.append(inputs[0]))
    z, actions = normal(5, 4, LATENT), normal(5, 3, ACTION, seed=1)
    prefix.predict(z, actions)
    tokens = torch.cat([prefix.enter(z[:, :1]), prefix.action_encoder(actions)], dim=1)
    torch.testing.assert_close(entered[0], tokens + sinusoids(4, 16))
    assert not any("position" in name for name in prefix.state_dict())
    positions = sinusoids(50, 16).double()
    for step in (0, 1, 17, 49):
        for pair in range(8):
            angle = step / 10_000 ** (2 * pair / 16)
            expected = [np.sin(angle), np.cos(angle)]
            np.testing.assert_allclose(positions[step, 2 * pair : 2 * pair + 2], expected, atol=1e-5)


# ---- learning


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class LinearWorld:
    """z_{t+1} = A z_t + B a_t at about unit scale; patch tokens first move against the mean of their frame."""

    def __init__(self, shape):
        self.shape = shape
        self.a = 0.8 * torch.linalg.qr(normal(shape[-1], shape[-1])).Q
        self.b = 0.6 * normal(2, shape[-1], seed=1)

    def clips(self, count, steps, generator):
        z = [torch.randn(count, *self.shape, generator=generator)]
        actions = torch.randn(count, steps, 2, generator=generator)
        for t in range(steps):
            x, push = z[-1], actions[:, t] @ self.b
            if len(self.shape) == 2:
                x, push = x - 2 * x.mean(dim=1, keepdim=True), push[:, None]
            z.append(x @ self.a.T + push)
        return torch.stack(z, dim=1), actions


def relative_error(predictor, z, actions):
    """Mean squared error, as a share of that of predicting no change of the latent looked at."""
    seen = z[:, :1] if isinstance(predictor, PrefixPredictor) else z[:, :-1]
    predicted = predictor.predict(z[:, :-1], actions)
    return (predicted - z[:, 1:]).square().mean() / (seen - z[:, 1:]).square().mean()


@pytest.mark.parametrize("kind", PREDICTORS)
def test_linear_dynamics_are_learned(kind, one_thread):
    config = CONFIGS[kind]
    sizes = replace(config.predictor, width=32, mlp=64, prefix_depth=2, dropout=0.0, positions_std=0.02)
    config = replace(config, predictor=sizes, hidden=64)
    torch.manual_seed(0)
    predictor, world = PREDICTORS[kind](config, action_chunk=2), LinearWorld(config.latent_shape)
    fresh = world.clips(1000, config.clip_frames - 1, make_rng(2))

    @torch.no_grad()
    def measure(actions):
        return relative_error(predictor.eval(), fresh[0], actions).item()

    assert measure(fresh[1]) > 0.3
    steps, draw = 300, make_rng(3)
    optimizer = torch.optim.Adam(predictor.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=steps)
    predictor.train()
    for _ in range(steps):
        optimizer.zero_grad()
        relative_error(predictor, *world.clips(64, config.clip_frames - 1, draw)).backward()
        optimizer.step()
        schedule.step()
    assert measure(fresh[1]) < 0.05
    assert measure(fresh[1].flip(0)) > 0.1  # with the actions of other clips
