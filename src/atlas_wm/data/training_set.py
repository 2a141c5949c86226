"""A dataset made ready for training: its clips, what is held out, and how its actions are standardised."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from atlas_wm.config import DataInfo, RunConfig
from atlas_wm.data.clips import ClipIndex, clip_index, fit_normalizer, split_clips
from atlas_wm.data.dataset import EpisodeData, check_card
from atlas_wm.normalizer import Normalizer
from atlas_wm.tasks import Task

BANK_FRAMES, FRAMES_AT_ONCE = 1500, 50


@dataclass(frozen=True)
class TrainingSet:
    data: EpisodeData
    training: ClipIndex
    validation: ClipIndex
    clip_frames: int  # of each clip, frameskip rows apart
    normalizer: Normalizer  # fitted on the training part
    info: DataInfo

    def sample_frames(self, count: int = BANK_FRAMES) -> Iterator[Tensor]:
        """Different frames of training clips, drawn at random but always the same: batches (n, 3, S, S) uint8."""
        data, clips = self.data, self.training
        shown = np.zeros(self.info.rows, dtype=bool)
        for frame in range(self.clip_frames):
            shown[data.offsets[clips.episode] + clips.start + frame * data.frameskip] = True
        rows = np.random.default_rng(0).permutation(np.flatnonzero(shown))[:count]
        for first in range(0, len(rows), FRAMES_AT_ONCE):
            yield data.frames_of(rows[first : first + FRAMES_AT_ONCE])


def open_training_set(path: str | Path, task: Task, config: RunConfig) -> TrainingSet:
    data = EpisodeData(path, task, config.model.encoder.image_size, config.model.frameskip)
    check_card(data)
    clips = clip_index(data.lengths, config.model.clip_rows, data.path)
    training, validation = split_clips(clips, len(data.lengths), config.train)
    info = DataInfo(
        path=str(data.path),  # whole: a run works from any folder
        hash=data.content_hash(),
        episodes=len(data.lengths),
        rows=len(data.actions),
        training_clips=len(training),
        validation_clips=len(validation),
        frame_size=data.frame_size,
    )
    normalizer = fit_normalizer(data, training, config.model, task.action_bounds)
    return TrainingSet(data, training, validation, config.model.clip_frames, normalizer, info)
