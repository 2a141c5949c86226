import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from atlas_wm.errors import UserError
from atlas_wm.models.encoders import sincos_positions
from atlas_wm.models.layers import AdaLNBlock, CausalAttention
from atlas_wm.models.world_model import WorldModel
from atlas_wm.normalizer import Normalizer
from atlas_wm.recipes import demo, paper
from atlas_wm.rng import make_rng

LATENT, BLOCK = 32, 10  # of the demo model: size of z, and numbers in a block of 5 actions of size 2


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def frames(*shape, seed=0):
    return torch.randint(0, 256, shape, generator=make_rng(seed), dtype=torch.uint8)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=make_rng(seed))


def test_paper_model_has_18_0_million_parameters():
    with torch.device("meta"):
        model = WorldModel(paper("atlas").model, action_size=2)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == 18.0


# ---- encoder


def test_other_image_sizes_are_accepted_and_leave_the_native_size_unchanged(demo_model):
    native = frames(2, 3, 32, 32)
    before = demo_model.encode(native)
    for side in (16, 48):
        assert demo_model.encode(frames(2, 3, side, side)).shape == (2, LATENT)
    assert torch.equal(demo_model.encode(native), before)


def test_native_size_uses_the_position_embedding_as_it_is(demo_model):
    fixed = VisionTransformer(
        img_size=32, patch_size=4, embed_dim=48, depth=2, num_heads=3, num_classes=0, global_pool=""
    ).eval()
    fixed.load_state_dict(demo_model.encoder.vit.state_dict())
    image = frames(2, 3, 32, 32)
    tokens = fixed.forward_features(image.float() / 255 - 1)  # the demo's pixel mean and deviation are 1
    encoded = demo_model.encoder(image)
    torch.testing.assert_close(encoded.cls, tokens[:, 0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(encoded.patches, tokens[:, 1:], atol=1e-6, rtol=1e-6)


def test_positions_are_interpolated_over_the_picture_at_another_size(demo_model):
    native = demo_model.encoder(frames(1, 3, 32, 32).fill_(90)).patches.unflatten(1, (8, 8))
    double = demo_model.encoder(frames(1, 3, 64, 64).fill_(90)).patches.unflatten(1, (16, 16))
    # One grey image: what differs between its patches is the place alone, and the corners stay the corners.
    corners = native[0, ::7, ::7].flatten(0, 1), double[0, ::15, ::15].flatten(0, 1)
    nearest = torch.cdist(corners[1], corners[0]).argmin(dim=1)
    assert nearest.tolist() == [0, 1, 2, 3]


def test_a_frame_alone_equals_the_same_frame_in_a_batch_of_64(demo_model):
    batch = frames(64, 3, 32, 32)
    torch.testing.assert_close(
        demo_model.encode(batch)[17], demo_model.encode(batch[17:18])[0], atol=1e-5, rtol=1e-5
    )


def test_a_clip_alone_equals_the_same_clip_in_a_batch_of_64(demo_model):
    batch, actions = frames(64, 4, 3, 32, 32), normal(64, 3, BLOCK)
    for among, alone in zip(demo_model(batch, actions)[:3], demo_model(batch[:1], actions[:1])[:3], strict=True):
        torch.testing.assert_close(among[:1], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(2, 3, 32, 32), "must be uint8 .*not float32"),
        (frames(2, 32, 32, 3), r"must have shape \(N, 3, height, width\), not \(2, 32, 32, 3\)"),
        (frames(3, 32, 32), r"must have shape \(N, 3, height, width\), not \(3, 32, 32\)"),
        (frames(2, 1, 32, 32), r"must have shape \(N, 3, height, width\)"),
        (frames(2, 3, 30, 32), r"\(30, 32\) must be multiples of the patch size 4"),
    ],
    ids=["float", "colour last", "one frame", "grey", "odd size"],
)
def test_wrong_frames_are_refused_in_words(demo_model, bad, message):
    with pytest.raises(UserError, match=message):
        demo_model.encode(bad)


def test_features_have_the_shapes_of_their_names_and_z_is_encode(demo_model):
    image = frames(3, 3, 32, 32)
    features = demo_model.features(image, blocks=(1, 2))
    assert [tuple(b.shape) for b in features.blocks] == [(3, 48), (3, 48)]
    assert features.patch.shape == features.cls.shape == (3, 48)
    assert features.z.shape == (3, LATENT)
    torch.testing.assert_close(features.z, demo_model.encode(image), atol=1e-6, rtol=1e-6)
    assert demo_model.features(image).blocks == []


@pytest.mark.parametrize("asked", [(1,), (2,), (1, 2)])
def test_features_are_taken_where_they_say(demo_model, asked):
    after, vit = [], demo_model.encoder.vit
    for block in vit.blocks:
        block.register_forward_hook(lambda _module, _inputs, tokens: after.append(tokens))
    features = demo_model.features(frames(3, 3, 32, 32), blocks=asked)
    assert len(features.blocks) == len(asked)
    for number, cls in zip(asked, features.blocks, strict=True):
        torch.testing.assert_close(cls, after[number - 1][:, 0])
    final = vit.norm(after[1])
    torch.testing.assert_close(features.cls, final[:, 0])
    torch.testing.assert_close(features.patch, final[:, 1:].mean(dim=1))


