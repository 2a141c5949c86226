"""Runs the units that are not done: each after what it needs, a failed one once more, the others regardless."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from atlas_wm.study.records import Records, State
from atlas_wm.study.tuning import UNKNOWN
from atlas_wm.study.units import Unit

ATTEMPTS = 2
GATHER = ("diagnose", "report")  # kinds that do without runs that failed
OVER = ("done", "failed", "blocked")
POLL_SECONDS = 0.3


class Job(Protocol):
    def finished(self) -> bool: ...
    def succeeded(self) -> bool: ...
    def stop(self) -> None: ...


class Launcher(Protocol):
    """Where units run."""

    def room(self) -> int:
        """How many more it takes now."""
        ...

    def start(self, units: Sequence[Unit]) -> list[Job]: ...


@dataclass
class Progress:
    """What the live table shows of a unit."""

    unit: Unit
    state: State = "waiting"
    attempts: int = 0
    started: float = 0.0
    seconds: float = 0.0
    why: str = ""
    job: Job | None = field(default=None, repr=False)


def progress_of(units: Collection[Unit], records: Records) -> dict[str, Progress]:
    """Which units are done. One whose needs are not done has to run again."""
    found: dict[str, Progress] = {}
    for unit in units:
        progress = found[unit.name] = Progress(unit)
        if records.is_done(unit) and all(found[need].state == "done" for need in unit.needs):
            record = records.read(unit)
            progress.state, progress.seconds = "done", record.seconds if record else 0.0
        else:
            progress.why = records.why(unit) if not records.is_done(unit) else "what it needs has to run again"
            progress.why = "its tries choose the weight" if UNKNOWN in unit.command else progress.why
    return found


def run_units(
    all_progress: dict[str, Progress],
    records: Records,
    launcher: Launcher,
    on_change: Callable[[], None] = lambda: None,
    on_tries: Callable[[], Mapping[str, Unit]] | None = None,
) -> None:
    """Until every unit is done, failed, or blocked by one that failed.

    ``on_tries``: called when tries are over → the units with the weights that are known now.
    """
    try:
        tries_over = _tries_over(all_progress)
        while any(p.state in ("waiting", "running") for p in all_progress.values()):
            changed = _collect_finished(all_progress, records)
            changed |= _block(all_progress)
            if on_tries is not None and _tries_over(all_progress) > tries_over:
                tries_over = _tries_over(all_progress)
                _renew(all_progress, on_tries(), records)
            ready = [p for p in all_progress.values() if p.state == "waiting" and _is_ready(p, all_progress)]
            ready = ready[: launcher.room()]
            if ready:
                _start(ready, records, launcher, all_progress)
            on_change()
            if not changed and not ready:
                time.sleep(POLL_SECONDS)
    except BaseException:  # Ctrl-C too: what is interrupted resumes at the next call
        for progress in all_progress.values():
            if progress.job is not None and progress.state == "running":
                progress.job.stop()
        raise


def _tries_over(all_progress: Mapping[str, Progress]) -> int:
    return sum(p.unit.kind == "try" and p.state in OVER for p in all_progress.values())


def _renew(all_progress: Mapping[str, Progress], units: Mapping[str, Unit], records: Records) -> None:
    """Give waiting units their new commands. One that was run with the same before is done; the report, which shows
    the tries, is not."""
    for progress in all_progress.values():
        unit = units[progress.unit.name]
        if progress.state != "waiting" or unit == progress.unit:
            continue
        progress.unit, progress.why, record = unit, records.why(unit), records.read(unit)
        same = records.is_done(unit) and unit.kind != "report"
        if record is not None and same and _is_ready(progress, all_progress):
            progress.state, progress.seconds = "done", record.seconds


def _needed(progress: Progress, all_progress: Mapping[str, Progress]) -> tuple[list[State], list[State]]:
    """The states of what has to be done, and of what has to be over with at least one done."""
    needs = [all_progress[need] for need in progress.unit.needs]
    gathered = [progress.unit.kind in GATHER or need.unit.kind == "try" for need in needs]
    each = [need.state for need, any_of in zip(needs, gathered, strict=True) if not any_of]
    return each, [need.state for need, any_of in zip(needs, gathered, strict=True) if any_of]


def _is_ready(progress: Progress, all_progress: Mapping[str, Progress]) -> bool:
    each, gathered = _needed(progress, all_progress)
    enough = not gathered or ("done" in gathered and all(state in OVER for state in gathered))
    return enough and all(state == "done" for state in each)


def _start(
    ready: Sequence[Progress], records: Records, launcher: Launcher, all_progress: Mapping[str, Progress]
) -> None:
    for progress in ready:
        if progress.attempts == 0:
            records.clear(progress.unit)
        progress.attempts += 1
        records.write(progress.unit, "running", attempts=progress.attempts)
    units = [_without_failed_runs(p.unit, all_progress) for p in ready]
    for progress, job in zip(ready, launcher.start(units), strict=True):
        progress.job, progress.state, progress.started = job, "running", time.monotonic()


def _without_failed_runs(unit: Unit, all_progress: Mapping[str, Progress]) -> Unit:
    if unit.kind not in GATHER:
        return unit
    failed = {
        str(p.unit.makes.parent) for p in all_progress.values() if p.unit.kind == "train" and p.state != "done"
    }
    return replace(unit, command=tuple(part for part in unit.command if part not in failed))


def _collect_finished(all_progress: dict[str, Progress], records: Records) -> bool:
    changed = False
    for progress in all_progress.values():
        if progress.state != "running" or progress.job is None or not progress.job.finished():
            continue
        changed = True
        progress.seconds = time.monotonic() - progress.started
        done = progress.job.succeeded() and progress.unit.makes.exists()
        again = not done and progress.attempts < ATTEMPTS
        progress.state = "done" if done else "waiting" if again else "failed"
        records.write(progress.unit, "failed" if again else progress.state, progress.seconds, progress.attempts)
    return changed


def _block(all_progress: dict[str, Progress]) -> bool:
    """A unit whose need failed cannot run. Tries that failed only are not chosen."""
    changed = False
    for progress in all_progress.values():
        each, gathered = _needed(progress, all_progress)
        none = bool(gathered) and "done" not in gathered and all(state in OVER for state in gathered)
        if progress.state == "waiting" and (none or {"failed", "blocked"} & set(each)):
            progress.state, changed = "blocked", True
    return changed
