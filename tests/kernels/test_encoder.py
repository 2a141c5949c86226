"""The fused encoder is the plain one: same tokens, same gradients. Triton's interpreter runs the kernels here."""

import pytest
import torch

from atlas_wm.config import EncoderConfig
from atlas_wm.kernels.attention import attend, attend_backward
from atlas_wm.kernels.encoder import fused_tokens, supports
from atlas_wm.kernels.encoder_triton import Split, add_norm, gelu, patches
from atlas_wm.models.encoders import ViTEncoder
from atlas_wm.rng import make_rng


def small_encoder(image_size: int) -> ViTEncoder:
    """Patches of 8 pixels: 16 of them fill a tile, 9 do not."""
    torch.manual_seed(0)
    encoder = ViTEncoder(EncoderConfig(image_size=image_size, patch_size=8, width=32, depth=2, heads=2))
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return encoder


@pytest.mark.parametrize("image_size", [32, 24])
@pytest.mark.parametrize("only_cls", [False, True])
def test_tokens_and_all_gradients_are_those_of_the_plain_encoder(image_size, only_cls):
    encoder = small_encoder(image_size)
    frames = torch.randint(0, 256, (2, 3, image_size, image_size), dtype=torch.uint8, generator=make_rng(0))
    plain = encoder(frames)
    cls, rest = fused_tokens(encoder.vit, frames, encoder.mean, encoder.std, torch.float32)
    torch.testing.assert_close(cls, plain.cls, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rest, plain.patches, atol=1e-5, rtol=1e-5)

    parameters = list(encoder.parameters())
    weights = torch.randn(plain.patches.shape, generator=make_rng(1))

    def gradients(cls, rest):
        total = cls.sin().sum() + (0 if only_cls else (rest * weights).sum())
        return torch.autograd.grad(total, parameters)

    for got, expected in zip(gradients(cls, rest), gradients(plain.cls, plain.patches), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-4)


def test_gelu_is_exact_to_single_precision():
    x = torch.linspace(-12, 12, 4001)
    expected = torch.nn.functional.gelu(x.double())
    assert (gelu(x) - expected).abs().max() < 2e-6


def test_patches_keep_every_pixel_and_are_exact_in_bf16():
    frames = torch.randint(0, 256, (2, 3, 12, 12), dtype=torch.uint8, generator=make_rng(2))
    got = patches(frames, 4, torch.bfloat16)
    assert got.shape == (2, 1 + 9, 48) and (got[:, 0] == 0).all()
    sixth = frames[1, :, 4:8, 8:12].flatten().int() - 128  # row 1, column 2
    assert (got[1, 6] == sixth).all()
    padded = patches(frames, 3, torch.bfloat16)  # 27 numbers a patch
    assert padded.shape == (2, 1 + 16, 32) and (padded[..., 27:] == 0).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_attention_does_not_overflow_with_large_scores(sign):
    qkv = 100 * torch.randn(2 * 10, 3 * 32, generator=make_rng(3))
    qkv[:, :64] = qkv[:, :64].abs()
    qkv[:, :32] *= sign  # all scores are far above zero, or all far below
    qkv.requires_grad_()
    q, k, v = qkv.view(2, 10, 3, 2, 16).permute(2, 0, 3, 1, 4)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(20, 32)
    out, lse = attend(qkv.detach(), 2, 2)
    torch.testing.assert_close(out, expected.detach(), atol=1e-3, rtol=1e-4)
    grad = torch.randn(20, 32, generator=make_rng(4))
    (gradient,) = torch.autograd.grad(expected, qkv, grad)
    dqkv, _ = attend_backward(grad, qkv.detach(), out, lse, 2, only_cls=False)
    torch.testing.assert_close(dqkv, gradient, atol=0.1, rtol=1e-3)


@pytest.mark.parametrize(
    "count", [256, 144, 20]
)  # patches: two whole parts of keys, two with a gap, one with a gap
@pytest.mark.parametrize("only_cls", [False, True])
def test_attention_over_several_parts_has_the_gradients_of_the_plain_one(count, only_cls):
    qkv = torch.randn(2 * (1 + count), 3 * 32, generator=make_rng(4)).requires_grad_()
    grad = torch.randn(2, 1 + count, 32, generator=make_rng(5))
    if only_cls:
        grad[:, 1:] = 0
    q, k, v = qkv.view(2, 1 + count, 3, 2, 16).permute(2, 0, 3, 1, 4)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1).flatten(1)
    out, lse = attend(qkv.detach(), 2, 2)
    torch.testing.assert_close(out, expected.detach(), atol=1e-5, rtol=1e-4)
    (gradient,) = torch.autograd.grad(expected, qkv, grad.flatten(0, 1))
    dqkv, sums = attend_backward(grad.flatten(0, 1), qkv.detach(), out, lse, 2, only_cls)
    torch.testing.assert_close(dqkv, gradient, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(sums.sum(dim=(0, 2)).flatten(), gradient.sum(dim=0)[:32], atol=1e-4, rtol=1e-4)


def test_the_split_residual_stream_has_16_bits():
    x, change = 10 * torch.randn(9, 24, generator=make_rng(6)), torch.randn(9, 24, generator=make_rng(7)).bfloat16()
    weight, bias = torch.ones(24), torch.zeros(24)
    for x_split in (Split(x), Split(x.bfloat16(), (x - x.bfloat16().float()).bfloat16())):
        total, norm, _ = add_norm(x_split, change, weight, bias, 1e-6, torch.float32)
        assert total.rest is not None and total.rounded.dtype == torch.bfloat16
        expected = x + change.float()
        torch.testing.assert_close(total.rounded.float() + total.rest.float(), expected, atol=1e-4, rtol=2**-15)
        torch.testing.assert_close(norm, torch.nn.functional.layer_norm(expected, (24,)), atol=2e-4, rtol=1e-4)


def test_shapes_that_do_not_fit_are_left_to_the_plain_encoder():
    assert supports(EncoderConfig())
    assert not supports(EncoderConfig(patch_size=7))  # 1,024 patches
    assert not supports(EncoderConfig(width=96, heads=4))  # heads of 24
    assert not supports(EncoderConfig(image_size=96, patch_size=12))  # 64 patches in heads of 64
    assert supports(EncoderConfig(image_size=96, patch_size=12, heads=12))
