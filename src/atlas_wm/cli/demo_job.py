"""The demo: from nothing to two trained world models that plan, side by side, on any machine."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from atlas_wm.cli.collect import collect_with_progress
from atlas_wm.cli.diagnose import diagnose_with_progress
from atlas_wm.cli.evaluate import evaluate_with_progress
from atlas_wm.cli.train import train_with_progress
from atlas_wm.recipes import demo
from atlas_wm.report.films import film_gif, film_strips
from atlas_wm.report.page import write_report
from atlas_wm.report.table import markdown, print_results, success_rows, write_csv
from atlas_wm.report.training import training_curves
from atlas_wm.runs.folder import read_run
from atlas_wm.runs.results import FOLDER, USUAL_POLICIES, EvaluationResult, Protocol, read_results
from atlas_wm.tasks import get_task

METHODS = ("lewm", "atlas")
EPISODES = 5000
PROTOCOLS = [
    Protocol(offset=25, budget=50, episodes=100, seeds=(42,), part="heldout"),
    Protocol(offset=50, budget=75, episodes=100, seeds=(42,), part="heldout"),
]


def demo_results(run: Path) -> list[Path] | None:
    """The files of the demo's own evaluations; None unless all are there. Others may stand beside them."""
    info, _ = read_run(run)
    found = []
    for protocol in PROTOCOLS:
        filled = replace(protocol, budget=protocol.steps)
        wanted = filled, info.config.plan, info.data.hash, info.task, USUAL_POLICIES
        same = [
            name
            for name, r in read_results(run).items()
            if (r.protocol, r.plan, r.data.hash, r.task, tuple(r.policies)) == wanted and not r.variation
        ]
        if not same:
            return None
        found.append(run / FOLDER / f"{same[-1]}.json")
    return found


def run_demo(out: Path, seeds: Sequence[int], fresh: bool = False) -> None:
    """Collect, train, evaluate, report. Reuses the finished parts of an earlier run unless ``fresh``."""
    console, started = Console(), time.monotonic()
    if fresh:
        shutil.rmtree(out, ignore_errors=True)
    task = get_task("tworoom")
    data = out / "tworoom.lance"

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - started:5.0f} s[/dim]  {text}", highlight=False)

    if data.exists():
        say(f"{data} exists from an earlier run and is reused (--fresh starts over)")
    else:
        say(f"collecting {EPISODES} TwoRoom demonstrations (states and actions; frames are drawn from states)")
        collect_with_progress(task, data, EPISODES, pixels=False)

    runs = {(m, s): out / (m if len(seeds) == 1 else f"{m}-{s}") for s in seeds for m in METHODS}
    for (method, seed), run in runs.items():
        if run.exists():
            say(f"{run} exists from an earlier run and is reused (--fresh starts over)")
            continue
        config = demo(method)
        config = replace(config, train=replace(config.train, seed=seed))
        say(f"training {method}, seed {seed}")
        train_with_progress(config, task, data, run, method, recipe="demo")

    files: dict[Path, list[Path]] = {}
    for run in runs.values():
        known = demo_results(run)
        if known is None:
            say(f"planning {sum(p.episodes for p in PROTOCOLS)} held-out episodes with {run.name}")
            known = [run / FOLDER / f"{r.name}.json" for r in evaluate_with_progress(run, PROTOCOLS)]
        files[run] = known
    reports = [EvaluationResult.read(file) for mine in files.values() for file in mine]

    pair = [runs[m, seeds[0]] for m in METHODS]
    training_curves(list(runs.values()), out / "curves.png")
    strips = film_strips([files[run][-1] for run in pair], out / "films.png")
    animation = film_gif(files[pair[-1]][-1], out / "episode.gif")
    write_csv(reports, out / "results.csv")
    note = (
        f"{PROTOCOLS[0].episodes} held-out episodes for each condition and run, evaluation seed 42; "
        f"training seeds {', '.join(map(str, seeds))}; demo recipe: CEM with {demo('atlas').plan.iterations} "
        f"iterations instead of the paper's 30."
    )
    (out / "results.md").write_text(markdown(success_rows(reports)) + "\n" + note + "\n")
    print_results(reports)
    say(note)
    say(f"table {out}/results.md and .csv, curves {out}/curves.png")
    say(strips)
    say(animation)
    say("diagnosing: when can these models be trusted?")
    diagnose_with_progress(list(runs.values()), ("all",))
    page = write_report(list(runs.values()), out / "report")
    say(f"next: [bold]atlas eval {pair[-1]} --part heldout[/bold], [bold]tensorboard --logdir {out}[/bold]")
    say(f"the report: open [bold]{page}[/bold] in a browser")
