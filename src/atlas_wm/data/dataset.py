"""A stable-worldmodel dataset, opened: actions and states in memory, frames when asked for."""

import hashlib
import os
from pathlib import Path

import numpy as np
from torch import Tensor

from atlas_wm.data.pixels import HarnessPixels, HDF5Pixels, LancePixels, PixelReader
from atlas_wm.errors import UserError
from atlas_wm.frames import reduce_frames
from atlas_wm.tasks.base import Task, import_harness


class EpisodeData:
    """Rows of all episodes, one after the other: R rows, E episodes.

    Frames come from the ``pixels`` column, or, where there is none, are drawn from the states by the task.
    """

    def __init__(self, path: str | Path, task: Task, image_size: int, frameskip: int):
        self.path = find_dataset(path, task)
        self.task, self.image_size, self.frameskip = task, image_size, frameskip
        try:
            self._table = _open(self.path, frameskip)
            self.actions = self.columns((("action",),)).astype(np.float32)  # (R, A)
            self.states = self.columns(task.state_columns)  # (R, s)
            self.lengths = np.asarray(self._table.lengths, np.int64)  # (E,)
            self.offsets = np.asarray(self._table.offsets, np.int64)  # (E,)
            self._pixels = self._pixel_reader()
        except (OSError, KeyError, ValueError) as error:
            raise UserError(f"{self.path} cannot be read as a stable-worldmodel dataset: {error}") from error
        if self.actions.shape[1] != task.action_size:
            raise UserError(
                f"{self.path}: column 'action' has shape {self.actions.shape}, "
                f"{task.name} needs (rows, {task.action_size})"
            )

    @property
    def has_pixels(self) -> bool:
        return self._pixels is not None

    def columns(self, alternatives: tuple[tuple[str, ...], ...]) -> np.ndarray:
        """The first alternative whose columns are all there, side by side: (R, n)."""
        present = sorted(self._table.column_names)
        found = next((names for names in alternatives if set(names) <= set(present)), None)
        if found is None:
            wanted = " or ".join(repr(" + ".join(names)) for names in alternatives)
            raise UserError(f"{self.path} has no column {wanted} (it has: {', '.join(present)})")
        parts = [np.asarray(self._table.get_col_data(name)) for name in found]
        return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)

    def frames(self, episodes: np.ndarray, starts: np.ndarray, count: int) -> Tensor:
        """``count`` frames, ``frameskip`` rows apart, from each (episode, start): (B, count, 3, S, S) uint8."""
        if self._pixels is None:
            rows = (self.offsets[episodes] + starts)[:, None] + self.frameskip * np.arange(count)
            drawn = self.task.draw(self.states[rows.reshape(-1)], self.image_size)
            return drawn.unflatten(0, (len(episodes), count))
        try:
            pixels = self._pixels.read(episodes, starts, count, self.frameskip)
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"{self.path}: column 'pixels' cannot be read, the file seems damaged ({error}): "
                f"fetch or collect it again"
            ) from error
        return reduce_frames(pixels, self.image_size).unflatten(0, (len(episodes), count))

    def _pixel_reader(self) -> PixelReader | None:
        if "pixels" not in self._table.column_names:
            return None
        from stable_worldmodel.data import HDF5Dataset, LanceDataset

        if isinstance(self._table, HDF5Dataset):
            return HDF5Pixels(Path(self._table.h5_path), self.offsets)
        if isinstance(self._table, LanceDataset):
            return LancePixels(Path(self._table.uri) / f"{self._table.table_name}.lance", self.offsets)
        return HarnessPixels(_open(self.path, self.frameskip, ["pixels"]))

    def frame(self, row: int) -> Tensor:
        """The frame of one row: (1, 3, S, S) uint8."""
        episode = int(np.searchsorted(self.offsets, row, side="right") - 1)
        return self.frames(np.array([episode]), np.array([row - self.offsets[episode]]), 1)[0]

    def content_hash(self) -> str:
        """sha256 of lengths, actions and states: the same for the same episodes in any file format."""
        digest = hashlib.sha256()
        for array in (self.lengths, self.actions, self.states.astype(np.float32)):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]


def find_dataset(path: str | Path, task: Task) -> Path:
    """The path as given, or below $STABLEWM_HOME."""
    home = os.environ.get("STABLEWM_HOME")
    places = [Path(path)] + ([Path(home, path), Path(home, "datasets", path)] if home else [])
    for place in places:
        if place.exists():
            return place.resolve()
    looked = ", ".join(str(p) for p in places)
    raise UserError(
        f"there is no dataset {path} (looked at: {looked}). "
        f"Collect one with `atlas collect {task.name} --out {path}`, or pass --data"
    )


def _open(path: Path, frameskip: int, columns: list[str] | None = None):  # type: ignore[no-untyped-def]
    import_harness()
    from stable_worldmodel.data import load_dataset

    return load_dataset(str(path), frameskip=frameskip, keys_to_load=columns)
