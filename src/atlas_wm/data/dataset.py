"""An open dataset: actions and states are in memory, frames are read on request."""

import hashlib
import os
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from atlas_wm.data.lerobot import LeRobotTable, is_lerobot
from atlas_wm.data.pixels import HarnessPixels, HDF5Pixels, LancePixels, PixelReader, VideoPixels
from atlas_wm.data.remote import as_url, bare, check_dataset, retried, to_open
from atlas_wm.errors import UserError
from atlas_wm.images import reduce_frames
from atlas_wm.runs.versions import check_modules, to_install
from atlas_wm.tasks import Task
from atlas_wm.tasks.base import Coordinate, import_harness

SMALL, MOST_PACKING = 2**26, 2000  # bytes; gzip packs no better than 1 to 1030
HDF5_ENDINGS = (".h5", ".hdf5")
ENDINGS = ("", ".lance", *HDF5_ENDINGS)  # tried in turn: a path may omit its ending
MOST_ROWS = 2**32
Result = TypeVar("Result")
NO_CLIPS = 2**40  # steps per clip of the harness, too many for any: otherwise it lists every clip in memory


class EpisodeData:
    """The rows of all episodes in order: R rows, E episodes.

    Frames come from the task's image column. Without one, the task draws them from the states.
    """

    def __init__(self, path: str | Path, task: Task, image_size: int, frameskip: int):
        found = find_dataset(path, task)
        self.path = bare(found) if isinstance(found, str) else found
        self._source = to_open(found) if isinstance(found, str) else found  # a path, or the URL of a Lance table
        self.task, self.image_size, self.frameskip = task, image_size, frameskip
        with _readable(f"{self.path} cannot be read as a dataset"):
            self._table = self._read(_open, self._source, frameskip)
            self.lengths = np.asarray(self._table.lengths, np.int64)  # (E,)
            # (E,) in the file, which may have gaps
            self._stored_offsets = np.asarray(self._table.offsets, np.int64)
            self._check_episodes()
        self.offsets = np.cumsum(self.lengths) - self.lengths  # (E,)
        self._pixels = self._pixel_reader()
        self.find(((task.action_column,),))
        self.actions = self._column(task.action_column).astype(np.float32, copy=False)  # (R, A)
        self._check_actions()
        self.states = self.columns(task.state_columns)  # (R, s), s = 0 without a state

    def _read(self, read: Callable[..., Result], *args: Any) -> Result:
        return retried(self._source, read, *args) if isinstance(self._source, str) else read(*args)

    def _check_episodes(self) -> None:
        """Lengths and offsets index everything else."""
        for values in (self.lengths, self._stored_offsets):
            if values.ndim != 1 or len(values) != len(self.lengths) or values.min(initial=0) < 0:
                raise ValueError("episode lengths and offsets must be non-negative and equally many")
            if values.max(initial=0) >= MOST_ROWS:
                raise ValueError(f"an episode has a length or offset of {values.max()} rows")

    @property
    def has_pixels(self) -> bool:
        return self._pixels is not None

    def columns(self, alternatives: tuple[tuple[str, ...], ...]) -> np.ndarray:
        """The columns of the first alternative that is in the dataset, concatenated and finite: (R, n)."""
        parts = []
        for name in self.find(alternatives):
            parts.append(self._column(name))
            self._check_finite(name, parts[-1], "write the dataset again without these episodes")
        return np.concatenate(parts, axis=1) if parts else np.empty((len(self.actions), 0), np.float32)

    def coordinates(self) -> list[Coordinate]:
        """The parts of the state that probes read, for all R rows."""
        task = self.task
        states = self.columns(task.coordinate_columns or task.state_columns)
        if not states.shape[1]:
            raise UserError(
                f"{self.path} has no state, which state probes need: name its columns as state_columns in a task "
                f"(docs/guides/robot-data.md)"
            )
        return task.coordinates(states)

    def start_states(self, rows: np.ndarray) -> np.ndarray:
        """What ``Task.reset`` takes for rows (n,), the state and then the hidden columns: (n, s + h).

        Hidden columns are read for these rows only, because training does not use them.
        """
        hidden = self.task.hidden_columns
        if not (hidden and len(rows) and set(hidden) <= set(self._table.column_names)):
            return self.states[rows]
        with _readable(f"{self.path}: the columns {', '.join(hidden)} cannot be read"):
            episodes, steps = self.locate(rows)
            chunks = self._read(lambda: self._hidden_reader.load_chunk(episodes, steps, steps + 1))
            read = np.stack([np.concatenate([np.ravel(chunk[name]) for name in hidden]) for chunk in chunks])
            if not np.isfinite(read).all():
                raise ValueError("they are NaN or infinite")
        return np.concatenate([self.states[rows], read], axis=1)

    @cached_property
    def _hidden_reader(self) -> Any:
        return _open(self._source, 1, list(self.task.hidden_columns))

    def find(self, alternatives: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
        """The column names of the first alternative that is in the dataset."""
        present = sorted(self._table.column_names)
        found = next((names for names in alternatives if set(names) <= set(present)), None)
        if found is None:
            wanted = " or ".join(repr(" + ".join(names)) for names in alternatives)
            raise UserError(
                f"{self.path} has no column {wanted} (it has: {', '.join(present)}): "
                f"rename a column, or name yours in a task (docs/guides/own-data.md, docs/guides/robot-data.md)"
            )
        return found

    def _column(self, name: str) -> np.ndarray:
        """One column of numbers: (R, n)."""
        with _readable(f"{self.path}: column {name!r} cannot be read"):
            stored = self._read(_stored_column, self._table, name)
            if stored.ndim == 0:
                raise ValueError("it has no rows")
        if stored.dtype.kind not in "fiub":
            raise UserError(f"{self.path}: column {name!r} must hold numbers, not {stored.dtype}")
        last = int((self._stored_offsets + self.lengths).max(initial=0)) - 1
        if len(stored) <= max(last, int(self.lengths.sum()) - 1):
            raise UserError(
                f"{self.path}: column {name!r} has {len(stored)} rows, its episodes reach to row {last}: "
                f"the file is incomplete, download or collect it again"
            )
        count = int(self.lengths.sum())
        if np.array_equal(self._stored_offsets, self.offsets):  # no gaps: spare a copy of the column
            rows: Any = slice(count)
        else:
            rows = np.arange(count) + np.repeat(self._stored_offsets - self.offsets, self.lengths)
        return stored[rows].reshape(count, int(np.prod(stored.shape[1:])))

    def _check_actions(self) -> None:
        if self.task.action_size not in (None, self.actions.shape[1]):
            raise UserError(
                f"{self.path}: column {self.task.action_column!r} has shape {self.actions.shape}, "
                f"{self.task.name} needs (rows, {self.task.action_size}): "
                f"pass the --data of this task, or the task of this data"
            )
        taken = self.actions.copy()
        taken[(self.offsets + self.lengths - 1)[self.lengths > 0]] = 0  # the last row has no action
        self._check_finite(self.task.action_column, taken, "only the last row of an episode may have no action")

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
        """Height and width of the first stored frame; None if frames are drawn from states."""
        if self._pixels is None:
            return None
        height, width = self._stored(np.flatnonzero(self.lengths)[:1], np.zeros(1, np.int64), 1).shape[-2:]
        return height, width

    def _stored(self, episodes: np.ndarray, starts: np.ndarray, count: int) -> Tensor:
        """Frames at their stored size: (B·count, 3, H, W) uint8."""
        assert self._pixels is not None
        column = self.task.image_column
        with _readable(f"{self.path}: column {column!r} cannot be read, the file seems damaged"):
            pixels = self._read(self._pixels.read, episodes, starts, count, self.frameskip)
        if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[1] != 3:
            kind = str(pixels.dtype).removeprefix("torch.")
            raise UserError(
                f"{self.path}: column {column!r} holds {kind} of shape {tuple(pixels.movedim(1, -1).shape[1:])}, "
                f"not uint8 (height, width, 3): convert it"
            )
        return pixels

    def _pixel_reader(self) -> PixelReader | None:
        column = self.task.image_column
        if column not in self._table.column_names:
            if not self.task.has_env:  # then nothing can draw the frames
                self.find(((column,),))
            return None
        if isinstance(self._table, LeRobotTable):
            with _readable(f"{self.path}: the videos of {column!r} cannot be located"):
                return self._table.pixel_reader(column)
        from stable_worldmodel.data import HDF5Dataset, LanceDataset

        if isinstance(self._table, HDF5Dataset):
            return HDF5Pixels(Path(self._table.h5_path), self._stored_offsets, column)
        if isinstance(self._table, LanceDataset):
            return self._read(LancePixels, _lance_path(self._table), self._stored_offsets, column)
        assert isinstance(self._source, Path)
        if any((self._source / column).glob("*.mp4")):
            files = [self._source / column / f"ep_{episode}.mp4" for episode in range(len(self.lengths))]
            return VideoPixels(files, np.zeros(len(files), np.int64))
        return HarnessPixels(_open(self._source, self.frameskip, [column]), column)

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The episode of each row (n,), and its step within the episode."""
        episodes = np.searchsorted(self.offsets, rows, side="right") - 1
        return episodes, rows - self.offsets[episodes]

    def frames_of(self, rows: np.ndarray) -> Tensor:
        """The frames of rows (n,) in any order: (n, 3, S, S) uint8."""
        return self.frames(*self.locate(rows), 1)[:, 0]

    def frame(self, row: int) -> Tensor:
        """The frame of one row: (1, 3, S, S) uint8."""
        return self.frames_of(np.array([row]))

    def content_hash(self) -> str:
        """sha256 of lengths, actions and states: the same for the same episodes in any file format."""
        return self._hash

    @cached_property
    def _hash(self) -> str:
        digest = hashlib.sha256()
        for array in (self.lengths, self.actions, self.states.astype(np.float32, copy=False)):
            digest.update(np.ascontiguousarray(array).reshape(-1).data)
        return digest.hexdigest()[:16]


def episode_lengths(path: str | Path) -> np.ndarray:
    """The number of rows of each episode (E,), without reading a column."""
    found = find_dataset(path)
    with _readable(f"{found} cannot be read as a dataset"):
        return np.asarray(_open(to_open(found) if isinstance(found, str) else found, 1).lengths, np.int64)


def find_dataset(path: str | Path, task: Task | None = None) -> Path | str:
    """The path as given, or in $STABLEWM_HOME, with or without its ending; or a URL (str). task: for the error."""
    if url := as_url(path):
        check_dataset(url)
        return url
    home = os.environ.get("STABLEWM_HOME")
    candidates = [Path(path)] + ([Path(home, path), Path(home, "datasets", path)] if home else [])
    for candidate in candidates:
        for ending in ENDINGS:
            whole = Path(f"{candidate}{ending}")
            if whole.exists():
                return whole.resolve()
    looked = ", ".join(str(p) for p in candidates)
    collect = f"collect one with `atlas collect {task.name if task else 'TASK'} --out {path}`"
    if task is None:
        remedy = f"check the path, or {collect}"
    else:
        remedy = f"{collect}, or pass --data" if task.has_env else "pass --data"
    raise UserError(f"there is no dataset {path} (looked at: {looked}): {remedy}")


@contextmanager
def _readable(otherwise: str) -> Iterator[None]:
    """Turn any exception that a damaged file causes into a UserError."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except ImportError as error:
        raise UserError(f"{otherwise} ({error}): {to_install(error, 'see `atlas doctor`')}") from error
    except BaseException as error:  # a panic in Lance is not an Exception
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
        raise UserError(f"{otherwise} ({reason}): download or collect it again") from error


def _open(path: Path | str, frameskip: int, columns: list[str] | None = None) -> Any:
    if isinstance(path, Path) and is_lerobot(path):
        return LeRobotTable(path)
    import_harness()
    from stable_worldmodel.data import detect_format, get_format

    options: dict[str, Any] = {"frameskip": frameskip, "num_steps": NO_CLIPS, "keys_to_load": columns}
    if isinstance(path, str):  # without these options stable-worldmodel sets its own for AWS, which others refuse
        return get_format("lance").open_reader(path, **options, connect_kwargs={"storage_options": {}})
    found = detect_format(path)
    if found is None and (path.suffix in HDF5_ENDINGS or any(p.suffix in HDF5_ENDINGS for p in path.glob("*"))):
        check_modules("hdf5")  # without these modules stable-worldmodel does not know the format
    if found is None:
        raise UserError(
            f"{path} is not a dataset: expected a .lance folder, an .h5 file, a folder with ep_len.npz "
            f"(stable-worldmodel), or a folder with meta/info.json (LeRobot)"
        )
    if found.name == "hdf5":
        _check_hdf5(path)
    if found.name == "video":
        found = get_format("folder")  # same columns; VideoPixels reads the frames
    return found.open_reader(path, **options)


def _lance_path(table: Any) -> str:
    return f"{table.uri}/{table.table_name}.lance"


def _stored_column(table: Any, name: str) -> np.ndarray:
    """All stored rows of a column. Lance columns of numbers are read as arrays: stable-worldmodel's reader makes a
    Python object of each number, and holds the column in memory."""
    if isinstance(table, LeRobotTable):
        return np.asarray(table.get_col_data(name))
    from stable_worldmodel.data import LanceDataset

    if isinstance(table, LanceDataset):
        import lance
        import pyarrow as pa

        dataset = lance.dataset(_lance_path(table))
        kind = dataset.schema.field(name).type
        if pa.types.is_fixed_size_list(kind) and pa.types.is_primitive(kind.value_type):
            column = dataset.to_table(columns=[name])[name]
            if len(column) and not column.null_count:
                numbers = np.concatenate([part.flatten().to_numpy(zero_copy_only=False) for part in column.chunks])
                return numbers.astype(np.float32, copy=False).reshape(len(column), kind.list_size)
    return np.asarray(table.get_col_data(name))


def _check_hdf5(path: Path) -> None:
    """Fail on a damaged file. The harness opens files for reading while writing, and on a truncated file HDF5 would
    then wait forever for the writer."""
    import h5py

    for file in [path] if path.is_file() else [*path.glob("*.h5"), *path.glob("*.hdf5")]:
        with h5py.File(file, "r") as opened:
            for name in opened:
                if not isinstance(opened.get(name, getlink=True), h5py.HardLink):
                    raise UserError(f"{file}: column {name!r} is a link: store the data itself")
                _check_hdf5_column(file, name, opened[name])


def _check_hdf5_column(file: Path, name: str, column: Any) -> None:
    """The column must store its own bytes, and about as many as it claims: rows that were never written take no
    space on disk, but as much memory as any other."""
    import h5py

    if not isinstance(column, h5py.Dataset):
        return  # not a column; a missing column is reported by name elsewhere
    if column.external or column.is_virtual:
        raise UserError(f"{file}: column {name!r} stores its data in another file: store the data itself")
    holds = column.id.get_storage_size()
    if column.nbytes > SMALL + MOST_PACKING * holds:
        raise UserError(
            f"{file}: column {name!r} claims {column.nbytes:,} bytes and holds {holds:,}: the file is incomplete, "
            f"download or collect it again"
        )
