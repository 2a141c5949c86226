"""What is wrong with something that was handed over as an image, and the code that puts it right."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atlas_wm.errors import UserError, short

WANTED = "an image, an array of shape (height, width, 3) and type uint8"


def not_an_image(frame: Any, name: str) -> str | None:
    """What it is instead of an image, and what to do; None where it may be one."""
    if frame is None:
        return "None: env.render() gives one if the environment was made with render_mode='rgb_array'"
    if isinstance(frame, (str, os.PathLike)):
        return f"the path {short(os.fspath(frame))}: read it first, `atlas_wm.images.read_image({name})`"
    if isinstance(frame, Mapping):
        images = [key for key, value in frame.items() if len(getattr(value, "shape", ())) >= 2]
        which = " or ".join(f"`{name}[{key!r}]`" for key in images) or "the image, which none of them seems to be"
        return f"a dict with the keys {short(list(frame))}: pass {which}"
    if isinstance(frame, (list, tuple)):
        return f"a {type(frame).__name__} of {len(frame)}: pass one image alone, as an array"
    mode = getattr(frame, "mode", None)
    if isinstance(mode, str) and hasattr(frame, "convert") and mode != "RGB":  # of Pillow
        return f"a {mode} image: pass `{name}.convert('RGB')`"
    return None


def from_array(frame: Any, name: str) -> Tensor:
    """A copy of anything that NumPy takes for an array of numbers."""
    try:
        array = np.array(frame)  # a copy: any strides, writable
        if array.dtype.kind not in "biufc":
            raise TypeError
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
    except Exception:  # whatever an object makes of being taken for an array
        raise UserError(f"{name} must be {WANTED}, not {short(frame)} of type {type(frame).__name__}") from None


def uint8_remedy(image: Tensor, name: str, tensor: bool) -> str:
    """How numbers of another type become 0 to 255, judged by their range."""
    to = ".to(torch.uint8)" if tensor else ".astype(np.uint8)"
    if image.dtype == torch.bool:
        return f"pass `{name}{to} * 255` if True is white"
    if image.is_complex() or image.numel() == 0:
        return "it holds complex numbers" if image.is_complex() else "it is empty"
    if not bool(image.isfinite().all()):
        return "it holds NaN or infinity, find out where they come from first"
    low, high = (float(end) for end in image.double().aminmax())
    if image.is_floating_point() and low >= 0 and high <= 1:
        return f"its values lie in [0, 1], pass `({name} * 255).round(){to}`"
    if image.is_floating_point() and low >= -1 and high <= 1:
        return f"its values lie in [-1, 1], pass `(({name} + 1) * 127.5).round(){to}`"
    if low >= 0 and high <= 255:
        return f"its values lie in [0, 255], pass `{name}{'.round()' if image.is_floating_point() else ''}{to}`"
    return f"its values go from {low:g} to {high:g}, bring them to 0 (black) to 255 (white) first"


def shape_remedy(image: Tensor, name: str, tensor: bool) -> str:
    """How a uint8 image of another shape becomes (height, width, 3)."""
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
        return f"its fourth channel seems to be transparency, leave it out: `{alpha}`"
    if image.ndim == 3 and shape[0] == 3:
        return f"put colour last, `{name}.{turn}`"
    if image.ndim == 3 and 1 in (shape[0], shape[-1]):
        one = f"{name}[..., 0]" if shape[-1] == 1 else f"{name}[0]"
        return f"it is grayscale, pass `{stack.format(one)}` if the model was trained on grayscale images"
    return "pass what env.render() gives"


def unlike_training(shape: Sequence[int], size: int, trained: tuple[int, int] | None) -> str | None:
    """What reducing an image of this height and width to (size, size) does to it and did not do to the training
    frames, None: nothing. ``trained``: their height and width, taken to be square where they are not known."""
    (height, width), (rows, columns) = shape, trained or (size, size)
    frames = f"training frames had {rows}×{columns}" if trained else "training frames are taken to be square"
    if abs(width * rows / (height * columns) - 1) > 0.02:
        return (
            f"an image of {height}×{width} pixels (height × width) is stretched: {frames}, crop or render it alike"
        )
    if height < min(size, rows) or width < min(size, columns):
        return f"an image of {height}×{width} pixels is enlarged to {size}×{size}: {frames}, render it larger"
    return None
