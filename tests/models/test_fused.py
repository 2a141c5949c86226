"""The fused encoder is the plain one: same tokens, same gradients. Triton's interpreter runs the kernels here."""

import pytest
import torch

from atlas_wm.config import EncoderConfig
from atlas_wm.models.encoders import ViTEncoder
from atlas_wm.models.fused import fused_tokens, supports
from atlas_wm.models.fused_attention import attend
from atlas_wm.models.fused_kernels import gelu, patches
from atlas_wm.streams import stream


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
    frames = torch.randint(0, 256, (2, 3, image_size, image_size), dtype=torch.uint8, generator=stream(0))
    plain = encoder(frames)
    cls, rest = fused_tokens(encoder.vit, frames, encoder.mean, encoder.std, torch.float32)
    torch.testing.assert_close(cls, plain.cls, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rest, plain.patches, atol=1e-5, rtol=1e-5)

    parameters = list(encoder.parameters())
    weights = torch.randn(plain.patches.shape, generator=stream(1))

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
    frames = torch.randint(0, 256, (2, 3, 12, 12), dtype=torch.uint8, generator=stream(2))
    got = patches(frames, 4, torch.bfloat16)
    assert got.shape == (2, 9, 48)
    first = frames[1, :, 4:8, 8:12].flatten().int() - 128  # row 1, column 2: patch 5
    assert (got[1, 5] == first).all()
    padded = patches(frames, 3, torch.bfloat16)  # 27 numbers a patch
    assert padded.shape == (2, 16, 32) and (padded[..., 27:] == 0).all()


def test_attention_does_not_overflow_with_large_scores():
    qkv = 100 * torch.randn(2 * 10, 3 * 32, generator=stream(3))
    q, k, v = qkv.view(2, 10, 3, 2, 16).permute(2, 0, 3, 1, 4)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(20, 32)
    torch.testing.assert_close(attend(qkv, 2, 2)[0], expected, atol=1e-3, rtol=1e-4)


def test_shapes_that_do_not_fit_are_left_to_the_plain_encoder():
    assert supports(EncoderConfig())
    assert not supports(EncoderConfig(patch_size=7))  # 1,024 patches
    assert not supports(EncoderConfig(width=96, heads=4))  # heads of 24
