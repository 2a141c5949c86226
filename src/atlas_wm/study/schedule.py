"""Runs the units that are not done: each after what it needs, a failed one once more, the others regardless."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

from atlas_wm.errors import UserError
from atlas_wm.study.records import Records, State
from atlas_wm.study.tuning import UNKNOWN
from atlas_wm.study.units import Unit

ATTEMPTS = 2
GATHER = ("diagnose", "report")  # kinds that do without runs that failed
OVER = ("done", "failed", "blocked")
REMOVABLE = ("collect", "train", "head")  # kinds with large results: who has evaluated may delete them
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
    """Which units are done, and why the others have to run."""
    todo = _to_run(units, records)
    found: dict[str, Progress] = {}
    for unit in units:
        progress = found[unit.name] = Progress(unit)
        if unit.name not in todo:
            record = records.read(unit) if unit.command else None
            progress.state, progress.seconds = "done", record.seconds if record else 0.0
        elif not unit.command:
            progress.why = f"the same as {unit.needs[0]}"
        elif UNKNOWN in unit.command:
            progress.why = "its tries choose the weight"
        elif records.was_done(unit) and unit.makes.exists():
            progress.why = "what it needs has to run again"
        else:
            progress.why = records.why(unit)
    return found


def _to_run(units: Collection[Unit], records: Records) -> set[str]:
    """Names of the units that were not done with their settings, that need one that has to run, or whose result is
    gone. A dataset or weights that are gone are made again only if a unit that has to run reads them; a dataset is
    the same then, so nothing else runs again for it."""
    todo = {unit.name for unit in units if unit.command and not records.was_done(unit)}
    gone = _gone(units)
    same = {unit.name for unit in units if unit.kind == "collect" and unit.name in gone} - todo
    while True:
        again = {unit.name for unit in units if not (todo - same).isdisjoint(unit.needs)}
        again |= {name for name, readers in gone.items() if readers is None or not todo.isdisjoint(readers)}
        if again <= todo:
            return todo
        todo |= again


def _gone(units: Collection[Unit]) -> dict[str, list[str] | None]:
    """Units without their result, and those that read it; None: it must be there."""
    readers: dict[str, list[str]] = {unit.name: [] for unit in units}
    for unit in units:
        for need in unit.needs if unit.kind != "report" else ():
            readers[need].append(unit.name)
    gone = [unit for unit in units if unit.command and not unit.makes.exists()]
    return {unit.name: readers[unit.name] if unit.kind in REMOVABLE else None for unit in gone}


def part_of(all_progress: dict[str, Progress], texts: Sequence[str] | None) -> dict[str, Progress]:
    """Units with one of the texts in their name, and what they need; None: all."""
    if texts is None:
        return all_progress
    found: list[str] = []
    for text in texts:
        named = [name for name in all_progress if text in name]
        if not named:
            raise UserError(f"--only {text}: no unit has this in its name; --dry-run lists all units")
        found += named
    wanted: set[str] = set()
    while found:
        name = found.pop()
        if name not in wanted:
            wanted.add(name)
            found += all_progress[name].unit.needs
    return {name: progress for name, progress in all_progress.items() if name in wanted}


def run_units(
    all_progress: dict[str, Progress],
    records: Records,
    launcher: Launcher,
    on_change: Callable[[], None] = lambda: None,
    on_tries: Callable[[], Mapping[str, Unit]] | None = None,
    on_collected: Callable[[], None] | None = None,
    only: Sequence[str] | None = None,
) -> None:
    """Until every unit is done, failed, or blocked by one that failed.

    ``on_tries``: called when tries are over → the units with the weights that are known now. ``on_collected``:
    called once, when all datasets exist and the first units that read them have started. ``only``: texts of
    :func:`part_of`.
    """
    part = part_of(all_progress, only)
    try:
        tries_over = _tries_over(all_progress)
        while any(p.state in ("waiting", "running") for p in part.values()):
            changed = _collect_finished(all_progress, records)
            changed |= _take_over(all_progress)
            changed |= _block(all_progress)
            if on_tries is not None and _tries_over(all_progress) > tries_over:
                tries_over = _tries_over(all_progress)
                _renew(all_progress, on_tries(), records)
                part = part_of(all_progress, only)  # it may need others now
            waiting = [p for p in part.values() if p.state == "waiting" and p.unit.command]
            ready = [p for p in waiting if _is_ready(p, all_progress)]
            ready = ready[: launcher.room()]
            if ready:
                _start(ready, records, launcher, all_progress)
            on_change()
            if on_collected is not None and all(
                p.state == "done" for p in part.values() if p.unit.kind == "collect"
            ):
                on_collected()
                on_collected = None
            if not changed and not ready:
                time.sleep(POLL_SECONDS)
    except BaseException:  # Ctrl-C too: what is interrupted resumes at the next call
        running = [p for p in all_progress.values() if p.job is not None and p.state == "running"]
        # All at once: a second Ctrl-C must leave none behind.
        with ThreadPoolExecutor(max(1, len(running))) as pool:
            list(pool.map(lambda p: p.job.stop(), running))
        for p in running:
            records.write(p.unit, "running", p.seconds + time.monotonic() - p.started, p.attempts)
        raise


def _tries_over(all_progress: Mapping[str, Progress]) -> int:
    return sum(p.unit.kind == "try" and p.state in OVER for p in all_progress.values())


def _renew(all_progress: Mapping[str, Progress], units: Mapping[str, Unit], records: Records) -> None:
    """Give waiting units their new commands. One that was run with the same before is done; the report, which shows
    the tries, is not."""
    waiting = [name for name, p in all_progress.items() if p.state == "waiting"]
    wanted = {name for name in waiting if units[name].command and not records.was_done(units[name])}
    gone = _gone(units.values())
    missing = {name for name, readers in gone.items() if readers is None or not wanted.isdisjoint(readers)}
    for name in waiting:
        progress, unit = all_progress[name], units[name]
        if unit == progress.unit:
            continue
        progress.unit, progress.why = unit, records.why(unit)
        record = records.read(unit) if unit.command else None
        same = not unit.command or (name not in wanted | missing and unit.kind != "report")
        if same and _is_ready(progress, all_progress):
            progress.state, progress.seconds = "done", record.seconds if record else 0.0


def _take_over(all_progress: Mapping[str, Progress]) -> bool:
    """Units without a command are done when the one is that they are."""
    found = [p for p in all_progress.values() if not p.unit.command and p.state == "waiting"]
    found = [p for p in found if _is_ready(p, all_progress)]
    for progress in found:
        progress.state = "done"
    return bool(found)


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
            progress.seconds = records.seconds_so_far(progress.unit)
            records.clear(progress.unit)
        progress.attempts += 1
        records.write(progress.unit, "running", progress.seconds, progress.attempts)
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
        progress.seconds += time.monotonic() - progress.started
        made = progress.unit.kind in GATHER or progress.unit.makes.exists()  # without a run that failed: elsewhere
        done = progress.job.succeeded() and made
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
