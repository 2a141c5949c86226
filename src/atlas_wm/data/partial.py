"""A dataset during collection: a locked folder whose complete episodes survive a kill.

x.h5.partial/notes.json   how the episodes are recorded, and which of them failed
x.h5.partial/000000.npz   HDF5 only: the episodes of one job, written atomically
x.h5.partial/data.h5      the dataset; for HDF5 it is written at the end
x.h5.partial/card.json    the card, once all episodes are recorded and only renaming is left
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from atlas_wm.errors import UserError, reason
from atlas_wm.runs.files import LOCK, locked, read_json, sync, write_atomically, write_json

FORMATS = {".lance": "lance", ".h5": "hdf5", ".hdf5": "hdf5"}
Episode = dict[str, np.ndarray]  # each (steps, ...)
LENGTHS = "ep_len"


class Partial:
    """The folder of a Lance dataset. Lance appends atomically, so its table is written directly."""

    def __init__(self, out: Path):
        self.out, self.format = out, FORMATS[out.suffix]
        self.folder = out.with_name(out.name + ".partial")
        self.data = self.folder / f"data{out.suffix}"
        self.notes, self.card = self.folder / "notes.json", self.folder / "card.json"

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Lock the folder. Afterwards remove it unless it contains episodes to resume from."""
        with locked(self.folder, "collected"):
            try:
                for left in self.folder.glob("*.tmp"):  # left by a process that was killed while writing
                    left.unlink()
                yield
            finally:
                if not any(path.exists() for path in (self.data, self.card, self.folder / f"{0:06}.npz")):
                    self.clear()
                    (self.folder / LOCK).unlink()
                    with suppress(OSError):  # another process has locked it meanwhile
                        self.folder.rmdir()

    def append(self, episodes: list[Episode]) -> None:
        self._write(episodes, mode="append")

    def recover(self) -> list[int]:
        """Lengths of the complete episodes, in order. Anything after them is removed."""
        from stable_worldmodel.data import load_dataset

        return [int(n) for n in load_dataset(str(self.data.resolve())).lengths] if self.data.exists() else []

    def assemble(self) -> None:
        """Write ``data`` from all episodes. With Lance it is complete already."""

    def _write(self, episodes: Any, mode: str) -> None:
        from stable_worldmodel.data import get_format

        with get_format(self.format).open_writer(self.data, mode=mode) as writer:
            writer.write_episodes({column: list(values) for column, values in e.items()} for e in episodes)

    def publish(self, card: dict[str, Any], card_path: Path) -> None:
        """Rename the dataset and then write its card. After a kill in between, :meth:`adopt` writes the card."""
        write_json(self.card, card)
        for path in [self.data, *self.data.rglob("*")]:
            sync(path)
        card_path.unlink(missing_ok=True)  # of the dataset that is replaced
        remove(self.out)
        self.data.rename(self.out)
        sync(self.out.parent)
        write_json(card_path, card)
        self.clear()

    def adopt(self, card_path: Path) -> dict[str, Any] | None:
        """Write the card that a killed call left unwritten; None if there is no such dataset."""
        if not self.card.exists() or self.data.exists() or not self.out.exists():
            return None
        card = dict(read_json(self.card))
        write_json(card_path, card)
        self.clear()
        return card

    def clear(self) -> None:
        """Remove everything except the lock."""
        for path in self.folder.iterdir():
            if path.name != LOCK:
                remove(path)


class HDF5Partial(Partial):
    """A kill destroys an HDF5 file that is open for writing. So each job is stored in a file of its own, and the
    dataset is written from these at the end."""

    def __init__(self, out: Path):
        super().__init__(out)
        self.parts: list[Path] = []

    def append(self, episodes: list[Episode]) -> None:
        columns: dict[str, Any] = {name: np.concatenate([e[name] for e in episodes]) for name in episodes[0]}
        for name, values in columns.items():
            if values.dtype.kind not in "fiub":
                raise UserError(f"{self.out}: column {name!r} must hold numbers, not {values.dtype}")
        columns[LENGTHS] = [len(e["action"]) for e in episodes]
        path = self.folder / f"{len(self.parts):06}.npz"
        with write_atomically(path) as temporary, temporary.open("wb") as file:
            np.savez(file, **columns)
        self.parts.append(path)

    def recover(self) -> list[int]:
        lengths: list[int] = []
        self.parts = []
        found = sorted(self.folder.glob("*.npz"))
        with suppress(OSError, ValueError, KeyError, BadZipFile):  # stop at the first missing or damaged file
            for number in range(len(found)):
                path = self.folder / f"{number:06}.npz"
                with np.load(path) as part:
                    lengths += part[LENGTHS].tolist()
                self.parts.append(path)
        for path in set(found) - set(self.parts):
            path.unlink()
        return lengths

    def assemble(self) -> None:
        self._write(self._episodes(), mode="overwrite")

    def _episodes(self) -> Iterator[Episode]:
        for path in self.parts:
            try:
                with np.load(path) as part:
                    columns = {name: part[name] for name in part.files}
            except Exception as error:  # NumPy and zipfile raise many kinds on damaged files
                raise UserError(
                    f"{path} is damaged ({reason(error)}): delete it and run the same command again"
                ) from error
            ends = np.cumsum(columns.pop(LENGTHS))[:-1]
            pieces = {name: np.split(values, ends) for name, values in columns.items()}
            for number in range(len(ends) + 1):
                yield {name: values[number] for name, values in pieces.items()}


def partial_of(out: Path) -> Partial:
    return HDF5Partial(out) if FORMATS[out.suffix] == "hdf5" else Partial(out)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
