"""Checking, resizing and reading images: the same code for training, planning and evaluation."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

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
    """(N, c, H, W) uint8 → (N, c, size, size) uint8: the mean over each target pixel's area, rounded.

    The same bits as ``interpolate(frames.float(), mode="area").round()`` in a fifth of the time. Images are summed
    one by one, in integers, and by one thread: where cores are busy, torch's threads wait for each other.
    """
    if tuple(frames.shape[-2:]) == (size, size):
        return frames
    channels_last = frames.stride(1) == 1  # as images are stored: their rows are contiguous
    images = frames.cpu().movedim(1, -1) if channels_last else frames.cpu()
    height, width = (0, 1) if channels_last else (1, 2)  # axes of one image
    rows, columns = (Windows.of(images.shape[axis + 1], size) for axis in (height, width))
    area = rows.along(rows.lengths, height) * columns.along(columns.lengths, width)
    shape = [size if axis - 1 in (height, width) else n for axis, n in enumerate(images.shape)]
    reduced = np.empty(shape, np.uint8)
    for image, result in zip(images.numpy(), reduced, strict=True):
        mean = columns.sums(rows.sums(image, height), width) / area
        np.copyto(result, np.rint(mean, out=mean), casting="unsafe")
    found = torch.from_numpy(reduced).to(frames.device)
    return found.movedim(-1, 1) if channels_last else found


class Windows(NamedTuple):
    """The pixels of an axis of length n that become pixel i of ``size``: from ⌊i·n/size⌋ up to ⌈(i+1)·n/size⌉."""

    first: np.ndarray  # (size,)
    lengths: np.ndarray  # (size,) float32

    @classmethod
    def of(cls, n: int, size: int) -> "Windows":
        i = np.arange(size)
        first = i * n // size
        return cls(first, (-((i + 1) * -n // size) - first).astype(np.float32))

    def along(self, values: np.ndarray, axis: int) -> np.ndarray:
        """(size,) → (1, …, size, …, 1)"""
        return np.expand_dims(values, [other for other in range(3) if other != axis])

    def sums(self, image: np.ndarray, axis: int) -> np.ndarray:
        """Of an image with three axes, over the windows of one."""
        shortest, longest = int(self.lengths.min()), int(self.lengths.max())
        fits = image.dtype == np.uint8 and longest <= 257  # 257 · 255 = 2¹⁶ − 1
        sums: np.ndarray = image.take(self.first, axis).astype(np.uint16 if fits else np.uint32)
        for k in range(1, longest):
            part = image.take(self.first + k, axis, mode="clip")
            sums += part if k < shortest else part * self.along(k < self.lengths, axis)
        return sums


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
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError) as error:
        raise UserError(f"{path} cannot be read as an image: {error}") from error
