"""A dataset while it is collected: a folder for one process at a time, whose whole episodes outlive a kill.

x.h5.partial/notes.json   how the episodes are made, and which of them failed
x.h5.partial/000000.npz   HDF5: episodes that were recorded together, in files that are whole or absent
x.h5.partial/data.h5      the dataset; of HDF5 only at the end
x.h5.partial/card.json    its card, once all episodes are there: what is left to do is to rename
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
    """The folder. Lance appends all or nothing by itself: its table grows in place."""

    def __init__(self, out: Path):
        self.out, self.format = out, FORMATS[out.suffix]
        self.folder = out.with_name(out.name + ".partial")
        self.data = self.folder / f"data{out.suffix}"
        self.notes, self.card = self.folder / "notes.json", self.folder / "card.json"

    @contextmanager
    def opened(self) -> Iterator[None]:
        """For this process alone. Afterwards the folder stays if there is an episode in it to go on from."""
        with locked(self.folder, "collected"):
            try:
                for left in self.folder.glob("*.tmp"):  # by a process that was killed while it wrote
                    left.unlink()
                yield
            finally:
                if not any(path.exists() for path in (self.data, self.card, self.folder / f"{0:06}.npz")):
                    self.clear()
                    (self.folder / LOCK).unlink()
                    with suppress(OSError):  # the next one has taken its lock meanwhile
                        self.folder.rmdir()

    def append(self, episodes: list[Episode]) -> None:
        self._write(episodes, mode="append")

    def recover(self) -> list[int]:
        """Lengths of the whole episodes, in order. What is left behind them is removed."""
        from stable_worldmodel.data import load_dataset

        return [int(n) for n in load_dataset(str(self.data.resolve())).lengths] if self.data.exists() else []

    def assemble(self) -> None:
        """All episodes are in ``data``."""

    def _write(self, episodes: Any, mode: str) -> None:
        from stable_worldmodel.data import get_format

        with get_format(self.format).open_writer(self.data, mode=mode) as writer:
            writer.write_episodes({column: list(values) for column, values in e.items()} for e in episodes)

    def put_in_place(self, card: dict[str, Any], card_path: Path) -> None:
        """The dataset and then its card get their names. Killed in between, :meth:`adopt` does the rest."""
        write_json(self.card, card)
        for path in [self.data, *self.data.rglob("*")]:
            sync(path)
        card_path.unlink(missing_ok=True)  # of a set that is replaced
        remove(self.out)
        self.data.rename(self.out)
        sync(self.out.parent)
        write_json(card_path, card)
        self.clear()

    def adopt(self, card_path: Path) -> dict[str, Any] | None:
        """Give a dataset that a call was killed over the card it lacks; None where there is no such dataset."""
        if not self.card.exists() or self.data.exists() or not self.out.exists():
            return None
        card = dict(read_json(self.card))
        write_json(card_path, card)
        self.clear()
        return card

    def clear(self) -> None:
        """Remove everything but the lock."""
        for path in self.folder.iterdir():
            if path.name != LOCK:
                remove(path)


class HDF5Partial(Partial):
    """An HDF5 file that is open for writing when its process is killed is lost. So it is written at the end, in one
    go, from files that hold what was recorded together."""

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
        with suppress(OSError, ValueError, KeyError, BadZipFile):  # one that is missing or damaged ends them
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
            except Exception as error:  # whatever a damaged file makes numpy and zipfile raise
                raise UserError(
                    f"{path} is damaged ({reason(error)}): delete it, and the same command records what is missing"
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
