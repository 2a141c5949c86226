"""Clips: short windows of an episode, the unit of training."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from atlas_wm.config import ModelConfig, RunInfo, TrainConfig
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.data.frame_cache import FrameCache
from atlas_wm.data.token_cache import TokenCache
from atlas_wm.errors import UserError
from atlas_wm.normalizer import Bounds, Normalizer

log = logging.getLogger(__name__)


class Batch(NamedTuple):
    frames: Tensor  # (B, T, 3, S, S) uint8; cached tokens of a frozen encoder: (B, T, K, w) float16
    actions: Tensor  # (B, T-1, frameskip·A) standardised: the action chunk from each frame to the next

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(t.to(device, non_blocking=device.type == "cuda") for t in self))


class PartOfBatch(NamedTuple):
    """A batch without the frames that the device holds."""

    frames: Tensor  # (m, 3, S, S) uint8: the others, in order
    actions: Tensor  # (B, T-1, frameskip·A)
    rows: Tensor  # (B, T) of all frames

    def complete(self, cache: FrameCache, device: torch.device) -> Batch:
        moved = Batch(self.frames, self.actions).to(device)
        rows = self.rows.numpy()
        held = (rows < cache.rows).reshape(-1)
        order = torch.from_numpy(np.argsort(np.argsort(~held, kind="stable"), kind="stable"))
        frames = torch.cat([cache.read(rows.reshape(-1)[held]), moved.frames])  # the cached ones first
        return Batch(frames[order.to(device)].unflatten(0, rows.shape), moved.actions)


@dataclass(frozen=True)
class ClipIndex:
    """Where clips start: C of them."""

    episode: np.ndarray  # (C,)
    start: np.ndarray  # (C,) row within the episode

    def __len__(self) -> int:
        return len(self.episode)

    def take(self, which: np.ndarray) -> "ClipIndex":
        return ClipIndex(self.episode[which], self.start[which])


def clip_index(lengths: np.ndarray, rows: int, path: str | Path = "the dataset") -> ClipIndex:
    """Every window of ``rows`` rows within an episode. ``path`` is named in the error."""
    counts = np.maximum(lengths - rows + 1, 0)
    if counts.sum() == 0:
        raise UserError(
            f"{path}: no episode has the {rows} rows of a clip (the longest of {len(lengths)} has "
            f"{lengths.max(initial=0)}): collect longer ones, or lower --model.frameskip"
        )
    kind = np.int32 if counts.sum() < 2**31 else np.int64  # half the memory
    episode = np.repeat(np.arange(len(lengths), dtype=kind), counts)
    first = np.repeat((np.cumsum(counts) - counts).astype(kind), counts)
    return ClipIndex(episode, np.arange(counts.sum(), dtype=kind) - first)


def held_out_episodes(episodes: int, config: TrainConfig, groups: np.ndarray | None = None) -> np.ndarray:
    """Episodes for validation when the split is by episodes: a mask (E,), fixed by the split seed.

    ``groups``: the group of each episode (E,), for a split by groups; a group is held out as a whole.
    """
    rng, mask = np.random.default_rng(config.split_seed), np.zeros(episodes, dtype=bool)
    if groups is None:
        mask[rng.permutation(episodes)[: max(1, round(config.holdout * episodes))]] = True
        return mask
    sizes = np.bincount(groups)
    order = rng.permutation(len(sizes))
    away = np.abs(np.cumsum(sizes[order]) - config.holdout * episodes)  # from the wanted number of episodes
    return np.isin(groups, order[: min(int(away.argmin()) + 1, len(sizes) - 1)])


def held_out_of(run: RunInfo, episodes: int) -> np.ndarray:
    """The episodes that a run held out of its dataset: a mask (E,). Splits by groups are recorded in the run."""
    if run.config.train.split != "groups":
        return held_out_episodes(episodes, run.config.train)
    recorded = np.array(run.data.held_out or (), dtype=np.int64)
    if not len(recorded) or recorded.max() >= episodes:
        raise UserError("config.json of the run does not say which episodes its split by groups held out")
    return np.isin(np.arange(episodes), recorded)


def split_clips(
    index: ClipIndex, episodes: int, config: TrainConfig, groups: np.ndarray | None = None
) -> tuple[ClipIndex, ClipIndex]:
    """Training and validation clips. ``groups``: as in :func:`held_out_episodes`."""
    if config.split != "clips":
        held_out = held_out_episodes(episodes, config, groups)[index.episode]
    else:
        order = np.random.default_rng(config.split_seed).permutation(len(index))
        held_out = np.zeros(len(index), dtype=bool)
        held_out[order[: max(1, round(config.holdout * len(index)))]] = True
    parts = index.take(np.flatnonzero(~held_out)), index.take(np.flatnonzero(held_out))
    if not all(len(part) for part in parts):
        lower = "" if len(parts[0]) else f"lower --train.holdout {config.holdout:g}, "
        raise UserError(f"too few episodes to hold some out: {lower}collect more, or use --train.split clips")
    return parts


def fit_normalizer(
    data: EpisodeData, clips: ClipIndex, config: ModelConfig, bounds: Bounds | None = None
) -> Normalizer:
    """Action statistics over the rows of training clips, each row once. ``bounds``: the task's action bounds."""
    first = data.offsets[clips.episode] + clips.start
    edges = np.zeros(len(data.actions) + 1, dtype=np.int64)
    np.add.at(edges, first, 1)
    np.add.at(edges, first + config.clip_rows - 1, -1)  # the action at the last frame leaves the clip
    actions = data.actions[np.cumsum(edges[:-1]) > 0]
    normalizer = Normalizer.fit(actions, bounds)
    share = normalizer.outside(actions)
    if share > 0:
        log.warning(
            "%.1f %% of the training actions lie outside the action bounds %s to %s of %s, which plans are clipped "
            "to: if they are wrong, set action_bounds in the task",
            *(100 * share, normalizer.low, normalizer.high, data.task.name),
        )
    return normalizer


