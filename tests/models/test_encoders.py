import pytest
import torch
from torch.nn.functional import conv2d

from atlas_wm.config import EncoderConfig
from atlas_wm.models.encoders import ViTEncoder
from atlas_wm.rng import make_rng


@pytest.mark.parametrize("size", [(28, 28), (42, 28)])
def test_patches_by_a_matrix_product_are_those_of_the_convolution(size):
    encoder = ViTEncoder(EncoderConfig(image_size=28, patch_size=7, width=24, depth=1))
    embed = encoder.vit.patch_embed
    torch.nn.init.normal_(embed.proj.bias)
    pixels = torch.randn(3, 3, *size, generator=make_rng(0))
    expected = conv2d(pixels, embed.proj.weight, embed.proj.bias, stride=7).permute(0, 2, 3, 1)
    torch.testing.assert_close(embed(pixels), expected, atol=1e-5, rtol=1e-5)
