"""Training steps per second with all, half and none of the frames in the memory of the device.

    python benchmarks/streaming.py DATA [DATA ...] [--task pusht] [--recipe paper] [--steps 600] [--workers 15]

DATA: HDF5 files or Lance tables with frames, on the disk from which they will be read. Loader processes read and
decode what is not held while the steps before are computed. steps/s: the median of seven parts of the run, without
validations; "with validations": over these parts and the validation in the middle of the run.
"""

import argparse
import os
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from atlas_wm.config import RunConfig
from atlas_wm.data import frame_cache
from atlas_wm.data.frame_cache import FrameCache
from atlas_wm.data.training_set import TrainingSet, open_training_set
from atlas_wm.parallel.devices import free_memory, pick_device
from atlas_wm.recipes import get_recipe
from atlas_wm.tasks import Task, get_task
from atlas_wm.train.loop import fit
from atlas_wm.train.score import PlanningScore
from atlas_wm.train.start import make_model, run_info

LONG = 10**7  # steps for which frames are held: for a short run it would not be worth reading all of them
LOGGED = 8  # times per run; the first is left out, with its captures


def cpu_seconds() -> float:
    """Of this process and of the loader processes that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def held(training_set: TrainingSet) -> FrameCache | None:
    found = training_set.cache or training_set.part
    return found if isinstance(found, FrameCache) else None


def measure(path: Path, task: Task, config: RunConfig, method: str, device: torch.device) -> dict[str, Any]:
    """Trains for the configured steps from the beginning."""
    started, long = time.perf_counter(), replace(config, train=replace(config.train, steps=LONG))
    training_set = open_training_set(path, task, long)
    with tempfile.TemporaryDirectory() as folder:
        training_set.build_cache(device, Path(folder))
    training_set.config = config
    filled = time.perf_counter() - started
    model = make_model(run_info(config, task, training_set, device, method, "", None), training_set, resumed=False)
    score, speeds, ends = PlanningScore.of(training_set), list[float](), list[float]()

    def write(step: int, row: dict[str, float]) -> None:
        speeds.append(row["clips_per_second"] / config.train.batch)
        ends.append(time.perf_counter())

    begun, cpu = time.perf_counter(), cpu_seconds()
    fit(model, training_set, device, write, probes=[score] if score else [])
    seconds, cpu = time.perf_counter() - begun, cpu_seconds() - cpu
    kept = held(training_set)
    after = (len(ends) - 1) * config.train.log_every / (ends[-1] - ends[0])
    return {
        "share": kept.rows / training_set.info.rows if kept else 0.0,
        "filled": filled,
        "speed": median(speeds[1:]),
        "whole": after,
        "cores": cpu / seconds,
        "bytes": kept.bytes if kept else 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", type=Path)
    parser.add_argument("--task", default="pusht")
    parser.add_argument("--method", default="atlas")
    parser.add_argument("--recipe", default="paper")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--workers", type=int, help="loader processes (default: as training chooses)")
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    device, task, base = pick_device(asked.device), get_task(asked.task), get_recipe(asked.recipe)(asked.method)
    every = max(1, asked.steps // LOGGED)
    settings = replace(base.train, steps=asked.steps, workers=asked.workers, log_every=every)
    settings = replace(settings, validate_every=every * (LOGGED // 2))
    table = Table("dataset", "frames held", "filled in, s", "steps/s", "with validations", "cores used")
    for path in asked.data:
        size = 0
        for where, share in (("always", 1.0), ("auto", 0.5), ("never", 0.0)):
            # How much memory is free decides what fits: here, half of the frames.
            free = int(share * size * 1.1 / frame_cache.SHARE)
            frame_cache.free_memory = free_memory if share == 1 else lambda _, free=free: free  # type: ignore
            config = replace(base, train=replace(settings, cache_frames=where))  # type: ignore[arg-type]
            found = measure(path, task, config, asked.method, device)
            size = size or found["bytes"]
            row = (
                f"{found['share']:.0%}",
                f"{found['filled']:.0f}",
                f"{found['speed']:.1f}",
                f"{found['whole']:.1f}",
            )
            table.add_row(path.name, *row, f"{found['cores']:.1f}")
    Console().print(f"{asked.recipe}, {asked.steps} steps of {base.train.batch}, {device}, {os.cpu_count()} cores")
    Console().print(table)


if __name__ == "__main__":
    main()
