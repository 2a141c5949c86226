"""Clips per second from disk: stable-worldmodel's own readers and ours, on the same files.

Both deliver the same uint8 frames of the same clips, with the same number of loader processes; normalising them is
left to the device. The ratio is what counts, for the machine may be shared.

    python benchmarks/loader.py [--episodes 40] [--workers 0 2]
"""

import argparse
import os
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
from atlas_wm.normalizer import Normalizer
from atlas_wm.recipes import paper
from atlas_wm.tasks import get_task
from atlas_wm.tasks.base import import_harness

BATCH, BATCHES, ROUNDS = 64, 12, 5


def theirs(path: Path, which: np.ndarray, workers: int) -> "DataLoader[Any]":
    from stable_worldmodel.data import load_dataset

    dataset = load_dataset(str(path), frameskip=5, num_steps=4, keys_to_load=["pixels", "action"])
    return DataLoader(
        Subset(dataset, which.tolist()),
        batch_size=BATCH,
        num_workers=workers,
        persistent_workers=workers > 0,
        prefetch_factor=4 if workers else None,
    )


def ours(path: Path, clips: ClipIndex, workers: int) -> "DataLoader[Any]":
    config = paper("atlas").model
    data = EpisodeData(path, get_task("tworoom"), config.encoder.image_size, config.frameskip)
    dataset = ClipDataset(data, clips, Normalizer((0.0, 0.0), (1.0, 1.0)), config)
    order = [list(range(i, i + BATCH)) for i in range(0, len(clips), BATCH)]
    return make_loader(dataset, order, workers, pin=False)


def clips_per_second(*loaders: "DataLoader[Any]") -> tuple[list[float], list[torch.Tensor]]:
    """Medians over rounds, after one to start the processes; and the last batch of frames of each.

    The loaders take turns: measured one after the other, the load of a shared machine would fall on one of them.
    """
    speeds: list[list[float]] = [[] for _ in loaders]
    frames: list[torch.Tensor] = []
    for _ in range(1 + ROUNDS):
        frames = []
        for loader, speed in zip(loaders, speeds, strict=True):
            started, count = time.perf_counter(), 0
            for batch in loader:  # noqa: B007  the last one is compared
                count += BATCH
            speed.append(count / (time.perf_counter() - started))
            frames.append(batch["pixels"] if isinstance(batch, dict) else batch.frames)
    return [float(np.median(speed[1:])) for speed in speeds], frames


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=40)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import_harness()
    from stable_worldmodel.data import load_dataset

    table = Table("format", "workers", "stable-worldmodel, clips/s", "atlas-wm, clips/s", "ratio", "same frames")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["STABLEWM_HOME"] = folder  # the harness makes a folder there
        for ending in ("h5", "lance"):
            path = Path(folder) / f"tworoom.{ending}"
            collect(get_task("tworoom"), path, arguments.episodes, pixels=True)
            reader = load_dataset(str(path), frameskip=5, num_steps=4, keys_to_load=["action"])
            which = np.random.default_rng(0).permutation(len(reader))[: BATCH * BATCHES]
            which = which[: len(which) // BATCH * BATCH]
            pairs = np.array([reader.clip_indices[i] for i in which])
            for workers in arguments.workers:
                (before, after), frames = clips_per_second(
                    theirs(path, which, workers), ours(path, ClipIndex(*pairs.T), workers)
                )
                same = "yes" if torch.equal(*frames) else "NO"
                ratio = f"{after / before:.2f}"
                table.add_row(ending, str(workers), f"{before:,.0f}", f"{after:,.0f}", ratio, same)
    console = Console()
    console.print(table)
    console.print(
        f"224×224 frames, {len(which)} clips in batches of {BATCH}, one thread a process, median of {ROUNDS} rounds"
    )


if __name__ == "__main__":
    main()
