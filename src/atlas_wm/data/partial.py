"""A dataset during collection: a locked folder whose complete episodes survive a kill.

x.h5.partial/notes.json   how the episodes are recorded, and which of them failed
x.h5.partial/000000.npz   HDF5 only: the episodes of one job with compressed frames, written atomically
x.h5.partial/data.h5      the dataset; for HDF5 it is written at the end
x.h5.partial/card.json    the card, once all episodes are recorded and only renaming is left
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from atlas_wm.data.encoding import (
    EncodedFrames,
    Episode,
    FrameEncoder,
    common_shape,
    encode_images,
    gzip_frame,
    jpeg_frame,
)
from atlas_wm.data.writers import append_lance, check_numbers, write_hdf5
from atlas_wm.errors import UserError, reason
from atlas_wm.runs.files import LOCK, locked, read_json, sync, write_atomically, write_json

FORMATS = {".lance": "lance", ".h5": "hdf5", ".hdf5": "hdf5"}
LENGTHS = "ep_len"
SIZES, SHAPE = "/sizes", "/shape"  # endings of a part's arrays: bytes of each compressed frame, shape of a frame


class Partial:
    """The folder of a Lance dataset. Lance appends atomically, so its table is written directly."""

    encode: FrameEncoder = staticmethod(jpeg_frame)

    def __init__(self, out: Path):
        self.out, self.format = out, FORMATS[out.suffix]
        self.lengths: list[int] = []  # of the complete episodes
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
        """Store episodes whose frames are encoded."""
        append_lance(self.data, episodes, len(self.lengths))
        self.lengths += [len(e["action"]) for e in episodes]

    def recover(self) -> list[int]:
        """Lengths of the complete episodes, in order. Anything after them is removed."""
        from stable_worldmodel.data import load_dataset

        if self.data.exists():
            self.lengths = [int(n) for n in load_dataset(str(self.data.resolve())).lengths]
        return list(self.lengths)

    def assemble(self) -> None:
        """Write ``data`` from all episodes. With Lance it is complete already."""

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

    encode: FrameEncoder = staticmethod(gzip_frame)

    def __init__(self, out: Path):
        super().__init__(out)
        self.parts: list[Path] = []

    def append(self, episodes: list[Episode]) -> None:
        lengths = [len(e["action"]) for e in episodes]
        path = self.folder / f"{len(self.parts):06}.npz"
        arrays: dict[str, Any] = {LENGTHS: lengths}
        for name in episodes[0]:
            arrays |= _to_arrays(name, [e[name] for e in episodes])
        with write_atomically(path) as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)
        self.parts.append(path)
        self.lengths += lengths

    def recover(self) -> list[int]:
        self.lengths, self.parts = [], []
        found = sorted(self.folder.glob("*.npz"))
        with suppress(OSError, ValueError, KeyError, BadZipFile):  # stop at the first missing or damaged file
            for number in range(len(found)):
                path = self.folder / f"{number:06}.npz"
                with np.load(path) as part:
                    self.lengths += part[LENGTHS].tolist()
                self.parts.append(path)
        for path in set(found) - set(self.parts):
            path.unlink()
        return list(self.lengths)

    def assemble(self) -> None:
        write_hdf5(self.data, self.lengths, map(_read_part, self.parts))


def _to_arrays(name: str, values: list[Any]) -> dict[str, Any]:
    """A column of several episodes as arrays of a part."""
    if not isinstance(values[0], EncodedFrames):
        numbers = np.concatenate(values)
        check_numbers(name, numbers)
        return {name: numbers}
    frames = [frame for episode in values for frame in episode.frames]
    return {
        name: np.frombuffer(b"".join(frames), np.uint8),
        name + SIZES: np.array([len(frame) for frame in frames]),
        name + SHAPE: np.array(common_shape(name, [episode.shape for episode in values])),
    }


def _read_part(path: Path) -> Episode:
    """The columns of all episodes of a part."""
    try:
        with np.load(path) as part:
            columns: dict[str, Any] = {name: part[name] for name in part.files if name != LENGTHS}
    except Exception as error:  # NumPy and zipfile raise many kinds on damaged files
        raise UserError(f"{path} is damaged ({reason(error)}): delete it and run the same command again") from error
    for name in [name.removesuffix(SIZES) for name in columns if name.endswith(SIZES)]:
        ends, stored = np.cumsum([0, *columns.pop(name + SIZES)]).tolist(), columns[name].tobytes()
        frames = [stored[begin:end] for begin, end in pairwise(ends)]
        columns[name] = EncodedFrames(frames, tuple(columns.pop(name + SHAPE).tolist()))
    return encode_images(columns, gzip_frame)  # parts of version 0.1 hold raw frames


def partial_of(out: Path) -> Partial:
    return HDF5Partial(out) if FORMATS[out.suffix] == "hdf5" else Partial(out)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
