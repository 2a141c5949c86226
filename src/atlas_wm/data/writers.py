"""Write episodes whose frames are compressed already, in the layouts that stable-worldmodel reads.

Its own writers take raw frames: the one for HDF5 does not compress them, the one for Lance does it in one process.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from atlas_wm.data.encoding import GZIP_LEVEL, Column, EncodedFrames, Episode, common_shape
from atlas_wm.errors import UserError

ROWS_PER_CHUNK = 1024  # of columns of numbers


def check_numbers(name: str, values: np.ndarray) -> None:
    if values.dtype.kind not in "fiub":
        raise UserError(f"column {name!r} must hold numbers, not {values.dtype}: convert it in the task")


def write_hdf5(path: Path, lengths: list[int], parts: Iterable[Episode]) -> None:
    """``parts`` hold the rows of all episodes in order; a part may hold several episodes."""
    import h5py

    rows, done = sum(lengths), 0
    with h5py.File(path, "w", libver="latest") as file:
        file.create_dataset("ep_len", data=np.array(lengths, np.int32), maxshape=(None,))
        file.create_dataset("ep_offset", data=np.cumsum([0, *lengths[:-1]], dtype=np.int64), maxshape=(None,))
        for part in parts:
            for name, values in part.items():
                if name not in file:
                    _create_column(file, name, values, rows)
                _write_rows(file[name], done, values)
            done += len(part["action"])


def _create_column(file: Any, name: str, values: Column, rows: int) -> None:
    if isinstance(values, EncodedFrames):
        shape, dtype, chunk_rows = values.shape, np.dtype(np.uint8), 1
        compression = {"compression": "gzip", "compression_opts": GZIP_LEVEL}
    else:
        shape, dtype, chunk_rows, compression = values.shape[1:], values.dtype, min(rows, ROWS_PER_CHUNK), {}
    file.create_dataset(
        name, (rows, *shape), dtype, maxshape=(None, *shape), chunks=(chunk_rows, *shape), **compression
    )


def _write_rows(column: Any, first: int, values: Column) -> None:
    if not isinstance(values, EncodedFrames):
        column[first : first + len(values)] = values
        return
    origin = (0,) * len(common_shape(column.name.strip("/"), [column.shape[1:], values.shape]))
    for row, chunk in enumerate(values.frames, first):
        column.id.write_direct_chunk((row, *origin), chunk)


def append_lance(path: Path, episodes: list[Episode], first: int) -> None:
    """Append the episodes, numbered from ``first``, as one version of the table."""
    import lance
    import pyarrow as pa

    batches = _lance_batches(episodes, first)
    head = next(batches)
    reader = pa.RecordBatchReader.from_batches(head.schema, chain([head], batches))
    lance.write_dataset(reader, str(path), mode="append" if path.exists() else "create")


def _lance_batches(episodes: list[Episode], first: int) -> Iterator[Any]:
    import pyarrow as pa

    for number, episode in enumerate(episodes, first):
        steps = len(episode["action"])
        columns = {
            "episode_idx": pa.array(np.full(steps, number, np.int32)),
            "step_idx": pa.array(np.arange(steps, dtype=np.int32)),
        }
        for name, values in episode.items():
            if "." in name:
                raise UserError(f"a .lance dataset has no dots in names, as in column {name!r}: use --out NAME.h5")
            columns[name] = lance_column(name, values)
        yield pa.record_batch(columns)


def lance_column(name: str, values: Column) -> Any:
    import pyarrow as pa

    if isinstance(values, EncodedFrames):
        return pa.array(values.frames, pa.binary())
    if values.dtype.kind in "US":
        return pa.array(values.astype(str).tolist(), pa.string())
    check_numbers(name, values)
    numbers = values.astype(np.float32).reshape(len(values), -1)
    return pa.FixedSizeListArray.from_arrays(pa.array(numbers.reshape(-1)), numbers.shape[1])
