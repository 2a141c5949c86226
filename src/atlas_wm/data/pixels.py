"""Readers of the image column: they read and decode only the requested rows.

stable-worldmodel's own readers fetch every row that a clip spans (16 rows to use 4). Its HDF5 and Lance layouts are
read row by row here, and its videos without decord. Other formats go through stable-worldmodel's reader.
"""

import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from atlas_wm.data.encoding import gunzip_frame

MOST_THREADS, ROWS_PER_THREAD = 8, 16  # of a process that is no loader process: those have one thread each
MOST_GAP = 16  # frames that are decoded and dropped rather than seeked over


class PixelReader(Protocol):
    def read(self, episodes: np.ndarray, starts: np.ndarray, count: int, stride: int) -> Tensor:
        """``count`` frames, ``stride`` rows apart, from each (episode, start): (B·count, 3, H, W) uint8."""


class RowPixels(ABC):
    """Reads by row number. Each process opens its own handle."""

    def __init__(self, path: str | Path, offsets: np.ndarray, column: str = "pixels"):
        self.path, self.offsets, self.column = path, offsets, column
        self._handle: Any = None
        self._process = 0  # that opened the handle: a forked loader process must not use its parent's

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
        """(N,) row numbers, unordered and possibly repeated → (N, 3, H, W) uint8."""


class HDF5Pixels(RowPixels):
    def _open(self) -> Any:
        import h5py
        import hdf5plugin  # noqa: F401  registers the compression filters of published files

        return h5py.File(self.path, "r")[self.column]

    def _read_rows(self, rows: np.ndarray) -> Tensor:
        column = self._handle
        frames = np.empty((len(rows), *column.shape[1:]), column.dtype)
        if _is_gzip(column):
            threads = min(torch.get_num_threads(), MOST_THREADS, len(rows) // ROWS_PER_THREAD)
            _read_gzip(column, rows, frames, max(1, threads))
        else:
            for i, row in enumerate(rows.tolist()):
                column.read_direct(frames, np.s_[row], np.s_[i])
        return torch.from_numpy(frames).movedim(-1, 1)


def _is_gzip(column: Any) -> bool:
    """Whether every chunk is one frame of bytes behind the gzip filter alone, as `atlas collect` writes it."""
    import h5py

    filters = column.id.get_create_plist()
    only_gzip = (
        column.chunks and filters.get_nfilters() == 1 and filters.get_filter(0)[0] == h5py.h5z.FILTER_DEFLATE
    )
    return bool(only_gzip) and column.chunks == (1, *column.shape[1:]) and column.dtype == np.uint8


def _read_gzip(column: Any, rows: np.ndarray, frames: np.ndarray, threads: int) -> None:
    """Takes half the time of HDF5's own filter, which also lets only one thread work."""
    origin = (0,) * (frames.ndim - 1)

    def read(rows: np.ndarray, frames: np.ndarray) -> None:
        for row, frame in zip(rows.tolist(), frames, strict=True):
            not_compressed, chunk = column.id.read_direct_chunk((row, *origin))
            pixels = np.frombuffer(chunk, np.uint8) if not_compressed else gunzip_frame(chunk, frame.size)
            frame[:] = pixels.reshape(frame.shape)

    if threads == 1:
        read(rows, frames)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, np.array_split(rows, threads), np.array_split(frames, threads)))


class LancePixels(RowPixels):
    """Of the version that the table has now: loader processes open it later."""

    def __init__(self, path: str | Path, offsets: np.ndarray, column: str = "pixels"):
        super().__init__(path, offsets, column)
        self.version: int | None = None
        self.version = self._open().version

    def _open(self) -> Any:
        import lance

        return lance.dataset(str(self.path), version=self.version)

    def _read_rows(self, rows: np.ndarray) -> Tensor:
        from torchvision.io import ImageReadMode, decode_jpeg

        distinct, inverse = np.unique(rows, return_inverse=True)
        blobs = self._handle.take(distinct.tolist(), columns=[self.column])[self.column].to_pylist()
        encoded = [torch.frombuffer(bytearray(blob), dtype=torch.uint8) for blob in blobs]
        # Reorder before decoding: encoded frames are small.
        return torch.stack(decode_jpeg([encoded[i] for i in inverse.tolist()], mode=ImageReadMode.RGB))


