"""All diagnostics of some runs: one JSON file each in the run folder, kept while nothing it depends on changes."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from atlas_wm.diagnose.cases import cases, choose_rows
from atlas_wm.diagnose.evaluated import Evaluated, evaluated
from atlas_wm.diagnose.futures import Futures, foresee
from atlas_wm.diagnose.geometry import geometry
from atlas_wm.diagnose.marginal import marginal
from atlas_wm.diagnose.probe import probe
from atlas_wm.diagnose.queries import Queries, QuerySettings, shared_queries
from atlas_wm.diagnose.regret import regret
from atlas_wm.diagnose.relational import relational
from atlas_wm.diagnose.rollout import rollout
from atlas_wm.diagnose.simulate import Simulator
from atlas_wm.diagnose.subject import Subject
from atlas_wm.errors import UserError, unknown
from atlas_wm.parallel.devices import pick_device
from atlas_wm.parallel.launch import processes
from atlas_wm.parallel.processes import from_main, is_main, world_size
from atlas_wm.parallel.workers import TIMEOUT
from atlas_wm.runs.files import read_json, write_json, writing
from atlas_wm.runs.folder import read_run, writable_folder
from atlas_wm.runs.versions import versions

FORMAT = 1
OnStep = Callable[[str, int, int], None]  # what is being done, done, of how many


class Diagnosis:
    """One run and the work that its diagnostics share, each part done when first needed."""

    def __init__(self, subject: Subject, settings: QuerySettings, runs: Sequence[Path], on_step: OnStep):
        self.subject, self.settings, self.runs, self.on_step = subject, settings, runs, on_step

    @cached_property
    def queries(self) -> Queries:
        mine, *others = (run / "diagnostics" / "queries.npz" for run in (self.subject.run, *self.runs))
        return shared_queries(
            self.subject.data,
            self.settings,
            self.subject.simulator,
            mine,
            others,
            lambda done, total: self.on_step("simulate queries", done, total),
        )

    @cached_property
    def _futures(self) -> Futures | UserError:
        """An error is kept too: of several processes all found it together."""
        name = f"{self.subject.run.name}: look at outcomes"
        try:
            return foresee(self.subject, self.queries, lambda done, total: self.on_step(name, done, total))
        except UserError as error:
            return error

    @property
    def futures(self) -> Futures:
        if isinstance(self._futures, UserError):
            raise self._futures
        return self._futures

    def look_together(self, names: Sequence[str], fresh: bool) -> None:
        """The long part, in several processes: each simulates and looks at some queries, where they are needed."""
        shared = [name for name in names if DIAGNOSTICS[name][0] == ALL]

        def needed(name: str) -> bool:
            try:
                return fresh or not is_current(self.file(name), self, name)
            except UserError:  # it is said when its turn comes
                return False

        if from_main(is_main() and any(map(needed, shared))):
            _ = self._futures

    def file(self, name: str) -> Path:
        return self.subject.run / "diagnostics" / f"{name}.json"

    @cached_property
    def evaluated(self) -> Evaluated:
        offset, states = self.settings.offset, self.subject.data.states
        found = evaluated(self.subject.run, offset, self.subject.data_hash, self.runs)
        for e in found.episodes:
            if e.row + offset >= len(states) or any(len(s) != states.shape[1] for s in e.last_states):
                raise UserError(f"the evaluation of {self.subject.run} is not of this dataset: row {e.row}")
        return found

    @property
    def evaluation(self) -> str:
        return self.evaluated.key

    @cached_property
    def rows(self) -> list[int]:
        """Of the episodes to film."""
        return choose_rows(self.runs, self.settings.offset, self.subject.data_hash)


ALL = tuple(field.name for field in fields(QuerySettings))
# Each with the settings that it depends on, which are stored with it: names of QuerySettings or of Diagnosis.
DIAGNOSTICS: dict[str, tuple[tuple[str, ...], Callable[[Diagnosis], dict[str, Any]]]] = {
    "probe": (("offset", "evaluation"), lambda d: probe(d.subject, d.evaluated.episodes)),
    "marginal": (("seed",), lambda d: marginal(d.subject, d.settings.seed)),
    "rollout": (ALL, lambda d: rollout(d.subject, d.futures)),
    "relational": (ALL, lambda d: relational(d.subject, d.futures)),
    "regret": (ALL, lambda d: regret(d.subject, d.futures)),
    "geometry": (("seed",), lambda d: geometry(d.subject, d.settings.seed)),
    "cases": (
        ("offset", "evaluation", "rows"),
        lambda d: cases(d.subject, d.evaluated, d.rows, d.settings.offset),
    ),
}

NEEDS_ENV = {"probe", "relational", "regret", "cases"}  # the others work on recorded data alone, too
BESIDE_BANK = {"probe", "rollout", "relational", "regret", "geometry"}  # measured beside training frames


@processes()
def diagnose(
    runs: Sequence[str | Path],
    what: Sequence[str] = tuple(DIAGNOSTICS),
    *,
    settings: QuerySettings | None = None,
    data_path: str | Path | None = None,
    workers: int | None = None,
    timeout: float = TIMEOUT,
    device: str = "auto",
    fresh: bool = False,
    on_step: OnStep = lambda name, done, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Path]:
    """Measure and write ``RUN/diagnostics/<what>.json`` for every run. A diagnostic that cannot be made (no
    evaluation yet, say) is said and left out; the others go on. Returns the files that are there in the end.

    Several processes (torchrun, srun) share the queries; the rest is the main one's, which writes."""
    for name in what:
        if name not in DIAGNOSTICS:
            raise unknown("diagnostic", name, DIAGNOSTICS)
    folders = [Path(run) for run in runs]
    for run in folders:
        read_run(run)  # a name that is wrong is said before the work begins, as is a folder that cannot be written
    for run in folders:
        writable_folder(run, "diagnostics")
    files = []
    with Simulator(workers, timeout) as simulator:
        for run in folders:
            subject = Subject(run, simulator, data_path, pick_device(device))
            mine = settings or QuerySettings()
            if mine.queries is None:
                mine = replace(mine, queries=16 if subject.data.task.name == "cube" else 100)
            work = Diagnosis(subject, mine, folders, on_step)
            if world_size() > 1:
                work.look_together(what, fresh)
            if not is_main():
                continue
            for number, name in enumerate(what):
                on_step(f"{run.name}: {name}", number, len(what))
                file = work.file(name)
                try:
                    if name in NEEDS_ENV:
                        subject.data.task.require_env(name, "it is skipped")
                    if fresh or not is_current(file, work, name):
                        result = measured(work, name)
                        with writing(file.parent):
                            write_json(file, result, indent=None)
                    files.append(file)
                except UserError as error:
                    file.unlink(missing_ok=True)
                    say(f"{run.name}: no {name}: {error}")
    return from_main(files)


