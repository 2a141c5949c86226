"""How long a unit takes and how much it writes: as those of its kind that are done, of the same method if there are
any, else by rates once measured."""

import os
from collections import defaultdict
from collections.abc import Collection, Mapping
from heapq import heappop, heappush
from pathlib import Path
from statistics import median
from typing import NamedTuple

from atlas_wm.recipes import recipe_config, untuned
from atlas_wm.study.local import visible_gpus
from atlas_wm.study.schedule import Progress
from atlas_wm.study.slurm import MOST_AT_ONCE, read_options
from atlas_wm.study.study import Study
from atlas_wm.study.units import Unit

ROWS = {"tworoom": 62, "pusht": 190, "cube": 201}  # per episode
ROW_BYTES = {"tworoom": 40, "pusht": 200, "cube": 2600}  # without its frame
FRAME_BYTES = {  # docs/notes/data-loading.md: gzip, or JPEG
    "h5": {"tworoom": 6200, "pusht": 3200, "cube": 19_000},
    "lance": {"tworoom": 4400, "pusht": 6000, "cube": 8500},
}
ROWS_PER_SECOND = {"tworoom": 4300, "pusht": 300, "cube": 80}  # of one process; TwoRoom without frames
STEPS_PER_SECOND = {"paper": 39.0, "small": 100.0, "tuned": 100.0}  # on an H200
CPU_STEPS_PER_SECOND = {  # on two cores
    "demo": 5.0,
    "paper": 4 / 1.31 / 128,  # docs/performance.md: a step of 4 clips takes 1.31 s; one of 128 was not measured
}
RUN_BYTES = {"paper": 150e6, "tuned": 130e6, "small": 85e6, "demo": 5e6}
EPISODES_PER_SECOND = {
    True: 15.0,
    False: 8.0,
}  # evaluated in TwoRoom: on an H200, on two cores with the demo's model


class Estimate(NamedTuple):
    seconds: float | None
    bytes: float


class Place(NamedTuple):
    """Where units run."""

    name: str
    cores: int
    gpu: bool
    at_once: int  # units; more than one on a GPU or on the same cores slow each other
    how: str  # they run


def place(slurm: str | None) -> Place:
    """This machine, or SLURM with the options of ``--slurm``."""
    if slurm is not None:
        given, how = read_options(slurm), "if SLURM starts every job at once"
        return Place("SLURM", given.get("cpus_per_task", 1), given.get("gpus_per_node", 0) > 0, MOST_AT_ONCE, how)
    gpus, cores = len(visible_gpus()), os.cpu_count() or 1
    if gpus > 1:
        return Place(f"{gpus} GPUs", cores, True, gpus, f"with {gpus} at a time")
    if gpus:
        return Place("1 GPU", cores, True, 1, "one after the other")
    return Place(f"{cores} CPU cores", cores, False, 1, "one after the other at the speed of two cores")


def estimate(unit: Unit, study: Study, known: Collection[Progress], cores: int, gpu: bool) -> Estimate:
    """None: nothing to go by."""
    done = [p for p in known if p.state == "done" and p.seconds and _alike(p.unit, unit)]
    same = [p for p in done if p.unit.run and unit.run and p.unit.run.method == unit.run.method]
    measured = [p.seconds for p in same or done]
    size = 0.0
    if unit.kind == "collect":
        task = unit.command[1]
        rows = int(_flag(unit, "--episodes")) * ROWS.get(task, 0)
        frames = "--no-pixels" not in unit.command
        kind = Path(_flag(unit, "--out")).suffix.removeprefix(".")
        size = rows * (ROW_BYTES.get(task, 0) + frames * FRAME_BYTES[kind].get(task, 0))
        measured_so = rows and frames == (task != "tworoom")
        guess = rows / (ROWS_PER_SECOND[task] * min(cores, 6 if task == "cube" else cores)) if measured_so else None
    elif unit.kind in ("try", "train") and unit.run is not None:
        recipe = untuned(unit.run.recipe)
        config = recipe_config(recipe, unit.run.method, unit.run.task).train
        settings = study.settings_of(unit.run.method) | (study.try_settings if unit.kind == "try" else {})
        steps = settings.get("train.steps", config.steps)
        if steps is None and unit.run.task in ROWS and study.dataset(unit.run.task).path is None:
            rows = study.dataset(unit.run.task).episodes * ROWS[unit.run.task]
            steps = int(settings.get("train.epochs", config.epochs)) * rows // config.batch
        rates = STEPS_PER_SECOND if gpu else CPU_STEPS_PER_SECOND
        guess = None if steps is None or recipe not in rates else float(steps) / rates[recipe] + 30
        size = RUN_BYTES.get(recipe, 0)
    elif unit.kind == "eval" and unit.run is not None and (gpu or untuned(unit.run.recipe) == "demo"):
        episodes = int(_flag(unit, "--episodes")) * len(_flag(unit, "--seeds").split(","))
        guess = episodes / EPISODES_PER_SECOND[gpu] + 15
    else:
        runs = max(1, (len(unit.command) - 3) / 2)
        guess = {"report": 15.0, "head": 60.0, "diagnose": 100.0 * runs}.get(unit.kind)
    return Estimate(median(measured) if measured else guess, size)


def together(seconds: Mapping[Unit, float], at_once: int) -> float:
    """Seconds until the last of the units ends: each starts after what it needs of them, ``at_once`` at a time."""
    number = {unit.name: i for i, unit in enumerate(seconds)}
    units, missing, waiting_for = list(seconds), list[int](), defaultdict[int, list[int]](list)
    for i, unit in enumerate(units):
        needs = [number[need] for need in unit.needs if need in number]
        missing.append(len(needs))
        for need in needs:
            waiting_for[need].append(i)
    ready, running, now = [i for i, count in enumerate(missing) if not count], list[tuple[float, int]](), 0.0
    while ready or running:
        while ready and len(running) < at_once:
            first = heappop(ready)
            heappush(running, (now + seconds[units[first]], first))
        now, ended = heappop(running)
        for i in waiting_for[ended]:
            missing[i] -= 1
            if not missing[i]:
                heappush(ready, i)
    return now


def _alike(one: Unit, other: Unit) -> bool:
    def what(unit: Unit) -> tuple[str, ...]:
        return (unit.kind, unit.run.task, untuned(unit.run.recipe)) if unit.run else (unit.kind, *unit.command[1:2])

    return what(one) == what(other)


def _flag(unit: Unit, name: str) -> str:
    return unit.command[unit.command.index(name) + 1]
