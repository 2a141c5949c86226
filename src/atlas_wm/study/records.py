"""What became of each unit, in small files of the study's folder: a second call continues from them."""

import re
import shutil
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from atlas_wm.errors import UserError
from atlas_wm.runs.files import read_json, write_json
from atlas_wm.runs.films import films_path
from atlas_wm.runs.results import EvaluationResult, read_results
from atlas_wm.settings import from_dict
from atlas_wm.study.units import Unit, portable

State = Literal["waiting", "running", "done", "failed", "blocked"]
AT_ONCE = ("collect", "try", "train")  # kinds whose result appears when it is complete
BESIDE = (".partial", ".replaced", ".card.json")  # endings of what such commands leave beside it


@dataclass(frozen=True)
class Record:
    key: str
    command: tuple[str, ...]
    state: State
    seconds: float = 0.0  # of all attempts
    attempts: int = 1


class Records:
    def __init__(self, out: Path):
        self.folder = out / "units"

    def _file(self, unit: Unit) -> Path:
        return self.folder / f"{re.sub(r'[^A-Za-z0-9._+=-]+', '_', unit.name)}.json"

    def log(self, unit: Unit) -> Path:
        return self._file(unit).with_suffix(".log")

    def read(self, unit: Unit) -> Record | None:
        return self._read(self._file(unit))

    def _read(self, file: Path) -> Record | None:
        try:
            return from_dict(Record, read_json(file), str(file))
        except UserError:  # there is none, or it is damaged: do it again
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

    def seconds_so_far(self, unit: Unit) -> float:
        """Of attempts that failed or were interrupted."""
        record = self.read(unit)
        return record.seconds if record and record.key == unit.key and record.state != "done" else 0.0

    def clear(self, unit: Unit) -> None:
        """Remove the result of other settings, and what is left of one that has to be made again. An interrupted
        unit keeps what it has: its command resumes."""
        record = self.read(unit)
        if record is None:
            return
        if unit.kind == "eval":
            for path in results_of(unit.makes, record.command):
                remove_result(path)
        if unit.kind not in AT_ONCE or (record.key == unit.key and not self.was_done(unit)):
            return
        result = unit.makes if unit.kind == "collect" else unit.makes.parent
        for ending in ("", *BESIDE):
            path = result.with_name(result.name + ending)
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def remove_dropped(self, units: Collection[Unit]) -> None:
        """Remove the results of evaluations that the study's runs no longer have. Those that it never ran stay."""
        current = {self._file(unit) for unit in units}
        commands = {from_anywhere(unit.command) for unit in units if unit.kind == "eval" and unit.command}
        folders = {unit.makes.parent.name: unit.makes for unit in units if unit.kind == "eval" and unit.command}
        for file in set(self.folder.glob("eval_*.json")) - current:
            record = self._read(file)
            folder = folders.get(Path(record.command[1]).name) if record and len(record.command) > 1 else None
            if record is None or folder is None:
                continue
            if from_anywhere(record.command) not in commands:
                for path in results_of(folder, record.command):
                    remove_result(path)
            file.unlink()


def from_anywhere(command: Sequence[str]) -> tuple[str, ...]:
    """The command of an evaluation without the place of the study's folder, in which the run lies."""
    return portable(command, Path(command[1]).parent)


def results_of(folder: Path, command: Sequence[str]) -> dict[Path, EvaluationResult]:
    """Those among the results of a run that the command made, wherever the run was then."""
    found = {folder / f"{name}.json": result for name, result in read_results(folder.parent).items()}
    wanted = from_anywhere(command)
    return {path: r for path, r in found.items() if len(r.command) > 1 and from_anywhere(r.command) == wanted}


def remove_result(path: Path) -> None:
    path.unlink(missing_ok=True)
    films_path(path).unlink(missing_ok=True)