def measured(work: Diagnosis, name: str) -> dict[str, Any]:
    started = time.perf_counter()
    which, measure = DIAGNOSTICS[name]
    raw = measure(work)
    result = finite(raw)
    if result != raw:
        result.setdefault("note", "some numbers are not defined: this happens where a latent is constant")
    info = work.subject.info
    return {
        "what": name,
        "format": FORMAT,
        "run": {
            "name": work.subject.run.name,
            "task": info.task,
            "method": info.method,
            "recipe": info.recipe,
            "seed": info.config.train.seed,
            **made_from(work, name),
        },
        "settings": settings_of(work, name),
        "queries": work.queries.key if which == ALL else None,
        "result": result,
        "seconds": round(time.perf_counter() - started, 3),
        "versions": versions(),
    }


def finite(value: Any) -> Any:
    """The same with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def made_from(work: Diagnosis, name: str) -> dict[str, str | None]:
    """Hashes: of the data, of the weights, and of the training data that the bank is from, where there is one."""
    bank = work.subject.bank_hash if name in BESIDE_BANK else None
    return {"data": work.subject.data_hash, "weights": work.subject.weights_hash, "bank": bank}


def settings_of(work: Diagnosis, name: str) -> dict[str, Any]:
    """What the result depends on, besides the run itself."""
    which, _ = DIAGNOSTICS[name]
    settings = asdict(work.settings)
    return {key: settings[key] if key in settings else getattr(work, key) for key in which}


def is_current(file: Path, work: Diagnosis, name: str) -> bool:
    """Whether the file was made from this model, this data and these settings."""
    try:
        stored = read_json(file)
    except UserError:  # there is none, or it is damaged
        return False
    return (
        isinstance(stored, dict)
        and stored.get("format") == FORMAT
        and stored.get("settings") == settings_of(work, name)
        and made_from(work, name).items() <= stored.get("run", {}).items()
    )
