"""Patch tokens of a frozen encoder, computed once for each row and cached in a file during training."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atlas_wm.data.dataset import EpisodeData
from atlas_wm.runs.files import write_atomically

ROWS_AT_ONCE = 64


class TokenCache:
    """Rows of float16 tokens in a memory-mapped file: (R, K, w)."""

    def __init__(self, path: Path, shape: tuple[int, ...]):
        self.path, self.shape = path, shape
        self._map: np.ndarray | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None}  # each loader process opens its own

    def read(self, rows: np.ndarray) -> Tensor:
        """Row numbers of any shape → (…, K, w) float16"""
        if self._map is None:
            self._map = np.memmap(self.path, np.float16, "r", shape=self.shape)
        return torch.from_numpy(self._map[rows])


def token_bytes(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(np.float16).itemsize


def worth_caching(shape: tuple[int, ...], frames_in_training: int, folder: Path) -> bool:
    """Whether a token file saves encoder passes, and fits the disk with 10 % to spare."""
    return frames_in_training > shape[0] and 1.1 * token_bytes(shape) < shutil.disk_usage(folder).free


def write_tokens(
    data: EpisodeData,
    encode: Callable[[Tensor], Tensor],
    shape: tuple[int, ...],
    path: Path,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> TokenCache:
    """encode: (n, 3, S, S) uint8 frames → (n, K, w) tokens."""
    rows = shape[0]
    with write_atomically(path) as temporary:
        tokens = np.memmap(temporary, np.float16, "w+", shape=shape)
        for first in range(0, rows, ROWS_AT_ONCE):
            part = np.arange(first, min(first + ROWS_AT_ONCE, rows))
            tokens[part] = encode(data.frames_of(part)).cpu().numpy()
            on_progress(int(part[-1]) + 1, rows)
        tokens.flush()
    return TokenCache(path, shape)
