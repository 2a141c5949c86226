"""Frames from disk: only the rows that are asked for are read and decoded.

stable-worldmodel's readers fetch every row a clip spans (20 of them, to use 4). Its HDF5 and Lance layouts are read
row by row here; any other format goes through its own reader.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


class PixelReader(Protocol):
    def read(self, episodes: np.ndarray, starts: np.ndarray, count: int, stride: int) -> Tensor:
        """``count`` frames, ``stride`` rows apart, from each (episode, start): (B·count, 3, H, W) uint8."""


class _Rows(ABC):
    """A reader by row numbers. Handles are opened in the process that uses them."""

    def __init__(self, path: Path, offsets: np.ndarray):
        self.path, self.offsets = path, offsets
        self._handle: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None}

    def read(self, episodes: np.ndarray, starts: np.ndarray, count: int, stride: int) -> Tensor:
        rows = (self.offsets[episodes] + starts)[:, None] + stride * np.arange(count)
        return self._read_rows(rows.reshape(-1))

    @abstractmethod
    def _read_rows(self, rows: np.ndarray) -> Tensor:
        """(N,) row numbers, in any order and with repetitions, → (N, 3, H, W) uint8."""


class HDF5Pixels(_Rows):
    def _read_rows(self, rows: np.ndarray) -> Tensor:
        if self._handle is None:
            import h5py
            import hdf5plugin  # noqa: F401  registers the compression filters of published files

            self._handle = h5py.File(self.path, "r", swmr=True)["pixels"]
        column = self._handle
        frames = np.empty((len(rows), *column.shape[1:]), np.uint8)
        for place, row in enumerate(rows.tolist()):
            column.read_direct(frames, np.s_[row], np.s_[place])
        return torch.from_numpy(frames).permute(0, 3, 1, 2)


class LancePixels(_Rows):
    def _read_rows(self, rows: np.ndarray) -> Tensor:
        from torchvision.io import ImageReadMode, decode_jpeg

        if self._handle is None:
            import lance

            self._handle = lance.dataset(str(self.path))
        distinct, place = np.unique(rows, return_inverse=True)
        blobs = self._handle.take(distinct.tolist(), columns=["pixels"])["pixels"].to_pylist()
        coded = [torch.frombuffer(bytearray(blob), dtype=torch.uint8) for blob in blobs]
        # In the order asked for before decoding: the coded frames are small, the decoded ones are not.
        return torch.stack(decode_jpeg([coded[i] for i in place.tolist()], mode=ImageReadMode.RGB))


class HarnessPixels:
    """Any other format, through stable-worldmodel's own reader, opened with ``frameskip`` = stride."""

    def __init__(self, reader: Any):
        self.reader = reader

    def read(self, episodes: np.ndarray, starts: np.ndarray, count: int, stride: int) -> Tensor:
        chunks = self.reader.load_chunk(episodes, starts, starts + stride * (count - 1) + 1)
        return torch.cat([torch.as_tensor(chunk["pixels"])[:count] for chunk in chunks])
