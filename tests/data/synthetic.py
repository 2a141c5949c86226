"""Small HDF5 files in stable-worldmodel's layout, with whatever columns a test wants."""

from pathlib import Path

import numpy as np


def write_h5(path: Path, lengths: list[int], columns: dict[str, np.ndarray], **compression) -> Path:
    import h5py

    with h5py.File(path, "w") as file:
        file["ep_len"] = np.array(lengths, np.int32)
        file["ep_offset"] = np.cumsum([0, *lengths], dtype=np.int64)[:-1]
        for name, values in columns.items():
            file.create_dataset(name, data=values, chunks=(1, *values.shape[1:]), **compression)
    return path


def columns(rows: int, action_size: int = 2, image: int = 32, **widths: int) -> dict[str, np.ndarray]:
    """Random pixels and actions, and a column of the given width for each name."""
    rng = np.random.default_rng(0)
    return {
        "pixels": rng.integers(0, 255, (rows, image, image, 3), dtype=np.uint8),
        "action": rng.uniform(-1, 1, (rows, action_size)).astype(np.float32),
        **{name: rng.uniform(20, 200, (rows, width)) for name, width in widths.items()},
    }
