"""All batches of a run from one loader: those of its steps and those of its validations, in the order of use.

Loader processes read and decode several batches ahead. On a GPU, batches go through pinned memory, which torch uses
again and again, and are copied while the step before is computed.
"""

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from atlas_wm.data.clips import Batch, ClipDataset
from atlas_wm.data.frame_cache import FrameCache
from atlas_wm.data.loader import PREFETCHED, EpochBatches, make_loader
from atlas_wm.parallel.launch import own_cores, process_info
from atlas_wm.parallel.processes import alone, shard, world_size

log = logging.getLogger(__name__)
STEP, BATCHNORM, HELD_OUT = "step", "batchnorm", "held out"  # what a batch is for
MOST_WORKERS = 16  # 512 JPEG frames of 224×224 take one core 0.15 s
SHARED_MEMORY = Path("/dev/shm")  # where loader processes put batches; a container may have little
Request = tuple[str, list[int]]  # what the batch is for, and its clips


class ClipSets(Dataset[tuple[str, Batch]]):
    """Clips by request."""

    def __init__(self, sets: Mapping[str, ClipDataset]):
        self.sets = sets

    def __getitems__(self, request: Request) -> tuple[str, Batch]:
        purpose, which = request
        return purpose, self.sets[purpose].__getitems__(which)


class Requests:
    """The clips of every step and, after each step for which ``validates`` is true, the samples by purpose."""

    def __init__(
        self, steps: EpochBatches, samples: Mapping[str, list[list[int]]], validates: Callable[[int], bool]
    ):
        self.steps, self.samples, self.validates = steps, samples, validates

    def __iter__(self) -> Iterator[Request]:
        for step, which in enumerate(self.steps, self.steps.first + 1):
            yield STEP, which
            if self.validates(step):
                yield from ((purpose, own_part(w)) for purpose, sample in self.samples.items() for w in sample)


def own_part(which: list[int]) -> list[int]:
    """This process's part of a batch; all of it where some process would get no clip."""
    return shard(which) if len(which) >= world_size() else which


class BatchStream(Iterator[Batch]):
    """Iterates over the batches of the steps, on the device. :meth:`samples` are those of the validation after the
    last one."""

    def __init__(
        self,
        sets: Mapping[str, ClipDataset],
        requests: Requests,
        workers: int,
        device: torch.device,
        part: FrameCache | None = None,
    ):
        """``part``: the frames that the sets leave out."""
        on_device = any(s.on_device for s in sets.values())
        pin = device.type == "cuda" and not on_device
        self.samples_of, self.device, self.part = requests.samples, device, part
        self.aside = torch.cuda.Stream(device) if pin else None
        if self.aside is not None:  # for the cached frames
            self.aside.wait_stream(torch.cuda.current_stream(device))
        self.items = iter(make_loader(ClipSets(sets), requests, workers, pin))

    def __next__(self) -> Batch:
        return self._take(STEP)

    def samples(self, purpose: str) -> Iterator[Batch]:
        """Where some process would get no clip of a batch, every process gets the whole batch and works on it
        ``alone()`` until it asks for the next one."""
        for which in self.samples_of[purpose]:
            batch = self._take(purpose)
            with nullcontext() if len(which) >= world_size() else alone():
                yield batch

    def _take(self, purpose: str) -> Batch:
        """The next batch for the purpose. Skips batches that were not used, such as those of a model without
        BatchNorm."""
        batch = next(batch for found, batch in self.items if found == purpose)
        if self.aside is None:
            return self._moved(batch)
        with torch.cuda.stream(self.aside):
            copied = self._moved(batch)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.aside)
        for tensor in copied:
            tensor.record_stream(current)
        return copied

    def _moved(self, batch: Any) -> Batch:
        return batch.to(self.device) if self.part is None else batch.complete(self.part, self.device)


def loader_processes(wanted: int | None, batch_bytes: int, spared: int = 1) -> int:
    """As many as wanted; None: one per core but those spared for this process. Fewer where their batches do not fit
    shared memory: they would wait forever."""
    count = min(own_cores() - spared, MOST_WORKERS) if wanted is None else wanted
    if not count or not SHARED_MEMORY.exists():
        return count
    free = shutil.disk_usage(SHARED_MEMORY).free // process_info().local_size
    fitting = free // ((PREFETCHED + 1) * batch_bytes)
    if fitting < count:
        log.warning(
            "%d loader processes instead of %d: %s has room for %.2f GB, a batch takes %.2f; enlarge it (docker "
            "run --shm-size)",
            *(fitting, count, SHARED_MEMORY, free / 1e9, batch_bytes / 1e9),
        )
    return min(count, fitting)
