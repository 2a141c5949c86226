"""Run the diagnostics: one JSON file each in the run folder, measured again when an input changes."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from atlas_wm.diagnose.cases import cases, choose_rows
from atlas_wm.diagnose.catalog import DIAGNOSTICS, QUERY_SETTINGS, DiagnosticName, QuerySettings
from atlas_wm.diagnose.evaluated import Evaluated, evaluated
from atlas_wm.diagnose.frozen_run import FrozenRun
from atlas_wm.diagnose.futures import Futures, predict_futures
from atlas_wm.diagnose.geometry import geometry
from atlas_wm.diagnose.imagined import imagined
from atlas_wm.diagnose.marginal import marginal
from atlas_wm.diagnose.probe import probe
from atlas_wm.diagnose.queries import Queries, shared_queries
from atlas_wm.diagnose.regret import regret
from atlas_wm.diagnose.relational import relational
from atlas_wm.diagnose.rollout import rollout
from atlas_wm.diagnose.simulate import Simulator
from atlas_wm.diagnose.state import state
from atlas_wm.errors import UserError, unknown
from atlas_wm.parallel.devices import pick_device
from atlas_wm.parallel.launch import processes
from atlas_wm.parallel.processes import from_main, is_main, world_size
from atlas_wm.parallel.workers import TIMEOUT
from atlas_wm.runs.files import read_json, write_json, writing
from atlas_wm.runs.folder import read_run, writable_folder
from atlas_wm.runs.versions import versions

FORMAT = 1
OnStep = Callable[[str, int, int], None]  # name of the step, number done, total


class Diagnosis:
    """One run and the work that its diagnostics share; each part is done when first needed."""

    def __init__(self, run: FrozenRun, settings: QuerySettings, compared: Sequence[Path], on_step: OnStep):
        self.run, self.settings, self.compared, self.on_step = run, settings, compared, on_step

    @cached_property
    def queries(self) -> Queries:
        own, *others = (folder / "diagnostics" / "queries.npz" for folder in (self.run.folder, *self.compared))
        return shared_queries(
            self.run.data,
            self.settings,
            self.run.simulator,
            own,
            others,
            lambda done, total: self.on_step("simulate queries", done, total),
        )

    @cached_property
    def _futures(self) -> Futures | UserError:
        """An error is cached too: with several processes, all of them got it in the same collective call."""
        name = f"{self.run.folder.name}: encode outcomes"
        try:
            return predict_futures(self.run, self.queries, lambda done, total: self.on_step(name, done, total))
        except UserError as error:
            return error

    @property
    def futures(self) -> Futures:
        if isinstance(self._futures, UserError):
            raise self._futures
        return self._futures

    def share_futures(self, names: Sequence[DiagnosticName], fresh: bool) -> None:
        """Simulate and encode the queries in all processes, if a diagnostic needs them."""
        shared = [name for name in names if DIAGNOSTICS[name].settings == QUERY_SETTINGS]

        def needed(name: DiagnosticName) -> bool:
            try:
                return fresh or not is_current(self.file(name), self, name)
            except UserError:  # reported when this diagnostic is measured
                return False

        if from_main(is_main() and any(map(needed, shared))):
            _ = self._futures

    def file(self, name: DiagnosticName) -> Path:
        return self.run.folder / "diagnostics" / f"{name}.json"

    @cached_property
    def evaluated(self) -> Evaluated:
        offset, states = self.settings.offset, self.run.data.states
        found = evaluated(self.run.folder, offset, self.run.data_hash, self.compared)
        for e in found.episodes:
            if e.row + offset >= len(states) or any(len(s) != states.shape[1] for s in e.last_states):
                raise UserError(f"the evaluation of {self.run.folder} is not of this dataset: row {e.row}")
        return found

    @property
    def evaluation(self) -> str:
        return self.evaluated.key

    @cached_property
    def rows(self) -> list[int]:
        """Start rows of the episodes to film."""
        return choose_rows(self.compared, self.settings.offset, self.run.data_hash)


MEASURE: dict[DiagnosticName, Callable[[Diagnosis], dict[str, Any]]] = {
    "probe": lambda d: probe(d.run, d.evaluated.episodes),
    "state": lambda d: state(d.run, d.settings.seed),
    "marginal": lambda d: marginal(d.run, d.settings.seed),
    "rollout": lambda d: rollout(d.run, d.futures),
    "relational": lambda d: relational(d.run, d.futures),
    "regret": lambda d: regret(d.run, d.futures),
    "geometry": lambda d: geometry(d.run, d.settings.seed),
    "cases": lambda d: cases(d.run, d.evaluated, d.rows, d.settings.offset),
    "imagined": lambda d: imagined(d.run, d.evaluated, d.settings.offset),
}

OFFLINE_NOTES = {  # of a task without an environment
    "marginal": "measured on recorded frames, held-out ones if there are any: there is no environment to act in",
    "rollout": "measured on recorded actions alone: there is no environment to try others in",
}


@processes()
def diagnose(
    runs: Sequence[str | Path],
    what: Sequence[DiagnosticName] = tuple(DIAGNOSTICS),
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
    """Measure and write ``RUN/diagnostics/<what>.json`` for every run. Returns the files that exist afterwards.

    A diagnostic that cannot be measured, for example because the run was not evaluated, is skipped and reported
    through ``say``. Several processes (torchrun, srun) share the queries; the main process does everything else.
    """
    for name in what:
        if name not in DIAGNOSTICS:
            raise unknown("diagnostic", name, DIAGNOSTICS)
    folders = [Path(run) for run in runs]
    for folder in folders:
        read_run(folder)  # a wrong name and a read-only folder are reported before the work begins
    for folder in folders:
        writable_folder(folder, "diagnostics")
    files = []
    with Simulator(workers, timeout) as simulator:
        for folder in folders:
            run = FrozenRun(folder, simulator, data_path, pick_device(device))
            asked = settings or QuerySettings()
            if asked.queries is None:
                asked = replace(asked, queries=16 if run.data.task.name == "cube" else 100)
            diagnosis = Diagnosis(run, asked, folders, on_step)
            if world_size() > 1:
                diagnosis.share_futures(what, fresh)
            if not is_main():
                continue
            for number, name in enumerate(what):
                on_step(f"{folder.name}: {name}", number, len(what))
                file = diagnosis.file(name)
                try:
                    if DIAGNOSTICS[name].needs_env:
                        diagnosis.run.data.task.require_env(name, "it is skipped")
                    if fresh or not is_current(file, diagnosis, name):
                        result = measure(diagnosis, name)
                        with writing(file.parent):
                            write_json(file, result, indent=None)
                    files.append(file)
                except UserError as error:
                    file.unlink(missing_ok=True)
                    say(f"{folder.name}: no {name}: {error}")
    return from_main(files)


def measure(diagnosis: Diagnosis, name: DiagnosticName) -> dict[str, Any]:
    started = time.perf_counter()
    raw = MEASURE[name](diagnosis)
    result = finite(raw)
    if result != raw:
        result.setdefault("note", "some numbers are undefined, for example because the latent is constant")
    if name in OFFLINE_NOTES and not diagnosis.run.data.task.has_env:
        result.setdefault("note", OFFLINE_NOTES[name])
    info = diagnosis.run.info
    return {
        "what": name,
        "format": FORMAT,
        "run": {
            "name": diagnosis.run.folder.name,
            "task": info.task,
            "method": info.method,
            "recipe": info.recipe,
            "seed": info.config.train.seed,
            **input_hashes(diagnosis, name),
        },
        "settings": settings_of(diagnosis, name),
        "queries": diagnosis.queries.key if DIAGNOSTICS[name].settings == QUERY_SETTINGS else None,
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


def input_hashes(diagnosis: Diagnosis, name: DiagnosticName) -> dict[str, str | None]:
    """Hashes of the data, of the weights, and of the training data if the diagnostic uses the bank."""
    run = diagnosis.run
    bank = run.bank_hash if DIAGNOSTICS[name].uses_bank else None
    return {"data": run.data_hash, "weights": run.weights_hash, "bank": bank}


def settings_of(diagnosis: Diagnosis, name: DiagnosticName) -> dict[str, Any]:
    """What the result depends on, apart from the run itself."""
    settings = asdict(diagnosis.settings)
    names = DIAGNOSTICS[name].settings
    return {key: settings[key] if key in settings else getattr(diagnosis, key) for key in names}


def is_current(file: Path, diagnosis: Diagnosis, name: DiagnosticName) -> bool:
    """Whether the file was measured with this model, this data and these settings."""
    try:
        stored = read_json(file)
    except UserError:  # missing or damaged
        return False
    return (
        isinstance(stored, dict)
        and stored.get("format") == FORMAT
        and stored.get("settings") == settings_of(diagnosis, name)
        and input_hashes(diagnosis, name).items() <= stored.get("run", {}).items()
    )
