"""The ViT encoder: frames in, tokens out."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from timm.layers import PatchEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.functional import linear

from atlas_wm.config import EncoderConfig
from atlas_wm.errors import UserError
from atlas_wm.images import check_frames
from atlas_wm.models.structure import departure


class Tokens(NamedTuple):
    """Tokens of N frames, after the encoder's last norm."""

    cls: Tensor  # (N, w)
    patches: Tensor  # (N, K, w)
    blocks: list[Tensor]  # CLS after each block asked for, before the last norm: (N, w)


def sincos_positions(width: int, grid: int) -> Tensor:
    """Low 2-D waves of amplitude 1 over a grid × grid field: (grid², width).

    Frequencies π/grid · linspace(0.25, 1.5): at most three quarters of a period across the image, so that
    tokens far apart start far apart.
    """
    frequency = math.pi / grid * torch.linspace(0.25, 1.5, width // 4)
    place = torch.arange(grid, dtype=torch.float32)
    y, x = torch.meshgrid(place, place, indexing="ij")
    angles = [axis.reshape(-1, 1) * frequency for axis in (x, y)]
    return torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=1)


class PatchProduct(PatchEmbed):
    """timm's convolution as the matrix product it is, since patches do not overlap: much faster on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) → (N, H/p, W/p, w)"""
        high, wide = self.patch_size
        patches = x.unflatten(3, (-1, wide)).unflatten(2, (-1, high)).permute(0, 2, 4, 1, 3, 5).flatten(3)
        return linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class ViTEncoder(nn.Module):
    mean: Tensor
    std: Tensor

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.vit = VisionTransformer(
            img_size=config.image_size,
            patch_size=config.patch_size,
            embed_dim=config.width,
            depth=config.depth,
            num_heads=config.heads,
            mlp_ratio=config.mlp_ratio,
            init_values=1.0 if config.kind == "dinov2" else None,  # LayerScale
            norm_layer=partial(nn.LayerNorm, eps=config.norm_eps),
            num_classes=0,
            global_pool="",
            embed_layer=PatchProduct,
            dynamic_img_size=True,  # positions are interpolated at other sizes
        )
        if config.positions == "sincos":
            waves = sincos_positions(config.width, config.image_size // config.patch_size)
            cls = torch.zeros(1, config.width)  # the CLS token has no place
            self.vit.pos_embed = nn.Parameter(torch.cat([cls, waves])[None])
        self.register_buffer("mean", torch.tensor(config.pixel_mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(config.pixel_std).view(3, 1, 1), persistent=False)
        self.patch_size = config.patch_size
        self.settings = config
        self.fused = False  # train with the kernels of atlas_wm.kernels.encoder, in bf16
        if config.kind == "dinov2":
            self.requires_grad_(False)

    def fused_obstacle(self) -> str:
        """Why the fused kernels cannot train this encoder; "" if they can."""
        try:
            from atlas_wm.kernels import encoder as kernels
        except ImportError:
            return "that takes Triton"
        if not kernels.supports(self.settings):
            return f"that takes {kernels.TAKES}"
        with torch.device("meta"):
            reference = ViTEncoder(self.settings)
        return departure(self, reference)

    def forward(self, frames: Tensor, blocks: Sequence[int] = ()) -> Tokens:
        """frames: (N, 3, H, W) uint8; blocks: 1-based numbers of blocks whose CLS token is wanted too."""
        check_frames(frames)
        if any(side % self.patch_size for side in frames.shape[-2:]):
            raise UserError(
                f"frame sides {tuple(frames.shape[-2:])} must be multiples of the patch size {self.patch_size}"
            )
        if list(blocks) != sorted(set(blocks)) or not set(blocks) <= set(range(1, len(self.vit.blocks) + 1)):
            raise UserError(f"blocks must rise from 1 to at most {len(self.vit.blocks)}, not {list(blocks)}")
        if self.fused and self.training and not blocks:
            from atlas_wm.kernels.encoder import fused_tokens  # needs Triton

            cls, patches = fused_tokens(self.vit, frames, self.mean, self.std)
            return Tokens(cls, patches, [])
        pixels = (frames.float() / 255 - self.mean) / self.std
        if not blocks:
            tokens = self.vit.forward_features(pixels)
            return Tokens(tokens[:, 0], tokens[:, 1:], [])
        final: Any  # timm's types are unions over its options
        between: Any
        final, between = self.vit.forward_intermediates(
            pixels, indices=[b - 1 for b in blocks], return_prefix_tokens=True, output_fmt="NLC"
        )
        return Tokens(final[:, 0], final[:, 1:], [prefix[:, 0] for _, prefix in between])
