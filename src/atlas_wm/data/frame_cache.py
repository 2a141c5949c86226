"""The frames of a dataset in memory, or as many as fit: training reads these from disk only once.

Most of a frame of a simulated task is background. A frame is stored, without loss, as the tiles that differ from
the background: a few kilobytes instead of 150.
"""

import logging
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from atlas_wm.data.dataset import EpisodeData
from atlas_wm.data.loader import make_loader
from atlas_wm.parallel.devices import free_memory

log = logging.getLogger(__name__)
LARGEST_TILE = 16  # pixels on a side: the largest divisor of the frame's side up to it
TILE_INDEX = torch.int32  # a frame of 182 × 182 or more may have more tiles than int16 counts
SAMPLE = 256  # frames to estimate the background and the memory from
AT_ONCE = 256  # frames read together
LEAST_PART = 0.05  # of the frames: a smaller part saves little
SHARE = 0.3  # of the free memory; building the cache takes twice as much for a moment


class FrameCache:
    """The first R frames of a dataset, 3 × S × S, as n tiles that differ from the background, frame by frame."""

    def __init__(self, background: Tensor, tile: int, counts: np.ndarray, indices: Tensor, tiles: Tensor):
        self.background = background  # (K, 3·t²) uint8, K tiles of t × t pixels
        self.tile = tile
        self.counts = counts  # (R,) tiles of each frame
        self.first = np.cumsum(counts) - counts  # (R,)
        self.indices, self.tiles = indices, tiles  # (n,) int32: which of the K; (n, 3·t²) uint8

    @property
    def rows(self) -> int:
        return len(self.counts)

    @property
    def bytes(self) -> int:
        return self.tiles.nbytes + self.indices.nbytes

    def read(self, rows: np.ndarray) -> Tensor:
        """The frames of rows of any shape: (..., 3, S, S) uint8 on the device."""
        flat = rows.reshape(-1)
        counts = self.counts[flat]
        frame = np.repeat(np.arange(len(flat)), counts)
        within = np.arange(len(frame)) - np.repeat(np.cumsum(counts) - counts, counts)
        chosen = np.stack([np.repeat(self.first[flat], counts) + within, frame])
        device = self.tiles.device
        pinned = torch.from_numpy(chosen)
        which, frame_of = (pinned.pin_memory() if device.type == "cuda" else pinned).to(device, non_blocking=True)
        frames = self.background.repeat(len(flat), 1, 1)  # (N, K, 3·t²)
        frames[frame_of, self.indices[which].long()] = self.tiles[which]
        return untiled(frames, self.tile).unflatten(0, rows.shape)


def tiled(frames: Tensor, tile: int) -> Tensor:
    """(N, 3, S, S) → (N, K, 3·t²)"""
    parts = frames.unflatten(3, (-1, tile)).unflatten(2, (-1, tile))  # (N, 3, S/t, t, S/t, t)
    return parts.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def untiled(tiles: Tensor, tile: int) -> Tensor:
    """The inverse: (N, K, 3·t²) → (N, 3, S, S)"""
    side = round(tiles.shape[1] ** 0.5)
    parts = tiles.unflatten(2, (3, tile, tile)).unflatten(1, (side, side))  # (N, S/t, S/t, 3, t, t)
    return parts.permute(0, 3, 1, 4, 2, 5).reshape(len(tiles), 3, side * tile, side * tile)


def cache_on_device(
    data: EpisodeData,
    device: torch.device,
    workers: int = 0,
    *,
    always: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> FrameCache | None:
    """Cache every frame of the dataset, unless ``always`` only the first rows that fit. Returns None, and logs why,
    where too few do. ``workers``: processes that read."""
    rows, size = len(data.actions), data.image_size
    tile = next(t for t in range(LARGEST_TILE, 0, -1) if size % t == 0)
    sample = data.frames_of(np.sort(np.random.default_rng(0).permutation(rows)[:SAMPLE])).to(device)
    background = tiled(sample, tile).median(dim=0).values  # (K, 3·t²)
    share = (tiled(sample, tile) != background).any(dim=-1).float().mean().item()
    needed = int(1.1 * share * rows * (background.nbytes + TILE_INDEX.itemsize * len(background)))
    free = free_memory(device)
    fitting = 1.0 if always else min(1.0, SHARE * free / max(needed, 1))
    if fitting < LEAST_PART:
        log.info("frames stay on disk: in memory they would take %.1f of %.1f GB free", needed / 1e9, free / 1e9)
        return None
    rows, total = int(fitting * rows), rows
    counts, indices, tiles = np.zeros(rows, np.int64), [], []
    done = 0
    for frames in _in_order(data, rows, workers):
        parts = tiled(frames.to(device, non_blocking=True), tile)
        differs = (parts != background).any(dim=-1)  # (n, K)
        counts[done : done + len(frames)] = differs.sum(dim=1).cpu().numpy()
        indices.append(differs.nonzero()[:, 1].to(TILE_INDEX))
        tiles.append(parts[differs])
        done += len(frames)
        on_progress(done, rows)
    cache = FrameCache(background, tile, counts, torch.cat(indices), torch.cat(tiles))
    each, whole = f"{cache.bytes / rows / 1e3:.0f}", f"{background.numel() / 1e3:.0f}"
    taken = f"{cache.bytes / 1e6:.0f} MB" if cache.bytes < 1e9 else f"{cache.bytes / 1e9:.1f} GB"
    smaller = f" ({each} kB each instead of {whole})" if each != whole else ""
    log.info("fast path: %d of %d frames in memory, %s%s", rows, total, taken, smaller)
    return cache


class _Frames(Dataset[Tensor]):
    def __init__(self, data: EpisodeData):
        self.data = data

    def __getitems__(self, rows: np.ndarray) -> Tensor:
        return self.data.frames_of(rows)


def _in_order(data: EpisodeData, rows: int, workers: int) -> Iterator[Tensor]:
    pieces = np.split(np.arange(rows), range(AT_ONCE, rows, AT_ONCE))
    workers = min(workers, len(pieces) // 4)  # starting processes takes longer than reading a few pieces
    return iter(make_loader(_Frames(data), pieces, workers, pin=False, generator=torch.Generator()))