@pytest.mark.parametrize(("width", "grid"), [(48, 8), (8, 3)])
def test_sincos_positions_are_waves_of_amplitude_one(width, grid):
    waves = sincos_positions(width, grid)
    assert waves.shape == (grid**2, width)
    sin_x, cos_x, sin_y, cos_y = waves.unflatten(0, (grid, grid)).chunk(4, dim=-1)
    for sin, cos in ((sin_x, cos_x), (sin_y, cos_y)):
        torch.testing.assert_close(sin**2 + cos**2, torch.ones_like(sin))
    assert torch.equal(sin_x, sin_x[:1].expand_as(sin_x))  # x runs along a row of the image, y down it
    assert torch.equal(sin_y, sin_y[:, :1].expand_as(sin_y))
    assert waves.unique(dim=0).shape[0] == grid**2


def test_sincos_positions_are_the_start_of_the_demo_and_cls_has_no_place():
    positions = WorldModel(demo("atlas").model, action_size=2).encoder.vit.pos_embed
    assert positions.requires_grad
    assert (positions[0, 0] == 0).all()
    assert torch.equal(positions[0, 1:], sincos_positions(48, 8))


# ---- predictor


def test_a_block_starts_as_the_identity():
    block = AdaLNBlock(16, CausalAttention(16, heads=2, head_dim=8), mlp=32).eval()
    x = normal(4, 3, 16)
    assert torch.equal(block(x, normal(4, 3, 16, seed=1)), x)
    block.modulation[-1].bias.fill_(0.1)
    assert not torch.equal(block(x, normal(4, 3, 16, seed=1)), x)


def test_a_new_predictor_is_a_norm_of_its_input():
    predictor = WorldModel(demo("atlas").model, action_size=2).eval().predictor
    z = normal(4, 3, LATENT)
    expected = predictor.norm(predictor.enter(z) + predictor.positions)
    assert torch.equal(predictor(z, normal(4, 3, 64, seed=1)), expected)


@pytest.mark.parametrize("perturbed", ["latents", "actions"])
@pytest.mark.parametrize("t", [0, 1, 2])
def test_a_prediction_does_not_see_the_future(demo_model, perturbed, t):
    z, actions = normal(5, 3, LATENT), normal(5, 3, BLOCK, seed=1)
    before = demo_model.predict(z, actions)
    (z if perturbed == "latents" else actions)[:, t] += 1
    after = demo_model.predict(z, actions)
    assert torch.equal(after[:, :t], before[:, :t])
    for later in range(t, 3):
        assert ((after - before)[:, later].abs().amax(dim=-1) > 1e-3).all()


@pytest.mark.parametrize("steps", [1, 2])
def test_positions_start_at_zero_in_a_shorter_window(demo_model, steps):
    z, actions = normal(5, 3, LATENT), normal(5, 3, BLOCK, seed=1)
    short = demo_model.predict(z[:, :steps], actions[:, :steps])
    torch.testing.assert_close(short, demo_model.predict(z, actions)[:, :steps], atol=1e-5, rtol=1e-5)


def test_forward_predicts_each_latent_from_those_before_it(demo_model):
    images, actions = frames(2, 4, 3, 32, 32), normal(2, 3, BLOCK)
    z, anchor, predicted, *_ = demo_model(images, actions)
    features = demo_model.features(images.flatten(0, 1))
    torch.testing.assert_close(z.flatten(0, 1), features.z)
    torch.testing.assert_close(anchor.flatten(0, 1), features.patch)
    torch.testing.assert_close(predicted, demo_model.predict(z[:, :3], actions))


@pytest.mark.parametrize("horizon", [1, 3, 6])
def test_rollout_equals_a_step_by_step_loop_over_the_last_three_latents(demo_model, horizon):
    z, actions = normal(2, LATENT), normal(2, 4, horizon, BLOCK, seed=1)
    imagined = demo_model.rollout(z, actions)
    assert imagined.shape == (2, 4, horizon, LATENT)
    for b in range(2):
        for s in range(4):
            latents = [z[b]]
            for step in range(horizon):
                seen = torch.stack(latents[-3:])
                acted = actions[b, s, : step + 1][-3:]
                latents.append(demo_model.predict(seen[None], acted[None])[0, -1])
            torch.testing.assert_close(imagined[b, s], torch.stack(latents[1:]), atol=1e-5, rtol=1e-5)


def test_a_normaliser_of_the_wrong_size_is_refused():
    with pytest.raises(UserError, match="3 coordinates, actions 2"):
        WorldModel(demo("atlas").model, action_size=2, normalizer=Normalizer((0.0,) * 3, (1.0,) * 3))


@pytest.mark.parametrize("blocks", [(2, 1), (1, 1), (0,), (-1,), (3,)])
def test_blocks_that_are_not_there_or_out_of_order_are_refused(demo_model, blocks):
    with pytest.raises(UserError, match="blocks must rise from 1 to at most 2"):
        demo_model.features(frames(1, 3, 32, 32), blocks)
