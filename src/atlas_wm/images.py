"""Checking, resizing and reading images: the same code for training, planning and evaluation."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from atlas_wm.errors import UserError
from atlas_wm.image_remedies import WANTED, from_array, not_an_image, shape_remedy, uint8_remedy


def check_frames(frames: Tensor) -> None:
    """Require frames as the package uses them internally: (N, 3, H, W) uint8."""
    if frames.dtype != torch.uint8:
        kind, remedy = str(frames.dtype).removeprefix("torch."), uint8_remedy(frames, "frames", tensor=True)
        raise UserError(f"frames must be uint8 (0 to 255), not {kind}: {remedy}")
    if frames.ndim != 4 or frames.shape[1] != 3 or 0 in frames.shape:
        raise UserError(f"frames must have shape (N, 3, height, width), not {tuple(frames.shape)}")


def reduce_frames(frames: Tensor, size: int) -> Tensor:
    """(N, c, H, W) uint8 → (N, c, size, size) uint8: the mean over each target pixel's area, rounded."""
    height, width = frames.shape[-2:]
    if (height, width) == (size, size):
        return frames
    if height == width and height % size == 0:  # whole blocks: a mean, much faster than interpolate
        factor = height // size
        blocks = frames.unflatten(-2, (size, factor)).unflatten(-1, (size, factor))
        return blocks.sum(dim=(-3, -1), dtype=torch.float32).div_(factor * factor).round_().to(torch.uint8)
    return interpolate(frames.float(), (size, size), mode="area").round_().to(torch.uint8)


def frame_to_tensor(frame: Any, name: str = "frame") -> Tensor:
    """An image as environments render it, (H, W, 3) uint8, array or tensor, → (1, 3, H, W)."""
    what = not_an_image(frame, name)
    if what is not None:
        raise UserError(f"{name} must be {WANTED}, not {what}")
    tensor = isinstance(frame, Tensor)
    image = frame.detach().cpu().as_subclass(Tensor).clone() if tensor else from_array(frame, name)
    if image.dtype != torch.uint8:
        kind = str(image.dtype).removeprefix("torch.")
        raise UserError(f"{name} must be uint8 (0 to 255), not {kind}: {uint8_remedy(image, name, tensor)}")
    if image.ndim != 3 or image.shape[-1] != 3 or 0 in image.shape:
        remedy = shape_remedy(image, name, tensor)
        raise UserError(f"{name} must have shape (height, width, 3), not {tuple(image.shape)}: {remedy}")
    return image.permute(2, 0, 1)[None]


def read_image(path: Path) -> np.ndarray:
    """An image file → (H, W, 3) uint8."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB"))
    except FileNotFoundError:
        raise UserError(f"there is no image {path}") from None
    except (UnidentifiedImageError, OSError) as error:
        raise UserError(f"{path} cannot be read as an image: {error}") from error
