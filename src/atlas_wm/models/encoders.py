"""Encoders: frames in, tokens out. Your own is a subclass of :class:`Encoder` (docs/guides/own-model.md)."""

import math
from abc import ABC, abstractmethod
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
from atlas_wm.plugins import build


class Tokens(NamedTuple):
    """Tokens of N frames, after the encoder's last norm."""

    cls: Tensor  # (N, w) the frame as a whole: the latent is projected from it
    patches: Tensor  # (N, K, w) the patches, or the cells of a feature map
    blocks: list[Tensor]  # CLS after each requested block, before the last norm: (N, w)


class Encoder(nn.Module, ABC):
    """What ``model.encoder.kind`` names: built from its config, returns tokens of ``config.width`` numbers."""

    mean: Tensor
    std: Tensor
    depth = 0  # blocks whose CLS token ``forward`` can return; 0: none, and diagnostics by block are skipped
    fused = False  # train with the fused kernels that it offers, in bf16

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.settings = config
        self.register_buffer("mean", torch.tensor(config.pixel_mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(config.pixel_std).view(3, 1, 1), persistent=False)

    @abstractmethod
    def forward(self, frames: Tensor, blocks: Sequence[int] = ()) -> Tokens:
        """frames: (N, 3, H, W) uint8; blocks: 1-based numbers, at most ``depth``, of blocks whose CLS token is
        returned too."""

    def pixels(self, frames: Tensor) -> Tensor:
        """(N, 3, H, W) uint8 → floats, standardised by config.pixel_mean and config.pixel_std"""
        return (frames.float() / 255 - self.mean) / self.std

    def fused_obstacle(self) -> str:
        """Why fused kernels cannot train this encoder; "" if they can, once ``fused`` is set."""
        return f"{type(self).__name__} offers none"


def sincos_positions(width: int, grid: int) -> Tensor:
    """Low-frequency 2-D sines and cosines of amplitude 1 over a grid × grid field: (grid², width).

    Frequencies π/grid · linspace(0.25, 1.5): at most three quarters of a period across the image, so that
    tokens far apart start far apart.
    """
    frequency = math.pi / grid * torch.linspace(0.25, 1.5, width // 4)
    index = torch.arange(grid, dtype=torch.float32)
    y, x = torch.meshgrid(index, index, indexing="ij")
    angles = [axis.reshape(-1, 1) * frequency for axis in (x, y)]
    return torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=1)


class PatchProduct(PatchEmbed):
    """timm's patch convolution as a matrix product, which it is without overlap: much faster on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) → (N, H/p, W/p, w)"""
        high, wide = self.patch_size
        patches = x.unflatten(3, (-1, wide)).unflatten(2, (-1, high)).permute(0, 2, 4, 1, 3, 5).flatten(3)
        return linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class ViTEncoder(Encoder):
    """timm's ViT; trained from scratch, or DINOv2's, frozen."""

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.vit = VisionTransformer(
            img_size=config.image_size,
            patch_size=config.patch_size,
            embed_dim=config.width,
            depth=config.depth,
            num_heads=config.heads,
            mlp_ratio=config.mlp_ratio,
            init_values=1.0 if config.frozen else None,  # LayerScale
            norm_layer=partial(nn.LayerNorm, eps=config.norm_eps),
            num_classes=0,
            global_pool="",
            embed_layer=PatchProduct,
            dynamic_img_size=True,  # positions are interpolated at other sizes
        )
        if config.positions == "sincos":
            waves = sincos_positions(config.width, config.image_size // config.patch_size)
            cls = torch.zeros(1, config.width)
            self.vit.pos_embed = nn.Parameter(torch.cat([cls, waves])[None])
        self.patch_size, self.depth = config.patch_size, config.depth
        self.fused = False  # True: train with atlas_wm.kernels.encoder
        if config.frozen:
            self.requires_grad_(False)

    def fused_obstacle(self) -> str:
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
        check_frames(frames)
        if any(side % self.patch_size for side in frames.shape[-2:]):
            raise UserError(
                f"frame sides {tuple(frames.shape[-2:])} must be multiples of the patch size {self.patch_size}"
            )
        if list(blocks) != sorted(set(blocks)) or not set(blocks) <= set(range(1, self.depth + 1)):
            raise UserError(f"blocks must rise from 1 to at most {self.depth}, not {list(blocks)}")
        if self.fused and self.training and not blocks:
            from atlas_wm.kernels.encoder import fused_tokens  # needs Triton

            cls, patches = fused_tokens(self.vit, frames, self.mean, self.std)
            return Tokens(cls, patches, [])
        pixels = self.pixels(frames)
        if not blocks:
            tokens = self.vit.forward_features(pixels)
            return Tokens(tokens[:, 0], tokens[:, 1:], [])
        final: Any  # timm's types are unions over its options
        between: Any
        final, between = self.vit.forward_intermediates(
            pixels, indices=[b - 1 for b in blocks], return_prefix_tokens=True, output_fmt="NLC"
        )
        return Tokens(final[:, 0], final[:, 1:], [prefix[:, 0] for _, prefix in between])


ENCODERS: dict[str, type[Encoder]] = {"vit": ViTEncoder, "dinov2": ViTEncoder}


def make_encoder(config: EncoderConfig) -> Encoder:
    return build("encoder", config.kind, ENCODERS, Encoder, config)
