"""What became of each unit, in small files of the study's folder: a second call continues from them."""

import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from atlas_wm.errors import UserError
from atlas_wm.runs.files import read_json, write_json
from atlas_wm.settings import from_dict
from atlas_wm.study.units import Unit

State = Literal["waiting", "running", "done", "failed", "blocked"]
AT_ONCE = ("collect", "try", "train")  # kinds whose result appears when it is complete


@dataclass(frozen=True)
class Record:
    key: str
    command: tuple[str, ...]
    state: State
    seconds: float = 0.0  # of the last attempt
    attempts: int = 1


class Records:
    def __init__(self, out: Path):
        self.folder = out / "units"

    def _file(self, unit: Unit) -> Path:
        return self.folder / f"{re.sub(r'[^A-Za-z0-9._+=-]+', '_', unit.name)}.json"

    def log(self, unit: Unit) -> Path:
        return self._file(unit).with_suffix(".log")

    def read(self, unit: Unit) -> Record | None:
        try:
            return from_dict(Record, read_json(self._file(unit)), str(self._file(unit)))
        except (FileNotFoundError, UserError):  # as after a crash of an older version: do it again
            return None

    def write(self, unit: Unit, state: State, seconds: float = 0.0, attempts: int = 1) -> None:
        write_json(self._file(unit), asdict(Record(unit.key, unit.command, state, seconds, attempts)))

    def was_done(self, unit: Unit) -> bool:
        """With these settings. Its result may be gone since. A command may also have gone on to its end after the
        study was killed."""
        record = self.read(unit)
        if record is None or record.key != unit.key:
            return False
        return record.state == "done" or (unit.kind in AT_ONCE and unit.makes.exists())

    def why(self, unit: Unit) -> str:
        """Why a unit has to run."""
        record = self.read(unit)
        if record is None:
            return "new"
        if record.key != unit.key:
            return "its settings changed" if record.command != unit.command else "what it needs changed"
        return {"done": "its result is gone", "failed": "it failed"}.get(record.state, "it was interrupted")

    def clear(self, unit: Unit) -> None:
        """Remove the result of other settings, and what is left of one that has to be made again. An interrupted
        unit keeps what it has: its command resumes."""
        record = self.read(unit)
        if record is None or unit.kind not in AT_ONCE:
            return
        if record.key == unit.key and not self.was_done(unit):
            return
        result = unit.makes if unit.kind == "collect" else unit.makes.parent
        for path in (result, *result.parent.glob(f"{result.name}.*")):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
