"""The order of clips: a new permutation every epoch, a function of (seed, epoch) alone."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from atlas_wm.errors import UserError
from atlas_wm.parallel.processes import alone, shard, world_size
from atlas_wm.parallel.workers import quiet_start
from atlas_wm.rng import TrainRng

PREFETCHED = 2  # batches that a loader process reads ahead


class EpochBatches(Sampler[list[int]]):
    """Clip indices of every batch from step ``first`` (from 0) to ``steps``. The last, incomplete batch of an epoch
    is dropped.

    ``batch`` counts the clips of all processes together. Each process gets its part, and the order does not depend
    on the number of processes.
    """

    def __init__(self, clips: int, batch: int, steps: int, seed: int, first: int = 0):
        if clips < batch:
            raise UserError(
                f"{clips} training clips do not fill one batch of {batch}: "
                f"collect more episodes, or lower --train.batch or --train.holdout"
            )
        if batch < world_size():
            raise UserError(
                f"a batch of {batch} has less than one clip for each of {world_size()} processes: "
                f"raise --train.batch, which counts the clips of all processes, or start fewer processes"
            )
        self.clips, self.batch, self.steps, self.seed, self.first = clips, batch, steps, seed, first

    @property
    def steps_per_epoch(self) -> int:
        return self.clips // self.batch

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.first, self.steps):
            epoch, position = divmod(step, self.steps_per_epoch)
            if position == 0 or step == self.first:
                order = np.random.default_rng([self.seed, TrainRng.SHUFFLE, epoch]).permutation(self.clips)
            yield shard(order[position * self.batch : (position + 1) * self.batch].tolist())

    def of_step(self, step: int) -> list[int]:
        """The clip indices of one step (from 1), for all processes."""
        with alone():
            return next(iter(EpochBatches(self.clips, self.batch, step, self.seed, first=step - 1)))


def _as_is(batch: Any) -> Any:
    return batch


class _ErrorsAsItems(Dataset[Any]):
    """Returns a UserError as an item: raised in a loader process, it would arrive wrapped in a traceback."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __getitems__(self, request: Any) -> Any:
        try:
            return self.dataset.__getitems__(request)
        except UserError as error:
            return error


class _Loader(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        with quiet_start():
            batches = super().__iter__()
        for batch in batches:
            if isinstance(batch, UserError):
                raise batch
            yield batch


def make_loader(
    dataset: Dataset[Any],
    requests: Iterable[Any],
    workers: int,
    pin: bool,
    generator: torch.Generator | None = None,
) -> "DataLoader[Any]":
    """A loader that yields ``dataset.__getitems__(request)`` for every request, in order.

    ``generator``: it draws one number, from torch's global one if None.
    """
    return _Loader(
        _ErrorsAsItems(dataset),
        batch_sampler=requests,
        num_workers=workers,
        collate_fn=_as_is,
        pin_memory=pin,
        generator=generator,
        persistent_workers=workers > 0,
        prefetch_factor=PREFETCHED if workers else None,
    )
