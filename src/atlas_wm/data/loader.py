"""The order in which clips are seen: a fresh permutation every epoch, a function of (seed, epoch) alone."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Sampler

from atlas_wm.data.clips import Batch, ClipDataset
from atlas_wm.errors import UserError


class EpochBatches(Sampler[list[int]]):
    """``steps`` batches of clip numbers; the incomplete rest of an epoch is dropped."""

    def __init__(self, clips: int, batch: int, steps: int, seed: int):
        if clips < batch:
            raise UserError(f"{clips} training clips do not fill one batch of {batch}: collect more episodes")
        self.clips, self.batch, self.steps, self.seed = clips, batch, steps, seed

    @property
    def steps_per_epoch(self) -> int:
        return self.clips // self.batch

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.steps):
            epoch, place = divmod(step, self.steps_per_epoch)
            if place == 0:
                order = np.random.default_rng([self.seed, 1, epoch]).permutation(self.clips)
            yield order[place * self.batch : (place + 1) * self.batch].tolist()


def _as_is(batch: Any) -> Batch:
    return batch


def make_loader(dataset: ClipDataset, batches: EpochBatches, workers: int, pin: bool) -> "DataLoader[Any]":
    """A loader whose items are whole :class:`Batch` es."""
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=_as_is,
        pin_memory=pin,
        persistent_workers=workers > 0,
        prefetch_factor=4 if workers else None,
    )
