"""A stable-worldmodel dataset, opened: actions and states in memory, frames when asked for."""

import hashlib
import os
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atlas_wm.data.pixels import HarnessPixels, HDF5Pixels, LancePixels, PixelReader, VideoPixels
from atlas_wm.errors import UserError
from atlas_wm.images import reduce_frames
from atlas_wm.runs.files import MOST_SETTINGS, read_json
from atlas_wm.runs.versions import check_modules, to_install
from atlas_wm.tasks import Task, task_id
from atlas_wm.tasks.base import import_harness

SMALL, MOST_PACKING = 2**26, 2000  # bytes; gzip packs no better than 1 to 1030
HDF5_ENDINGS = (".h5", ".hdf5")
ENDINGS = ("", ".lance", *HDF5_ENDINGS)  # a dataset may be named without its own
MOST_ROWS = 2**32
NO_CLIPS = 2**40  # steps of the harness' own clips: it would list every one of them, and we list ours


class EpisodeData:
    """Rows of all episodes, one after the other: R rows, E episodes.

    Frames come from the ``pixels`` column, or, where there is none, are drawn from the states by the task.
    """

    def __init__(self, path: str | Path, task: Task, image_size: int, frameskip: int):
        self.path = find_dataset(path, task)
        self.task, self.image_size, self.frameskip = task, image_size, frameskip
        with _readable(f"{self.path} cannot be read as a stable-worldmodel dataset"):
            self._table = _open(self.path, frameskip)
            self.lengths = np.asarray(self._table.lengths, np.int64)  # (E,)
            self._stored_offsets = np.asarray(
                self._table.offsets, np.int64
            )  # (E,) in the file, which may have gaps
            self._check_episodes()
        self.offsets = np.cumsum(self.lengths) - self.lengths  # (E,)
        self._pixels = self._pixel_reader()
        (actions,) = self.find((("action",),))
        self.actions = self._column(actions).astype(np.float32)  # (R, A)
        self._check_actions()
        self.states = self.columns(task.state_columns)  # (R, s)

    def _check_episodes(self) -> None:
        """Numbers of rows, and where they begin: what everything else is indexed with."""
        for values in (self.lengths, self._stored_offsets):
            if values.ndim != 1 or len(values) != len(self.lengths) or values.min(initial=0) < 0:
                raise ValueError("the lengths and offsets of its episodes are not as many numbers from 0 on")
            if values.max(initial=0) >= MOST_ROWS:
                raise ValueError(f"an episode with {values.max()} rows, or behind as many")

    @property
    def has_pixels(self) -> bool:
        return self._pixels is not None

    def columns(self, alternatives: tuple[tuple[str, ...], ...]) -> np.ndarray:
        """The first alternative whose columns are all there, side by side, all finite: (R, n)."""
        parts = []
        for name in self.find(alternatives):
            parts.append(self._column(name))
            self._check_finite(name, parts[-1], "write the dataset again without these episodes")
        return np.concatenate(parts, axis=1)

    def start_states(self, rows: np.ndarray) -> np.ndarray:
        """What ``Task.reset`` takes for rows (n,): the state, and behind it what is hidden: (n, s + h).

        Hidden columns are read for these rows only: training has no use for them.
        """
        hidden = self.task.hidden_columns
        if not (hidden and len(rows) and set(hidden) <= set(self._table.column_names)):
            return self.states[rows]
        with _readable(f"{self.path}: the columns {', '.join(hidden)} cannot be read"):
            episodes, steps = self.places(rows)
            chunks = self._hidden_reader.load_chunk(episodes, steps, steps + 1)
            read = np.stack([np.concatenate([np.ravel(chunk[name]) for name in hidden]) for chunk in chunks])
            if not np.isfinite(read).all():
                raise ValueError("they are NaN or infinite")
        return np.concatenate([self.states[rows], read], axis=1)

    @cached_property
    def _hidden_reader(self) -> Any:
        return _open(self.path, 1, list(self.task.hidden_columns))

    def find(self, alternatives: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
        """The names of the first alternative whose columns are all there."""
        present = sorted(self._table.column_names)
        found = next((names for names in alternatives if set(names) <= set(present)), None)
        if found is None:
            wanted = " or ".join(repr(" + ".join(names)) for names in alternatives)
            raise UserError(
                f"{self.path} has no column {wanted} (it has: {', '.join(present)}): "
                f"rename a column, or write a task that names yours (docs/own-data.md)"
            )
        return found

    def _column(self, name: str) -> np.ndarray:
        """One column, a vector of numbers for each row: (R, n)."""
        with _readable(f"{self.path}: column {name!r} cannot be read"):
            stored = np.asarray(self._table.get_col_data(name))
            if stored.ndim == 0:
                raise ValueError("it has no rows")
        if stored.dtype.kind not in "fiub":
            raise UserError(f"{self.path}: column {name!r} must hold numbers, not {stored.dtype}")
        last = int((self._stored_offsets + self.lengths).max(initial=0)) - 1
        if len(stored) <= max(last, int(self.lengths.sum()) - 1):
            raise UserError(
                f"{self.path}: column {name!r} has {len(stored)} rows, its episodes reach to row {last}: "
                f"the file is not whole, fetch or collect it again"
            )
        rows = np.arange(self.lengths.sum()) + np.repeat(self._stored_offsets - self.offsets, self.lengths)
        return stored[rows].reshape(len(rows), int(np.prod(stored.shape[1:])))

    def _check_actions(self) -> None:
        if self.actions.shape[1] != self.task.action_size:
            raise UserError(
                f"{self.path}: column 'action' has shape {self.actions.shape}, {self.task.name} needs "
                f"(rows, {self.task.action_size}): pass the --data of this task, or the task of this data"
            )
        taken = self.actions.copy()
        taken[(self.offsets + self.lengths - 1)[self.lengths > 0]] = 0  # no action is taken in the last row
        self._check_finite("action", taken, "only the last row of an episode may go without one")

    def _check_finite(self, name: str, values: np.ndarray, remedy: str) -> None:
        bad = np.unique(np.argwhere(~np.isfinite(values))[:, 0])
        if len(bad):
            episode = int(np.searchsorted(self.offsets, bad[0], side="right") - 1)
            raise UserError(
                f"{self.path}: column {name!r} is NaN or infinite in {len(bad)} of {len(values)} rows, first in "
                f"row {bad[0]} (episode {episode}, step {bad[0] - self.offsets[episode]}): {remedy}"
            )

    def frames(self, episodes: np.ndarray, starts: np.ndarray, count: int) -> Tensor:
        """``count`` frames, ``frameskip`` rows apart, from each (episode, start): (B, count, 3, S, S) uint8."""
        if self._pixels is None:
            rows = (self.offsets[episodes] + starts)[:, None] + self.frameskip * np.arange(count)
            try:
                drawn = self.task.draw(self.states[rows.reshape(-1)], self.image_size)
            except UserError as error:
                raise UserError(f"{self.path}: {error}") from error
            return drawn.unflatten(0, (len(episodes), count))
        return reduce_frames(self._stored(episodes, starts, count), self.image_size).unflatten(
            0, (len(episodes), count)
        )

    @property
    def frame_size(self) -> tuple[int, int] | None:
        """Height and width of the frames in the file, by the first of them; None where they are drawn."""
        if self._pixels is None:
            return None
        height, width = self._stored(np.flatnonzero(self.lengths)[:1], np.zeros(1, np.int64), 1).shape[-2:]
        return height, width

    def _stored(self, episodes: np.ndarray, starts: np.ndarray, count: int) -> Tensor:
        """Frames as the file has them: (B·count, 3, H, W) uint8."""
        assert self._pixels is not None
        with _readable(f"{self.path}: column 'pixels' cannot be read, the file seems damaged"):
            pixels = self._pixels.read(episodes, starts, count, self.frameskip)
        if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[1] != 3:
            kind = str(pixels.dtype).removeprefix("torch.")
            raise UserError(
                f"{self.path}: column 'pixels' holds {kind} of shape {tuple(pixels.movedim(1, -1).shape[1:])}, "
                f"not uint8 (height, width, 3): convert it"
            )
        return pixels

    def _pixel_reader(self) -> PixelReader | None:
        if "pixels" not in self._table.column_names:
            return None
        from stable_worldmodel.data import HDF5Dataset, LanceDataset

        if isinstance(self._table, HDF5Dataset):
            return HDF5Pixels(Path(self._table.h5_path), self._stored_offsets)
        if isinstance(self._table, LanceDataset):
            return LancePixels(Path(self._table.uri) / f"{self._table.table_name}.lance", self._stored_offsets)
        if any((self.path / "pixels").glob("*.mp4")):
            return VideoPixels(self.path / "pixels")
        return HarnessPixels(_open(self.path, self.frameskip, ["pixels"]))

    def places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The episode of each row (n,), and which of its rows it is."""
        episodes = np.searchsorted(self.offsets, rows, side="right") - 1
        return episodes, rows - self.offsets[episodes]

    def frames_of(self, rows: np.ndarray) -> Tensor:
        """The frames of rows (n,) in any order: (n, 3, S, S) uint8."""
        return self.frames(*self.places(rows), 1)[:, 0]

    def frame(self, row: int) -> Tensor:
        """The frame of one row: (1, 3, S, S) uint8."""
        return self.frames_of(np.array([row]))

    def content_hash(self) -> str:
        """sha256 of lengths, actions and states: the same for the same episodes in any file format."""
        digest = hashlib.sha256()
        for array in (self.lengths, self.actions, self.states.astype(np.float32)):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]


def find_dataset(path: str | Path, task: Task) -> Path:
    """The path as given, or below $STABLEWM_HOME; the ending may be left out."""
    home = os.environ.get("STABLEWM_HOME")
    places = [Path(path)] + ([Path(home, path), Path(home, "datasets", path)] if home else [])
    for place in places:
        for ending in ENDINGS:
            whole = place.with_name(place.name + ending)
            if whole.exists():
                return whole.resolve()
    looked = ", ".join(str(p) for p in places)
    raise UserError(
        f"there is no dataset {path} (looked at: {looked}). "
        f"Collect one with `atlas collect {task.name} --out {path}`, or pass --data"
    )


def card_path(data: Path) -> Path:
    """The card that collection writes beside a dataset."""
    return data.with_name(data.name + ".card.json")


def check_card(data: EpisodeData) -> None:
    """Refuse data with a card beside it that was written for other data: bytes may have changed since."""
    path = card_path(data.path)
    if not path.exists():
        return
    card = read_json(path, MOST_SETTINGS)
    if not isinstance(card, dict):
        raise UserError(f"{path} is not the card of a dataset: delete it")
    # Another task may read other columns of the same file, which the card says nothing about.
    if card.get("task") == task_id(data.task) and card.get("hash") != data.content_hash():
        raise UserError(
            f"{data.path} is not what {path.name} beside it says: it is damaged, or was changed since it was "
            f"collected; collect it again, or delete the card if the change was yours"
        )


@contextmanager
def _readable(otherwise: str) -> Iterator[None]:
    """Whatever a damaged file makes its library raise becomes one line."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except ImportError as error:
        raise UserError(f"{otherwise} ({error}): {to_install(error, 'see `atlas doctor`')}") from error
    except BaseException as error:  # a panic in Lance is none of the usual exceptions
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
        raise UserError(f"{otherwise} ({reason}): fetch or collect it again") from error


def _open(path: Path, frameskip: int, columns: list[str] | None = None) -> Any:
    import_harness()
    from stable_worldmodel.data import detect_format, get_format

    found = detect_format(path)
    if found is None and (path.suffix in HDF5_ENDINGS or any(p.suffix in HDF5_ENDINGS for p in path.glob("*"))):
        check_modules("hdf5")  # without them stable-worldmodel does not know the format
    if found is None:
        raise UserError(
            f"{path} is no stable-worldmodel dataset: neither a .lance folder, nor an .h5 file, nor a folder with "
            f"ep_len.npz and videos or images"
        )
    if found.name == "hdf5":
        _check_hdf5(path)
    if found.name == "video":
        found = get_format("folder")  # the columns are the same; the frames are left to VideoPixels
    return found.open_reader(path, frameskip=frameskip, num_steps=NO_CLIPS, keys_to_load=columns)


def _check_hdf5(path: Path) -> None:
    """A damaged file fails here. The harness opens for reading beside a writer, and HDF5 would then wait, without
    end, for the writer to put right what is cut off."""
    import h5py

    for file in [path] if path.is_file() else [*path.glob("*.h5"), *path.glob("*.hdf5")]:
        with h5py.File(file, "r") as opened:
            for name in opened:
                if not isinstance(opened.get(name, getlink=True), h5py.HardLink):
                    raise UserError(f"{file}: column {name!r} is a link to elsewhere: write the data itself")
                _check_hdf5_column(file, name, opened[name])


def _check_hdf5_column(file: Path, name: str, column: Any) -> None:
    """It holds its own bytes, and about as many as it claims: rows that were never written cost a file nothing, but
    reading them takes memory all the same."""
    import h5py

    if not isinstance(column, h5py.Dataset):
        return  # no column: one that is needed is missed by name
    if column.external or column.is_virtual:
        raise UserError(f"{file}: column {name!r} keeps its data in another file: write the data itself")
    holds = column.id.get_storage_size()
    if column.nbytes > SMALL + MOST_PACKING * holds:
        raise UserError(
            f"{file}: column {name!r} claims {column.nbytes:,} bytes and holds {holds:,}: the file is not whole, "
            f"fetch or collect it again"
        )