class ClipDataset(torch.utils.data.Dataset[Batch]):
    """Clips by index. The loader asks for a whole batch at once."""

    def __init__(
        self,
        data: EpisodeData,
        clips: ClipIndex,
        normalizer: Normalizer,
        config: ModelConfig,
        cache: TokenCache | FrameCache | None = None,
        cached_rows: int = 0,
    ):
        """``cache``: frames, or tokens of a frozen encoder, to read instead of the data. ``cached_rows``: the first
        rows, whose frames are not read, because the device holds them; then items are :class:`PartOfBatch`."""
        self.data, self.clips, self.normalizer, self.config, self.cache = data, clips, normalizer, config, cache
        self.cached_rows = cached_rows

    def __len__(self) -> int:
        return len(self.clips)

    @property
    def on_device(self) -> bool:
        """Whether batches come from the memory of the device."""
        return isinstance(self.cache, FrameCache)

    def __getitems__(self, which: list[int]) -> Any:
        clips = self.clips.take(np.asarray(which))
        rows = (self.data.offsets[clips.episode] + clips.start)[:, None] + np.arange(self.config.clip_rows - 1)
        actions = self.normalizer.apply(torch.from_numpy(self.data.actions[rows]))  # (B, 15, A)
        chunks = actions.unflatten(1, (self.config.clip_frames - 1, self.config.frameskip)).flatten(2)
        of_frames = np.c_[rows[:, :: self.config.frameskip], rows[:, -1] + 1]  # (B, T)
        if self.cached_rows:
            others = of_frames[of_frames >= self.cached_rows]
            none = torch.empty(0, 3, self.data.image_size, self.data.image_size, dtype=torch.uint8)
            frames = self.data.frames_of(others) if len(others) else none
            return PartOfBatch(frames, chunks, torch.from_numpy(of_frames))
        if self.cache is not None:
            return Batch(self.cache.read(of_frames), chunks)
        return Batch(self.data.frames(clips.episode, clips.start, self.config.clip_frames), chunks)
