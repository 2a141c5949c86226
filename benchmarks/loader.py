"""Clips per second from disk: stable-worldmodel's own readers and ours, on the same files, in one process.

Both deliver the same uint8 frames of the same clips with the same loader settings; the ratio is what counts, for
the machine may be shared.

    python benchmarks/loader.py [--episodes 100] [--workers 0]
"""

import argparse
import resource
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Subset

from atlas_wm.data.clips import ClipDataset, ClipIndex
from atlas_wm.data.collect import collect
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.data.loader import make_loader
from atlas_wm.normalize import Normalizer
from atlas_wm.recipes import paper
from atlas_wm.tasks import get_task

BATCH, BATCHES, ROUNDS = 64, 12, 3


def theirs(path: Path, which: np.ndarray, workers: int) -> "DataLoader[Any]":
    from stable_worldmodel.data import load_dataset

    dataset = load_dataset(str(path), frameskip=5, num_steps=4, keys_to_load=["pixels", "action"])
    return DataLoader(Subset(dataset, which.tolist()), batch_size=BATCH, num_workers=workers)


def ours(path: Path, clips: ClipIndex, workers: int) -> "DataLoader[Any]":
    config = paper("atlas").model
    data = EpisodeData(path, get_task("tworoom"), config.encoder.image_size, config.frameskip)
    dataset = ClipDataset(data, clips, Normalizer((0.0, 0.0), (1.0, 1.0)), config)
    order = [list(range(i, i + BATCH)) for i in range(0, len(clips), BATCH)]
    return make_loader(dataset, order, workers, pin=False)  # type: ignore[arg-type]


def clips_per_second(loader: "DataLoader[Any]") -> tuple[float, torch.Tensor]:
    """Of the best of some rounds, the start of worker processes left out; and the last batch of frames."""
    best = 0.0
    for _ in range(ROUNDS):
        batches = iter(loader)
        batch = next(batches)
        started = time.perf_counter()
        count = 0
        for batch in batches:  # noqa: B007  the last one is compared
            count += BATCH
        best = max(best, count / (time.perf_counter() - started))
    return best, batch["pixels"] if isinstance(batch, dict) else batch.frames


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=60)
    parser.add_argument("--workers", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    table = Table("format", "stable-worldmodel, clips/s", "atlas-wm, clips/s", "ratio", "same frames")
    with tempfile.TemporaryDirectory() as folder:
        for ending in ("h5", "lance"):
            path = Path(folder) / f"tworoom.{ending}"
            collect(get_task("tworoom"), path, arguments.episodes, pixels=True)
            from stable_worldmodel.data import load_dataset

            reader = load_dataset(str(path), frameskip=5, num_steps=4, keys_to_load=["action"])
            which = np.random.default_rng(0).permutation(len(reader))[: BATCH * BATCHES]
            which = which[: len(which) // BATCH * BATCH]
            pairs = np.array([reader.clip_indices[i] for i in which])
            before, frames_before = clips_per_second(theirs(path, which, arguments.workers))
            after, frames_after = clips_per_second(ours(path, ClipIndex(*pairs.T), arguments.workers))
            same = torch.equal(frames_before, frames_after)
            table.add_row(ending, f"{before:,.0f}", f"{after:,.0f}", f"{after / before:.2f}", str(same))
    console = Console()
    console.print(table)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    console.print(
        f"224×224 frames, batches of {BATCH} clips, {arguments.workers} workers, one thread; peak {peak:.1f} GiB"
    )


if __name__ == "__main__":
    main()
