"""A dataset ready for training: its clips, its caches, and the batches that training and validation see."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atlas_wm.config import DataInfo, RunConfig, RunInfo, TrainConfig
from atlas_wm.data.card import check_card
from atlas_wm.data.clips import (
    ClipDataset,
    ClipIndex,
    clip_index,
    fit_normalizer,
    held_out_episodes,
    split_clips,
)
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.data.frame_cache import AT_ONCE, FrameCache, cache_on_device
from atlas_wm.data.groups import episode_groups, with_variants
from atlas_wm.data.loader import EpochBatches
from atlas_wm.data.stream import BATCHNORM, HELD_OUT, STEP, BatchStream, Requests, loader_processes
from atlas_wm.data.token_cache import TokenCache, token_bytes, worth_caching, write_tokens
from atlas_wm.errors import UserError
from atlas_wm.normalizer import Normalizer
from atlas_wm.parallel.processes import from_main, is_main, wait_for_all, world_size
from atlas_wm.rng import TrainRng
from atlas_wm.tasks import Task, get_task_of

log = logging.getLogger(__name__)
GROUPED = 0.1  # of the episodes, at least, in a dataset with groups; a few pairs may be alike by chance
MOST_COMPARED = 500  # held-out episodes that are compared with all others
BANK_FRAMES, FRAMES_AT_ONCE = 1500, 50
DEMONSTRATION_FRAMES = 10_000
IMAGES_FITTED, IMAGES_JUDGED = 4000, 4000  # frames of the image bank, at most
PROBE_FITTED, PROBE_JUDGED = 2000, 500  # frames, at most
VALIDATION_BATCHES = 4
TOKENS = "tokens.f16"  # in the run folder while it is trained


@dataclass
class TrainingSet:
    data: EpisodeData
    training: ClipIndex
    validation: ClipIndex
    config: RunConfig
    normalizer: Normalizer  # fitted on the training clips
    info: DataInfo
    cache: TokenCache | FrameCache | None = field(default=None, init=False)
    part: FrameCache | None = field(default=None, init=False)  # of the frames, where not all fit the device

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.config.train.steps or self.config.train.epochs * self.steps_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        return len(self.training) // self.config.train.batch

    @property
    def caches_tokens(self) -> bool:
        return isinstance(self.cache, TokenCache)

    def build_cache(
        self,
        device: torch.device,
        folder: Path,
        *,
        encode: Callable[[Tensor], Tensor] | None = None,
        tokens: bool | None = None,
        on_read: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Read every frame once, where training would otherwise read most frames more than once.

        ``encode``: a frozen encoder, (n, 3, S, S) uint8 frames → (n, K, w) tokens. They go to a file in ``folder``.
        Without ``encode``, as many frames as fit go to the memory of the device (MPS, which was not tried, gets
        none). ``tokens``: whether the interrupted run that is resumed caches tokens; None: the settings decide.
        ``on_read(done, total)`` counts frames.
        """
        self._order()  # an error if the clips do not fill a batch: now, not after reading
        if encode is not None:
            self.cache = self._cache_tokens(folder / TOKENS, encode, tokens, on_read)
        elif device.type != "mps":
            if self._frames_read >= self.info.rows:
                # Reading them once drew this number: the weights stay the same, and are so with any cache_frames.
                torch.empty((), dtype=torch.int64).random_()
            found = self._cache_frames(device, on_read)
            complete = found is None or found.rows == self.info.rows
            self.cache, self.part = (found, None) if complete else (None, found)

    def remove_cache(self) -> None:
        """Delete the token file of a finished run."""
        if isinstance(self.cache, TokenCache):
            self.cache.path.unlink()

    def batches(self, start: int, device: torch.device) -> BatchStream:
        """This process's part of every training batch after step ``start``, on the device, and the samples that
        validations see."""
        settings = self.config.train
        samples = {BATCHNORM: self._sampled(self.training, settings.batchnorm_batches)}
        samples[HELD_OUT] = self._sampled(self.validation, VALIDATION_BATCHES)
        requests = Requests(self._order(start), samples, self.validates_after)
        held = self.part.rows if self.part else 0
        training, validation = (self._dataset(clips, held) for clips in (self.training, self.validation))
        sets = {STEP: training, BATCHNORM: training, HELD_OUT: validation}
        return BatchStream(sets, requests, self._workers(device), device, self.part)

    def validates_after(self, step: int) -> bool:
        """Whether training validates after this step (from 1)."""
        settings = self.config.train
        logged = step % settings.log_every == 0
        return step == self.steps or (logged and step % settings.validate_every < settings.log_every)

    def _workers(self, device: torch.device) -> int:
        settings = self.config.train
        if isinstance(self.cache, FrameCache):
            return 0
        if settings.workers is None and device.type != "cuda":  # the cores train
            return 0
        item = 2 * int(np.prod(self.config.model.latent_shape)) if self.cache else self._frame_bytes
        clips = -(-settings.batch // world_size())
        return loader_processes(settings.workers, clips * self.config.model.clip_frames * item)

    def _sampled(self, clips: ClipIndex, count: int) -> list[list[int]]:
        """The clips of the first ``count`` batches of a fixed shuffle. Fewer batches where the clips end: all count
        alike, so an incomplete one is left out unless it is the only one."""
        size = self.config.train.batch
        order = np.random.default_rng([self.config.train.seed, TrainRng.VALIDATION_CLIPS]).permutation(len(clips))
        parts = [order[first : first + size].tolist() for first in range(0, min(count * size, len(order)), size)]
        return [part for part in parts if len(part) > 1 and len(part) == len(parts[0])]

    def clips_of_step(self, step: int) -> list[dict[str, Any]]:
        """All clips of a step (from 1): where each starts, and whether its inputs are finite."""
        which = self._order().of_step(step)
        batch = self._dataset(self.training).__getitems__(which)
        inputs = [t.flatten(1).isfinite().all(dim=1) for t in batch if t.is_floating_point()]
        finite = torch.stack(inputs).all(dim=0).tolist()
        clips = self.training.take(np.asarray(which))
        return [
            {"episode": int(e), "step": int(s), "row": int(self.data.offsets[e] + s), "finite": ok}
            for e, s, ok in zip(clips.episode, clips.start, finite, strict=True)
        ]

    def sample_frames(self, count: int = BANK_FRAMES) -> Iterator[Tensor]:
        """Different frames of training clips, always the same random choice: batches (n, 3, S, S) uint8."""
        return self._batches_of(self.sample_rows(count))

    def sample_rows(self, count: int = BANK_FRAMES) -> np.ndarray:
        """The rows of these frames, in the order of the latent bank."""
        return np.random.default_rng(0).permutation(self._rows(self.training))[:count]

    def demonstrations(self, most: int = DEMONSTRATION_FRAMES) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Training episodes, always the same random choice, with ``most`` frames together at most.

        In pieces of an episode: frames (n, 3, S, S) uint8, one action chunk apart; the standardised chunks from
        each to the next, (n, frameskip·A), zero after the last frame of an episode; the number of the episode.
        """
        data, rng = self.data, np.random.default_rng(0)
        for episode in rng.permutation(np.unique(self.training.episode)).tolist():
            chunks, left_over = divmod(int(data.lengths[episode]) - 1, data.frameskip)
            chunks, start = min(chunks, most - 1), int(rng.integers(left_over + 1))
            rows = data.offsets[episode] + start + np.arange(chunks * data.frameskip)
            standardised = self.normalizer.apply(torch.from_numpy(data.actions[rows])).reshape(chunks, -1)
            actions = torch.cat([standardised, torch.zeros_like(standardised[:1])])
            for i, part in enumerate(actions.split(FRAMES_AT_ONCE)):
                first = np.array([start + i * FRAMES_AT_ONCE * data.frameskip])
                yield data.frames(np.array([episode]), first, len(part))[0], part, episode
            most -= chunks + 1
            if most < 2:
                break

    def image_frames(self) -> tuple[Iterator[Tensor], Iterator[Tensor]]:
        """What ``ImageBank.of`` takes: frames of training clips, and other frames, of validation clips."""
        fitted, judged = self.probe_rows(IMAGES_FITTED, IMAGES_JUDGED)
        if not len(fitted):  # a small dataset, split by clips: every training frame is in a validation clip too
            fitted = judged
        return self._batches_of(fitted), self._batches_of(judged)

    def probe_rows(
        self, most_fitted: int = PROBE_FITTED, most_judged: int = PROBE_JUDGED
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows of training clips to fit something on, and other rows, of validation clips, to judge it on."""
        rng = np.random.default_rng(0)
        judged = rng.permutation(self._rows(self.validation))[:most_judged]
        fitted = rng.permutation(np.setdiff1d(self._rows(self.training), judged))[:most_fitted]
        return np.sort(fitted), np.sort(judged)

    def _batches_of(self, rows: np.ndarray) -> Iterator[Tensor]:
        for first in range(0, len(rows), FRAMES_AT_ONCE):
            yield self.data.frames_of(rows[first : first + FRAMES_AT_ONCE])

    def inputs_of(self, rows: np.ndarray) -> Tensor:
        """Frames of rows, (n, 3, S, S) uint8; where tokens are cached, the tokens: (n, K, w) float16."""
        return self.data.frames_of(rows) if self.cache is None else self.cache.read(rows)

    def _rows(self, clips: ClipIndex) -> np.ndarray:
        """The rows of all frames of the clips, each once."""
        data, in_clip = self.data, np.zeros(self.info.rows, dtype=bool)
        for frame in range(self.config.model.clip_frames):
            in_clip[data.offsets[clips.episode] + clips.start + frame * data.frameskip] = True
        return np.flatnonzero(in_clip)

    def _dataset(self, clips: ClipIndex, cached_rows: int = 0) -> ClipDataset:
        return ClipDataset(self.data, clips, self.normalizer, self.config.model, self.cache, cached_rows)

    def _order(self, start: int = 0) -> EpochBatches:
        settings = self.config.train
        return EpochBatches(len(self.training), settings.batch, self.steps, settings.seed, start)

    @property
    def _frame_bytes(self) -> int:
        return 3 * self.config.model.encoder.image_size**2

    @property
    def _frames_read(self) -> int:
        """By all steps of the run, without a cache."""
        return self.steps * self.config.train.batch * self.config.model.clip_frames

    def _cache_frames(self, device: torch.device, on_read: Callable[[int, int], None]) -> FrameCache | None:
        settings = self.config.train
        always = settings.cache_frames == "always"
        if settings.cache_frames == "never" or (not always and self._frames_read < self.info.rows):
            return None
        workers = loader_processes(settings.workers, AT_ONCE * self._frame_bytes, spared=0)
        return cache_on_device(self.data, device, workers, always=always, on_progress=on_read)

    def _cache_tokens(
        self,
        path: Path,
        encode: Callable[[Tensor], Tensor],
        decided: bool | None,
        on_read: Callable[[int, int], None],
    ) -> TokenCache | None:
        choice, shape = self.config.train.cache_tokens, (self.info.rows, *self.config.model.latent_shape)
        if decided is None:
            decided = choice == "always" or (
                choice == "auto" and from_main(is_main() and worth_caching(shape, self._frames_read, path.parent))
            )
        if not decided:
            return None
        if is_main() and not (path.exists() and path.stat().st_size == token_bytes(shape)):
            write_tokens(self.data, encode, shape, path, on_read)
        wait_for_all()
        if not path.exists():
            raise UserError(
                f"{path} is not on this machine: put --out on a disk that all machines share, "
                f"or use --train.cache-tokens never"
            )
        return TokenCache(path, shape)


def open_training_set(path: str | Path, task: Task, config: RunConfig) -> TrainingSet:
    data = EpisodeData(path, task, config.model.encoder.image_size, config.model.frameskip)
    check_card(data)
    clips = clip_index(data.lengths, config.model.clip_rows, data.path)
    groups = _groups(data, config.train)
    training, validation = split_clips(clips, len(data.lengths), config.train, groups)
    info = DataInfo(
        path=str(data.path),  # absolute: a run works from any folder
        hash=data.content_hash(),
        episodes=len(data.lengths),
        rows=len(data.actions),
        training_clips=len(training),
        validation_clips=len(validation),
        frame_size=data.frame_size,
        held_out=None if groups is None else _numbers(held_out_episodes(len(groups), config.train, groups)),
    )
    normalizer = fit_normalizer(data, training, config.model, task.action_bounds)
    return TrainingSet(data, training, validation, config, normalizer, info)


def open_training_set_of(info: RunInfo, run: str | Path, data: str | Path | None) -> TrainingSet:
    """What a run was trained on; data: where it is now, None: where it was."""
    training_set = open_training_set(data or info.data.path, get_task_of(info), info.config)
    if training_set.info.hash != info.data.hash:
        raise UserError(
            f"{run} was trained on data with hash {info.data.hash}, "
            f"{training_set.info.path} has {training_set.info.hash}: pass the --data it was trained on"
        )
    return training_set


def _groups(data: EpisodeData, train: TrainConfig) -> np.ndarray | None:
    """The group of each episode, for a split by groups. A split by episodes that tears groups apart is reported."""
    if train.split == "clips":
        return None
    if train.split == "groups":
        groups = episode_groups(data)
        variants = with_variants(groups)
        if variants.mean() < GROUPED:
            raise UserError(
                f"{data.path}: --train.split groups needs groups of episodes with nearly equal actions, but "
                f"{variants.sum()} of {len(groups)} episodes are in one: use --train.split episodes"
            )
        return groups
    held_out = held_out_episodes(len(data.lengths), train)
    sample = np.random.default_rng(0).permutation(np.flatnonzero(held_out))[:MOST_COMPARED]
    groups = episode_groups(data, sample)
    seen = np.isin(groups[sample], groups[~held_out])
    if seen.mean() >= GROUPED:
        log.warning(
            "%d of %d held-out episodes have variants with nearly equal actions among the training episodes: hold "
            "out whole groups with --train.split groups",
            *(seen.sum(), len(seen)),
        )
    return None


def _numbers(mask: np.ndarray) -> tuple[int, ...]:
    return tuple(np.flatnonzero(mask).tolist())