class VideoPixels:
    """Episode e starts at frame ``first[e]`` of the video ``files[e]``; several episodes may share a video."""

    def __init__(self, files: Sequence[Path], first: np.ndarray):
        self.files, self.first = files, first
        numbers = {path: number for number, path in enumerate(dict.fromkeys(files))}
        self._file_numbers = np.array([numbers[path] for path in files], np.int64)

    def read(self, episodes: np.ndarray, starts: np.ndarray, count: int, stride: int) -> Tensor:
        frames = (self.first[episodes] + starts)[:, None] + stride * np.arange(count)
        wanted = np.stack([np.repeat(self._file_numbers[episodes], count), frames.reshape(-1)], axis=1)
        distinct, first, inverse = np.unique(wanted, axis=0, return_index=True, return_inverse=True)
        step = np.diff(distinct, axis=0)
        decoded: list[np.ndarray] = []
        # One pass for frames of the same video that lie close together.
        for some in np.split(
            np.arange(len(distinct)), np.flatnonzero((step[:, 0] > 0) | (step[:, 1] > MOST_GAP)) + 1
        ):
            path = self.files[episodes[first[some[0]] // count]]
            decoded += decode_video(path, distinct[some, 1].tolist())
        return torch.from_numpy(np.stack([decoded[i] for i in inverse.reshape(-1).tolist()])).movedim(-1, 1)


def decode_video(path: Path, frames: list[int]) -> list[np.ndarray]:
    """The frames with these increasing numbers, each (H, W, 3) uint8.

    OpenCV decodes them; it has no decoder for AV1, LeRobot's default codec, so AV1 goes to imageio's ffmpeg.
    """
    import cv2

    video = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])
    if int(video.get(cv2.CAP_PROP_FOURCC)) == cv2.VideoWriter.fourcc(*"AV01"):
        return _decode_with_ffmpeg(path, frames, video.get(cv2.CAP_PROP_FPS))
    video.set(cv2.CAP_PROP_POS_FRAMES, frames[0])
    decoded, wanted = [], set(frames)
    for number in range(frames[0], frames[-1] + 1):
        if not video.grab():
            raise OSError(f"{path.name} has no frame {number}")
        if number in wanted:
            decoded.append(video.retrieve()[1][..., ::-1])  # OpenCV returns BGR
    return decoded


def _decode_with_ffmpeg(path: Path, frames: list[int], fps: float) -> list[np.ndarray]:
    from imageio_ffmpeg import get_ffmpeg_exe

    count = frames[-1] - frames[0] + 1
    start = max(0.0, (frames[0] - 0.5) / fps)  # seconds; ffmpeg returns the first frame that is not earlier
    command = [get_ffmpeg_exe(), "-v", "error", "-nostdin", "-threads", "1", "-ss", f"{start:.6f}", "-i", str(path)]
    command += ["-frames:v", str(count), "-fps_mode", "passthrough", "-f", "image2pipe", "-c:v", "ppm", "-"]
    done = subprocess.run(command, capture_output=True)
    decoded, rest = [], memoryview(done.stdout)
    while len(rest):  # each frame is "P6\nWIDTH HEIGHT\n255\n" and its pixels
        header = bytes(rest[:40]).split(b"\n", 3)
        width, height = map(int, header[1].split())
        begin = 40 - len(header[3]) if len(rest) >= 40 else len(rest) - len(header[3])
        end = begin + 3 * width * height
        decoded.append(np.frombuffer(rest[begin:end], np.uint8).reshape(height, width, 3))
        rest = rest[end:]
    if len(decoded) < count:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise OSError(f"{path.name} has no frame {frames[0] + len(decoded)}" + (f" ({said[-1]})" if said else ""))
    return [decoded[number - frames[0]] for number in frames]


class HarnessPixels:
    """Any other format, through stable-worldmodel's reader opened with ``frameskip`` = stride."""

    def __init__(self, reader: Any, column: str = "pixels"):
        self.reader, self.column = reader, column

    def read(self, episodes: np.ndarray, starts: np.ndarray, count: int, stride: int) -> Tensor:
        chunks = self.reader.load_chunk(episodes, starts, starts + stride * (count - 1) + 1)
        return torch.cat([torch.as_tensor(chunk[self.column])[:count] for chunk in chunks])
