"""A run under diagnosis: its frozen model, its data, and the features of frames."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from atlas_wm.data.card import check_task
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.data.states import training_data, training_rows
from atlas_wm.diagnose.simulate import Simulator
from atlas_wm.evaluate.own_demonstrations import demonstration_groups
from atlas_wm.models.bank import flat
from atlas_wm.models.geometry import Scale
from atlas_wm.models.world_model import Features
from atlas_wm.runs.folder import WEIGHTS
from atlas_wm.runs.model import load_model
from atlas_wm.tasks import get_task_of

BANK = 1500  # training frames that distances and novelties refer to (Appendix diagnostic)
FRAMES_PER_BATCH = 256
OnProgress = Callable[[int, int], None]


class FrozenRun:
    """One run: its model, its data, and features of rows and states. Patch-token latents are averaged."""

    def __init__(self, folder: Path, simulator: Simulator, data_path: str | Path | None, device: torch.device):
        self.folder, self.simulator = folder, simulator
        self.model = load_model(folder, device)
        assert self.model.run is not None
        self.info = self.model.run
        encoder = self.info.config.model.encoder
        self.data = EpisodeData(
            data_path or self.info.data.path,
            get_task_of(self.info),
            encoder.image_size,
            self.model.config.frameskip,
        )
        check_task(self.data)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @cached_property
    def data_hash(self) -> str:
        return self.data.content_hash()

    @cached_property
    def groups(self) -> np.ndarray | None:
        """Of demonstrations, as in evaluations."""
        return demonstration_groups(self.data, self.info)

    @cached_property
    def weights_hash(self) -> str:
        return hashlib.sha256((self.folder / WEIGHTS).read_bytes()).hexdigest()[:16]

    @cached_property
    def training(self) -> EpisodeData:
        """The run's training data, from which the bank is drawn."""
        remedy = "move them back, or diagnose on the training data (--data, if they were moved)"
        return training_data(self.folder, self.info, self.data, remedy)

    @cached_property
    def bank_hash(self) -> str:
        return self.training.content_hash()

    @cached_property
    def bank_rows(self) -> np.ndarray:
        """Rows of the training data."""
        rows = training_rows(self.training, self.info)
        return np.sort(np.random.default_rng(0).choice(rows, min(BANK, len(rows)), replace=False))

    @cached_property
    def bank(self) -> Features:
        return self.features(self.training.frames_of(self.bank_rows), self.probed_blocks)

    @cached_property
    def latent_scale(self) -> Scale:
        return scale_of(self.bank.z)

    @cached_property
    def anchor_scale(self) -> Scale:
        return scale_of(self.bank.patch)

    @property
    def probed_blocks(self) -> list[int]:
        """At a quarter, a half and three quarters of the depth: 3, 6 and 9 of 12; none of an encoder without."""
        depth = self.model.encoder.depth
        return sorted({max(1, round(depth * share)) for share in (0.25, 0.5, 0.75)}) if depth else []

    def frames_of_rows(self, rows: np.ndarray) -> Tensor:
        """(n,) dataset rows → (n, 3, S, S) uint8"""
        return self.data.frames_of(rows)

    def frames_of_states(self, states: np.ndarray) -> Tensor:
        """(n, s) states → (n, 3, S, S) uint8, rendered by the environment"""
        return self.simulator.images(self.data.task, states, self.data.image_size)

    @torch.inference_mode()
    def features(self, frames: Tensor, blocks: Sequence[int] = ()) -> Features:
        """(n, 3, S, S) uint8 → features on the CPU, in float32"""
        parts = []
        for batch in frames.split(FRAMES_PER_BATCH):
            found = self.model.features(batch.to(self.device), blocks)
            parts.append([x.cpu() for x in (*found.blocks, found.patch, found.cls, flat(found.z, 1))])
        *by_block, patch, cls, z = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
        return Features(by_block, patch, cls, z)

    @torch.inference_mode()
    def rollout(self, frame: Tensor, actions: np.ndarray) -> Tensor:
        """One frame (1, 3, S, S) and C sequences of raw actions (C, H, frameskip, A) → latents (C, H, d)"""
        standardised = self.model.normalizer.apply(torch.from_numpy(actions).float()).flatten(2).to(self.device)
        z = self.model.encode(frame.to(self.device))
        batches = standardised.split(self.info.config.plan.candidate_chunk or len(standardised))
        return torch.cat([flat(self.model.rollout(z, batch[None])[0], 2).cpu() for batch in batches])


def scale_of(bank: Tensor) -> Scale:
    """The scale of a bank. If all its points are equal, distances are NaN, not 0."""
    scale = Scale.fit(bank)
    return replace(scale, mean_distance=math.nan) if bool((bank == bank[0]).all()) else scale
