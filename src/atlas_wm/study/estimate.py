"""How long a unit takes and how much it writes: as the last of its kind, else by rates once measured."""

from collections.abc import Collection
from statistics import median
from typing import NamedTuple

from atlas_wm.recipes import recipe_config, untuned
from atlas_wm.study.schedule import Progress
from atlas_wm.study.study import Study
from atlas_wm.study.units import Unit

ROWS = {"tworoom": 62, "pusht": 190, "cube": 201}  # per episode
BYTES = {"tworoom": 40, "pusht": 3400, "cube": 21_600}  # per row; TwoRoom without frames
ROWS_PER_SECOND = {"tworoom": 4300, "pusht": 300, "cube": 80}  # of one process
STEPS_PER_SECOND = {"paper": 39.0, "small": 100.0, "tuned": 100.0}  # on an H200
DEMO_STEPS_PER_SECOND = 5.0  # on two cores
RUN_BYTES = {"paper": 150e6, "tuned": 130e6, "small": 85e6, "demo": 5e6}
EPISODES_PER_SECOND = {
    True: 15.0,
    False: 8.0,
}  # evaluated in TwoRoom: on an H200, on two cores with the demo's model


class Estimate(NamedTuple):
    seconds: float | None
    bytes: float


def estimate(unit: Unit, study: Study, known: Collection[Progress], cores: int, gpu: bool) -> Estimate:
    """None: nothing to go by."""
    measured = [p.seconds for p in known if p.state == "done" and p.seconds and _alike(p.unit, unit)]
    size = 0.0
    if unit.kind == "collect":
        task = unit.command[1]
        rows = int(_flag(unit, "--episodes")) * ROWS.get(task, 0)
        size = rows * BYTES.get(task, 0)
        guess = rows / (ROWS_PER_SECOND[task] * min(cores, 6 if task == "cube" else cores)) if rows else None
    elif unit.kind in ("try", "train") and unit.run is not None:
        recipe = untuned(unit.run.recipe)
        config = recipe_config(recipe, unit.run.method, unit.run.task).train
        settings = study.settings | (study.try_settings if unit.kind == "try" else {})
        steps = settings.get("train.steps", config.steps)
        if steps is None and unit.run.task in ROWS and study.dataset(unit.run.task).path is None:
            rows = study.dataset(unit.run.task).episodes * ROWS[unit.run.task]
            steps = int(settings.get("train.epochs", config.epochs)) * rows // config.batch
        rates = STEPS_PER_SECOND if gpu else {"demo": DEMO_STEPS_PER_SECOND}
        guess = None if steps is None or recipe not in rates else float(steps) / rates[recipe] + 30
        size = RUN_BYTES.get(recipe, 0)
    elif unit.kind == "eval" and unit.run is not None and (gpu or untuned(unit.run.recipe) == "demo"):
        episodes = int(_flag(unit, "--episodes")) * len(_flag(unit, "--seeds").split(","))
        guess = episodes / EPISODES_PER_SECOND[gpu] + 15
    else:
        runs = max(1, (len(unit.command) - 3) / 2)
        guess = {"report": 15.0, "head": 60.0, "diagnose": 100.0 * runs}.get(unit.kind)
    return Estimate(median(measured) if measured else guess, size)


def _alike(one: Unit, other: Unit) -> bool:
    def what(unit: Unit) -> tuple[str, ...]:
        return (unit.kind, unit.run.task, untuned(unit.run.recipe)) if unit.run else (unit.kind, *unit.command[1:2])

    return what(one) == what(other)


def _flag(unit: Unit, name: str) -> str:
    return unit.command[unit.command.index(name) + 1]
