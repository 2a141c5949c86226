"""Time and memory of opening a dataset for training, against its rows.

    python benchmarks/dataset_size.py [--rows 10000 1000000 10000000] [--formats h5 lance]

Writes synthetic TwoRoom datasets, episodes of 100 rows, without frames and with compressed frames (a thousand
different ones in turn). Each is opened in a fresh process: read the columns, build and split the clips, fit the
normalizer, hash the content, then read one batch. One size after the other is written and deleted: 10 million rows
take 0.25 GB without frames, and 3 GB with frames of 32 × 32 pixels in HDF5.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

EPISODE, SIDE = 100, 32  # rows; pixels of a frame
AT_ONCE = 1000  # episodes written together


def write(path: Path, rows: int, frames: bool) -> None:
    from atlas_wm.data.encoding import EncodedFrames, gzip_frame, jpeg_frame
    from atlas_wm.data.writers import lance_column, write_hdf5
    from atlas_wm.tasks import get_task

    lengths, rng, is_lance = [EPISODE] * (rows // EPISODE), np.random.default_rng(0), path.suffix == ".lance"

    drawn = get_task("tworoom").draw(rng.uniform(30, 190, (EPISODE * 10, 2)), SIDE).permute(0, 2, 3, 1).numpy()
    encoded = [jpeg_frame(frame) if is_lance else gzip_frame(frame) for frame in drawn]

    def columns(rows: int) -> dict[str, Any]:
        found: dict[str, Any] = {"action": rng.uniform(-1, 1, (rows, 2)).astype(np.float32)}
        found |= {name: rng.uniform(30, 190, (rows, 2)).astype(np.float32) for name in ("pos_agent", "pos_target")}
        if frames:
            found["pixels"] = EncodedFrames(list(islice(cycle(encoded), rows)), (SIDE, SIDE, 3))
        return found

    def parts() -> Iterator[dict[str, Any]]:
        for first in range(0, len(lengths), AT_ONCE):
            yield columns(EPISODE * len(lengths[first : first + AT_ONCE]))

    if not is_lance:
        write_hdf5(path, lengths, parts())
        return
    import lance
    import pyarrow as pa

    for number, part in enumerate(parts()):
        row = np.arange(len(part["action"]), dtype=np.int32)
        arrays = {"episode_idx": pa.array(number * AT_ONCE + row // EPISODE), "step_idx": pa.array(row % EPISODE)}
        arrays |= {name: lance_column(name, values) for name, values in part.items()}
        lance.write_dataset(pa.table(arrays), str(path), mode="append" if path.exists() else "create")


def open_it(path: Path) -> None:
    """What the fresh process does. Prints seconds to open, CPU seconds to open, seconds of one batch, memory after
    the imports and peak memory in MiB."""
    import torch

    from atlas_wm.data.training_set import open_training_set
    from atlas_wm.recipes import demo
    from atlas_wm.tasks import get_task
    from atlas_wm.tasks.base import import_harness

    import_harness()
    base, started, cpu = _peak(), time.perf_counter(), time.process_time()
    training_set = open_training_set(path, get_task("tworoom"), demo("atlas"))
    opened, cpu = time.perf_counter(), time.process_time() - cpu
    next(iter(training_set.batches(0, torch.device("cpu"))))
    print("measured", opened - started, cpu, time.perf_counter() - opened, base, _peak())


def _peak() -> float:
    """MiB of this process. Not ru_maxrss, which begins with the memory of the process that started it."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10**n for n in range(4, 8)])
    parser.add_argument("--formats", nargs="+", default=["h5", "lance"], choices=["h5", "lance"])
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.open:
        open_it(arguments.open)
        return
    table = Table(
        "format", "frames", "rows", "file, MB", "open, s", "CPU, s", "first batch, s", "imports, MiB", "peak, MiB"
    )
    for ending in arguments.formats:
        for frames in (False, True):
            for rows in arguments.rows:
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / f"x.{ending}"
                    write(path, rows, frames)
                    os.sync()  # opening does not wait for what is still being written
                    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
                    size = sum(p.stat().st_size for p in files) / 1e6
                    command = [sys.executable, __file__, "--open", str(path)]
                    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                line = next(line for line in done.stdout.splitlines() if line.startswith("measured "))
                opened, cpu, batch, base, peak = map(float, line.split()[1:])
                kind = "compressed" if frames else "none"
                table.add_row(
                    ending, kind, f"{rows:,}", f"{size:,.1f}",
                    f"{opened:.2f}", f"{cpu:.2f}", f"{batch:.2f}", f"{base:,.0f}", f"{peak:,.0f}",
                )  # fmt: skip
                print(
                    f"{ending}, frames {kind}, {rows:,} rows: {opened:.2f} s, CPU {cpu:.2f} s, {peak:,.0f} MiB",
                    file=sys.stderr,
                )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
