"""Small images of the frames whose latents the bank holds, in its order, as one image: a grid, row by row."""

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from atlas_wm.errors import UserError, reason
from atlas_wm.images import reduce_frames
from atlas_wm.runs.files import write_atomically
from atlas_wm.runs.folder import BANK_FRAMES

MOST_SIDE = 64  # px of an image
MOST_PIXELS = 2**26  # of the grid, checked before it is decoded


def save_frames(frames: Iterable[Tensor], folder: Path) -> None:
    """From batches of frames, (n, 3, S, S) uint8 each. They are reduced to ``MOST_SIDE`` pixels at most."""
    from PIL import Image

    small = torch.cat([reduce_frames(some.cpu(), min(some.shape[-1], MOST_SIDE)) for some in frames])
    columns = math.isqrt(len(small) - 1) + 1
    rows = -(-len(small) // columns)
    small = torch.cat([small, small.new_zeros(rows * columns - len(small), *small.shape[1:])])
    grid = small.unflatten(0, (rows, columns)).permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
    with write_atomically(folder / BANK_FRAMES) as temporary:
        Image.fromarray(grid.numpy()).save(temporary, "WEBP", lossless=True, quality=100)


def load_frames(folder: Path, count: int) -> Tensor | None:
    """The images of a bank of ``count`` points, (count, 3, S, S) uint8; None where the folder has none."""
    from PIL import Image

    path, columns = folder / BANK_FRAMES, math.isqrt(count - 1) + 1
    if not path.exists():
        return None
    remedy = f"delete it and make it again with `atlas bank {folder} --frames`"
    try:
        with Image.open(path, formats=["WEBP"]) as image:
            width, height = image.size
            side = width // columns
            if width * height > MOST_PIXELS or (columns * side, -(-count // columns) * side) != (width, height):
                raise ValueError(f"an image of {width} × {height} px is no grid of {count} frames")
            grid = torch.from_numpy(np.array(image.convert("RGB")))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} cannot be read ({reason(error)}): {remedy}") from error
    tiles = grid.unflatten(0, (-1, side)).unflatten(2, (columns, side)).permute(0, 2, 4, 1, 3)
    return tiles.flatten(0, 1)[:count].contiguous()
