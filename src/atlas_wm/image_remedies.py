"""Error messages for inputs that are not images, with the code that fixes them."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atlas_wm.errors import UserError, short

WANTED = "an image, an array of shape (height, width, 3) and type uint8"


def not_an_image(frame: Any, name: str) -> str | None:
    """What the input is instead of an image, and what to do; None if it may be an image."""
    if frame is None:
        return "None: make the environment with render_mode='rgb_array' so that env.render() returns an image"
    if isinstance(frame, (str, os.PathLike)):
        return f"the path {short(os.fspath(frame))}: read it first, `atlas_wm.images.read_image({name})`"
    if isinstance(frame, Mapping):
        images = [key for key, value in frame.items() if len(getattr(value, "shape", ())) >= 2]
        which = " or ".join(f"`{name}[{key!r}]`" for key in images) or "the image (none of these seems to be one)"
        return f"a dict with the keys {short(list(frame))}: pass {which}"
    if isinstance(frame, (list, tuple)):
        return f"a {type(frame).__name__} of {len(frame)}: pass a single image as an array"
    mode = getattr(frame, "mode", None)
    if isinstance(mode, str) and hasattr(frame, "convert") and mode != "RGB":  # a Pillow image
        return f"a {mode} image: pass `{name}.convert('RGB')`"
    return None


def from_array(frame: Any, name: str) -> Tensor:
    """A copy of anything that NumPy converts to an array of numbers."""
    try:
        array = np.array(frame)  # a copy: any strides, writable
        if array.dtype.kind not in "biufc":
            raise TypeError
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
    except Exception:  # an object may raise anything when converted
        raise UserError(f"{name} must be {WANTED}, not {short(frame)} of type {type(frame).__name__}") from None


def uint8_remedy(image: Tensor, name: str, tensor: bool) -> str:
    """How to convert numbers of another type to 0 to 255, judged by their range."""
    to = ".to(torch.uint8)" if tensor else ".astype(np.uint8)"
    if image.dtype == torch.bool:
        return f"pass `{name}{to} * 255` if True is white"
    if image.is_complex() or image.numel() == 0:
        return "it holds complex numbers" if image.is_complex() else "it is empty"
    if not bool(image.isfinite().all()):
        return "it holds NaN or infinity; find out where they come from first"
    low, high = (float(end) for end in image.double().aminmax())
    if image.is_floating_point() and low >= 0 and high <= 1:
        return f"its values lie in [0, 1], pass `({name} * 255).round(){to}`"
    if image.is_floating_point() and low >= -1 and high <= 1:
        return f"its values lie in [-1, 1], pass `(({name} + 1) * 127.5).round(){to}`"
    if low >= 0 and high <= 255:
        return f"its values lie in [0, 255], pass `{name}{'.round()' if image.is_floating_point() else ''}{to}`"
    return f"its values go from {low:g} to {high:g}, scale them to 0 (black) to 255 (white) first"


def shape_remedy(image: Tensor, name: str, tensor: bool) -> str:
    """How to convert a uint8 image of another shape to (height, width, 3)."""
    shape = tuple(image.shape)
    if 0 in shape:
        return "it is empty"
    if image.ndim > 3:
        what = "a batch of one" if shape[0] == 1 else f"{shape[0]} images"
        return f"it is {what}, pass one of them, `{name}[0]`"
    turn = "permute(1, 2, 0)" if tensor else "transpose(1, 2, 0)"
    stack = "torch.stack([{}] * 3, -1)" if tensor else "np.stack([{}] * 3, -1)"
    if image.ndim == 2:
        return f"it is grayscale, pass `{stack.format(name)}` if the model was trained on grayscale images"
    if image.ndim == 3 and 4 in (shape[0], shape[-1]):
        alpha = f"{name}[..., :3]" if shape[-1] == 4 else f"{name}[:3].{turn}"
        return f"its fourth channel seems to be transparency; drop it: `{alpha}`"
    if image.ndim == 3 and shape[0] == 3:
        return f"move the channels last, `{name}.{turn}`"
    if image.ndim == 3 and 1 in (shape[0], shape[-1]):
        one = f"{name}[..., 0]" if shape[-1] == 1 else f"{name}[0]"
        return f"it is grayscale, pass `{stack.format(one)}` if the model was trained on grayscale images"
    return "pass the result of env.render()"


def unlike_training(shape: Sequence[int], size: int, trained: tuple[int, int] | None) -> str | None:
    """How resizing an image of this height and width to (size, size) distorts it compared with the training frames,
    None if it does not. ``trained``: height and width of the training frames, assumed square if unknown."""
    (height, width), (rows, columns) = shape, trained or (size, size)
    frames = f"training frames had {rows}×{columns}" if trained else "training frames are assumed to be square"
    if abs(width * rows / (height * columns) - 1) > 0.02:
        return f"an image of {height}×{width} pixels (height × width) is stretched: {frames}; crop it alike"
    if height < min(size, rows) or width < min(size, columns):
        return f"an image of {height}×{width} pixels is enlarged to {size}×{size}: {frames}; render it larger"
    return None
