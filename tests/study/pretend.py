"""Units that take no time, and a study of them."""

import math
from itertools import pairwise
from pathlib import Path

from atlas_wm.study.records import Records
from atlas_wm.study.schedule import run_units
from atlas_wm.study.study import Study
from atlas_wm.study.tries import after_tries, start
from atlas_wm.study.units import Unit


class Job:
    def __init__(self, works: bool):
        self.works, self.stopped = works, False

    def finished(self):
        return True

    def succeeded(self):
        return self.works

    def stop(self):
        self.stopped = True


class Pretend:
    """Writes what units make, at once; units whose name contains ``fails`` fail as often as it says. The planning
    score of a run is best where the weight of its regulariser is ``best``."""

    best = 0.25

    def __init__(self, **fails: int):
        self.fails, self.commands, self.most = {k.replace("_", " "): n for k, n in fails.items()}, [], 2

    def room(self):
        return self.most

    def start(self, units):
        jobs = []
        for unit in units:
            self.commands.append((unit.name, unit.command))
            failing = next((name for name, n in self.fails.items() if name in unit.name and n > 0), None)
            if failing:
                self.fails[failing] -= 1
            else:
                unit.makes.parent.mkdir(parents=True, exist_ok=True)
                unit.makes.touch()
                if unit.kind in ("try", "train"):
                    (unit.makes.parent / "metrics.csv").write_text(
                        f"step,val_score\n1,0.1\n2,{self.score(unit)}\n3,\n"
                    )
            jobs.append(Job(failing is None))
        return jobs

    def score(self, unit: Unit) -> float | str:
        flags = dict(pairwise(unit.command))
        weight = flags.get("--objective.wemreg") or flags.get("--objective.sigreg")
        return 1 - abs(math.log(float(weight) / self.best)) / 10 if weight else 0.5

    @property
    def names(self):
        return [name for name, _ in self.commands]


def run(
    study: Study, out: Path, launcher: Pretend | None = None, only: list[str] | None = None, **fails: int
) -> tuple[Pretend, dict[str, str]]:
    """As ``atlas study`` does it."""
    records, pretend = Records(out), launcher or Pretend(**fails)
    progress = start(study, out, records)
    run_units(progress, records, pretend, on_tries=lambda: after_tries(study, out, progress), only=only)
    return pretend, {name: p.state for name, p in progress.items()}
