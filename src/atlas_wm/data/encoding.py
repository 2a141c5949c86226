"""Collected frames as they are stored. The process that renders a frame also compresses it, so the process that
writes the dataset handles a few kilobytes per frame instead of 150."""

import io
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from atlas_wm.errors import UserError

GZIP_LEVEL = 3  # higher levels save up to a third of the bytes and take twice the time to read (PushT)
JPEG_QUALITY = 95  # stable-worldmodel's


@dataclass(frozen=True)
class EncodedFrames:
    """An image column of which each row is compressed."""

    frames: list[bytes]
    shape: tuple[int, ...]  # of each frame: (H, W, C)

    def __len__(self) -> int:
        return len(self.frames)


Column = np.ndarray | EncodedFrames  # arrays are (steps, ...)
Episode = dict[str, Column]
FrameEncoder = Callable[[np.ndarray], bytes]


def encode_images(episode: Mapping[str, Column], encode: FrameEncoder) -> Episode:
    """The episode with its image columns, (steps, H, W, C) uint8, compressed."""
    return {
        name: EncodedFrames([encode(frame) for frame in values], values.shape[1:])
        if isinstance(values, np.ndarray) and values.dtype == np.uint8 and values.ndim == 4
        else values
        for name, values in episode.items()
    }


def common_shape(column: str, shapes: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of all frames of a column."""
    first, *others = dict.fromkeys(shapes)
    if others:
        raise UserError(f"column {column!r} has frames of {first} and of {others[0]}: render all in one size")
    return first


def gzip_frame(frame: np.ndarray) -> bytes:
    """A chunk of one frame as HDF5's gzip filter stores it. Without loss."""
    return zlib.compress(frame.tobytes(), GZIP_LEVEL)


def gunzip_frame(chunk: bytes, size: int) -> np.ndarray:
    """The ``size`` bytes of a frame. A damaged chunk raises an error: it contains a checksum."""
    stream = zlib.decompressobj()
    pixels = stream.decompress(chunk, size + 1)  # a damaged chunk may be of any size
    if len(pixels) != size or not stream.eof:
        raise ValueError(f"a frame is not {size} bytes long")
    return np.frombuffer(pixels, np.uint8)


def jpeg_frame(frame: np.ndarray) -> bytes:
    """The same bytes as stable-worldmodel's Lance writer. With loss."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(frame.squeeze(-1) if frame.shape[-1] == 1 else frame).save(
        file, format="JPEG", quality=JPEG_QUALITY
    )
    return file.getvalue()
