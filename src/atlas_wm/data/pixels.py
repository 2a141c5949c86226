"""Frames from disk: only the rows that are asked for are read and decoded.

stable-worldmodel's readers fetch every row a clip spans (20 of them, to use 4). Its HDF5 and Lance layouts are read
row by row here, its videos without the decoder package it asks for; any other format goes through its own reader.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
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
        self._process = 0  # the one that opened the handle: a forked loader process inherits one it must not use

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None}

    def read(self, episodes: np.ndarray, starts: np.ndarray, count: int, stride: int) -> Tensor:
        rows = (self.offsets[episodes] + starts)[:, None] + stride * np.arange(count)
        if self._handle is None or self._process != os.getpid():
            self._handle, self._process = self._open(), os.getpid()
        return self._read_rows(rows.reshape(-1))

    @abstractmethod
    def _open(self) -> Any: ...

    @abstractmethod
    def _read_rows(self, rows: np.ndarray) -> Tensor:
        """(N,) row numbers, in any order and with repetitions, → (N, 3, H, W) uint8."""


class HDF5Pixels(_Rows):
    def _open(self) -> Any:
        import h5py
        import hdf5plugin  # noqa: F401  registers the compression filters of published files

        return h5py.File(self.path, "r")["pixels"]

    def _read_rows(self, rows: np.ndarray) -> Tensor:
        column = self._handle
        frames = np.empty((len(rows), *column.shape[1:]), column.dtype)
        for place, row in enumerate(rows.tolist()):
            column.read_direct(frames, np.s_[row], np.s_[place])
        return torch.from_numpy(frames).movedim(-1, 1)


class LancePixels(_Rows):
    def _open(self) -> Any:
        import lance

        return lance.dataset(str(self.path))

    def _read_rows(self, rows: np.ndarray) -> Tensor:
        from torchvision.io import ImageReadMode, decode_jpeg

        distinct, place = np.unique(rows, return_inverse=True)
        blobs = self._handle.take(distinct.tolist(), columns=["pixels"])["pixels"].to_pylist()
        coded = [torch.frombuffer(bytearray(blob), dtype=torch.uint8) for blob in blobs]
        # In the order asked for before decoding: the coded frames are small, the decoded ones are not.
        return torch.stack(decode_jpeg([coded[i] for i in place.tolist()], mode=ImageReadMode.RGB))


class VideoPixels:
    """One .mp4 an episode, read by OpenCV. stable-worldmodel's reader needs decord, which is not required here."""

    def __init__(self, folder: Path):
        self.folder = folder

    def read(self, episodes: np.ndarray, starts: np.ndarray, count: int, stride: int) -> Tensor:
        clips = zip(episodes.tolist(), starts.tolist(), strict=True)
        frames = [frame for episode, start in clips for frame in self._clip(episode, start, count, stride)]
        return torch.from_numpy(np.stack(frames)).movedim(-1, 1)

    def _clip(self, episode: int, start: int, count: int, stride: int) -> Iterator[np.ndarray]:
        import cv2

        path = self.folder / f"ep_{episode}.mp4"
        video = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])
        video.set(cv2.CAP_PROP_POS_FRAMES, start)
        for step in range(stride * (count - 1) + 1):
            if not video.grab():
                raise OSError(f"{path.name} has no frame {start + step}")
            if step % stride == 0:
                yield video.retrieve()[1][..., ::-1]  # OpenCV puts blue first


class HarnessPixels:
    """Any other format, through stable-worldmodel's own reader, opened with ``frameskip`` = stride."""

    def __init__(self, reader: Any):
        self.reader = reader

    def read(self, episodes: np.ndarray, starts: np.ndarray, count: int, stride: int) -> Tensor:
        chunks = self.reader.load_chunk(episodes, starts, starts + stride * (count - 1) + 1)
        return torch.cat([torch.as_tensor(chunk["pixels"])[:count] for chunk in chunks])
