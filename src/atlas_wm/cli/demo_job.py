"""The demo: the study of that name in this process, and figures of what came out."""

import contextlib
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from atlas_wm.report.films import film_gif, film_strips
from atlas_wm.report.table import markdown, print_results, success_rows, write_csv
from atlas_wm.report.training import training_curves
from atlas_wm.runs.files import locked
from atlas_wm.study.local import log_file
from atlas_wm.study.records import Records
from atlas_wm.study.results import evaluated
from atlas_wm.study.schedule import Job, progress_of, run_units
from atlas_wm.study.study import STUDIES, changed
from atlas_wm.study.units import Unit, run_folders, units_of

DOES = {
    "collect": "collecting demonstrations (states and actions; frames are drawn from states)",
    "try": "training {run} to choose a weight",
    "train": "training {run}",
    "head": "fitting the temporal head of {run}",
    "eval": "planning held-out episodes with {run}",
    "diagnose": "diagnosing: when can these models be trusted?",
    "report": "writing the report",
}


class Finished:
    """A job that is over when it is returned. What it raised was raised."""

    def finished(self) -> bool:
        return True

    def succeeded(self) -> bool:
        return True

    def stop(self) -> None: ...


class Inline:
    """Runs units in this process, one after the other: their progress is seen, and imports happen once."""

    def __init__(self, records: Records, say: Callable[[str], None]):
        self.records, self.say = records, say

    def room(self) -> int:
        return 1

    def start(self, units: Sequence[Unit]) -> list[Job]:
        from atlas_wm.cli.app import run_command

        for unit in units:
            self.say(DOES[unit.kind].format(run=unit.name.partition(" ")[2]))
            with log_file(self.records.log(unit)).open("a") as log, contextlib.redirect_stdout(log):
                run_command(list(unit.command))
        return [Finished() for _ in units]


def run_demo(out: Path, seeds: int, fresh: bool = False) -> None:
    """Collect, train, evaluate, diagnose, report. Continues an earlier call unless ``fresh``."""
    console, started = Console(), time.monotonic()
    if fresh:
        shutil.rmtree(out, ignore_errors=True)

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - started:5.0f} s[/dim]  {text}", highlight=False)

    study, records = changed(STUDIES["demo"], seeds=seeds), Records(out)
    progress = progress_of(units_of(study, out).values(), records)
    if done := sum(p.state == "done" for p in progress.values()):
        say(f"{done} of {len(progress)} steps are done from an earlier call (--fresh starts over)")
    with locked(records.folder, "used"):
        run_units(progress, records, Inline(records, say))

    runs = {(run.method, run.seed): out / folder for run, folder in run_folders(study).items()}
    found = evaluated(progress)
    reports = [one.result for one in found]
    pair = [runs[method, study.training_seeds[0]] for method in study.methods]
    far = max(e.offset for e in study.evaluations if e.offset <= 50)
    filmed = [one.file for one in found if one.result.protocol.offset == far and one.file.parent.parent in pair]
    training_curves(list(runs.values()), out / "curves.png")
    strips = film_strips(filmed, out / "films.png")
    animation = film_gif(filmed[-1], out / "episode.gif")
    write_csv(reports, out / "results.csv")
    note = (
        f"{study.evaluations[0].episodes} held-out episodes for each condition and run, evaluation seed 42; "
        f"training seeds {', '.join(map(str, study.training_seeds))}; demo recipe: CEM with "
        f"{reports[0].plan.iterations} iterations instead of the paper's 30."
    )
    (out / "results.md").write_text(markdown(success_rows(reports)) + "\n" + note + "\n")
    for far in (False, True):
        if shown := [r for r in reports if (r.protocol.offset > 50) == far]:
            print_results(shown)
    say(note)
    say(f"table {out}/results.md and .csv, curves {out}/curves.png")
    say(strips)
    say(animation)
    say(f"next: [bold]atlas eval {pair[-1]} --part heldout[/bold], [bold]tensorboard --logdir {out}[/bold]")
    say(f"the report: open [bold]{progress['report'].unit.makes}[/bold] in a browser")
