"""``atlas study``"""

import csv
import shlex
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Column, Table
from tyro.conf import arg

from atlas_wm.cli.arguments import by_default
from atlas_wm.errors import Interrupted, UserError

if TYPE_CHECKING:
    from atlas_wm.config import EncoderConfig
    from atlas_wm.study.records import Records
    from atlas_wm.study.schedule import Launcher, Progress
    from atlas_wm.study.study import Study

STYLES = {"done": "green", "running": "bold cyan", "failed": "bold red", "blocked": "red", "waiting": "dim"}
MOST_ROWS = 40
Names = tuple[str, ...]


def study(
    study: Annotated[str, arg(metavar="STUDY")],
    /,
    out: Annotated[Path | None, by_default("runs/STUDY")] = None,
    tasks: Annotated[Names | None, by_default("the study's", "TASK [TASK ...]")] = None,
    methods: Annotated[Names | None, by_default("the study's", "METHOD [METHOD ...]")] = None,
    recipes: Annotated[Names | None, by_default("the study's", "RECIPE [RECIPE ...]")] = None,
    seeds: Annotated[int | None, by_default("the study's", "INT")] = None,
    encoder_weights: Annotated[
        Names | None, by_default("the study's, or from the hub", "METHOD=FILE [METHOD=FILE ...]")
    ] = None,
    only: Annotated[Names | None, by_default("all units", "TEXT [TEXT ...]")] = None,
    dry_run: bool = False,
    per_gpu: int = 1,
    slurm: Annotated[str | None, by_default("run on this machine", "NAME=VALUE,...")] = None,
) -> None:
    """Collect, train, evaluate, diagnose and report every task × method × recipe × training seed of a study.

    A study is demo, ablation, paper, fair, planning, speedrun, or a TOML file (docs/guides/study.md). Each unit of
    it is a command that you could type. Finished units are not run again: call it again after an interruption or a
    change, and only what is missing or depends on the change runs. A failed unit is tried once more, from its
    checkpoint; the others continue.

        atlas study ablation --tasks tworoom --seeds 3 --dry-run
        atlas study ablation --tasks tworoom --seeds 3
        atlas study my-study.toml --slurm partition=gpu,gpus_per_node=1,cpus_per_task=16

    Args:
        study: Name of a study, or a TOML file.
        out: Folder for datasets, runs, logs (OUT/units) and the report (OUT/report).
        tasks: Only these tasks.
        methods: Only these methods.
        recipes: Only these recipes. RECIPE+tuned: with the weight of each method's regulariser that has the best
            planning score among the study's tries, on episodes that are never evaluated.
        seeds: Number of training seeds.
        encoder_weights: Pretrained weights of a method's encoder, such as dino-wm=dinov2.safetensors. A method
            whose weights are missing is left out, and a row of the report says so.
        only: Run only units whose name contains one of these texts, such as pusht or atlas-paper-3072, and what
            they need. Folders keep the names of the whole study, so several machines can share one.
        dry_run: Print the commands, why they run, and estimates of time and disk; run nothing.
        per_gpu: Concurrent runs on each GPU; small models do not fill one. Without a GPU: on this machine.
        slurm: Run each unit as a SLURM job (needs `pip install ".[slurm]"` in a clone). Options: partition,
            account, qos, time (minutes), gpus_per_node (one process each, for units that share their work),
            ntasks_per_node (another number of processes), cpus_per_task (of each process), mem, constraint.
    """
    from atlas_wm.runs.files import locked
    from atlas_wm.study.records import Records
    from atlas_wm.study.rows import check_rows
    from atlas_wm.study.schedule import part_of, run_units
    from atlas_wm.study.study import changed, leave_out, read_study, with_weights
    from atlas_wm.study.tries import after_tries, start

    if per_gpu < 1:
        raise UserError("--per-gpu must be at least 1")
    described = changed(read_study(study), tasks=tasks, methods=methods, recipes=recipes, seeds=seeds)
    described = with_weights(described, encoder_weights)
    out = out or Path("runs") / Path(study).stem
    records = Records(out)
    progress = start(described, out, records)
    part = part_of(progress, only)
    encoders, console = check_study(described, part), Console()
    if missing := missing_weights(console, encoders, progress, records, dry_run):
        described = leave_out(described, missing)
        progress = start(described, out, records)
        part = part_of(progress, only)
    if dry_run:
        print_plan(console, described, part, records, slurm)
        return
    todo = [p for p in part.values() if p.state != "done"]
    console.print(f"{len(part) - len(todo)} of {len(part)} units are done; logs in {records.folder}")
    renewed = partial(after_tries, described, out, progress)
    if todo:
        renewed()
        with (
            locked(records.folder, "used"),
            ended_by_sigterm(),
            Shown(console, lambda: part_of(progress, only), records) as shown,
        ):
            records.remove_dropped([p.unit for p in part.values()])
            launcher = make_launcher(records, slurm, per_gpu)
            run_units(progress, records, launcher, shown.update, renewed, partial(check_rows, part), only)
    summarise(console, described, out, progress, records)


def check_study(study: "Study", progress: "Mapping[str, Progress]") -> "dict[str, EncoderConfig]":
    """Fail now where a command would fail after hours: its flags are parsed, one of each sort, and not more.
    Returns the pretrained encoders that will be needed, by method."""
    from atlas_wm.cli.app import parse
    from atlas_wm.recipes import recipe_config
    from atlas_wm.study.tuning import UNKNOWN

    read = {part for p in progress.values() if p.state != "done" for part in p.unit.command}
    if paths := [path for task in study.tasks for path in study.dataset(task).paths if path in read]:
        from atlas_wm.data.dataset import find_dataset

        for path in paths:
            find_dataset(path)
    seen = set[Any]()
    encoders: dict[str, EncoderConfig] = {}
    for p in progress.values():
        unit, run = p.unit, p.unit.run
        flags = unit.command[2:] if unit.kind == "eval" else ()
        sorts: set[Any] = {(unit.kind, run and (run.task, run.recipe), flags) if run else unit.name}
        sorts |= {(unit.kind, run.method)} if run and unit.kind in ("try", "train") else set()
        if p.state == "done" or not unit.command or sorts <= seen:
            continue
        seen |= sorts
        try:
            given = parse([part.replace(UNKNOWN, "1") for part in unit.command])
            if unit.kind == "eval" and run is not None:
                given["search"].applied_to(recipe_config(run.recipe, run.method, run.task).plan)
            if unit.kind in ("try", "train") and run is not None and given["config"].model.encoder.frozen:
                encoders[run.method] = given["config"].model.encoder
        except (SystemExit, UserError) as error:  # the parser has said why
            why = f" ({error})" if isinstance(error, UserError) else ""
            raise UserError(f"`atlas {' '.join(unit.command)}`, which the study would run, fails{why}") from error
    return encoders


def missing_weights(
    console: Console,
    encoders: "Mapping[str, EncoderConfig]",
    progress: "Mapping[str, Progress]",
    records: "Records",
    dry_run: bool,
) -> dict[str, str]:
    """Methods whose pretrained weights cannot be loaded, and the file that they need. A dry run downloads none.

    A method of which something was trained before, maybe with other weights, is not left out: its results would be
    dropped.
    """
    from atlas_wm.convert.dinov2 import weights_name, weights_obstacle

    found, done = {}, set[str]()
    for p in progress.values():
        if p.unit.run and (p.state == "done" or ((known := records.read(p.unit)) and known.state == "done")):
            done.add(p.unit.run.method)
    for method, encoder in encoders.items():
        name = weights_name(encoder.weights)
        if dry_run and encoder.weights is None:
            text = "comes from the hub, or --encoder-weights names it; without it the other methods run"
            console.print(f"{method} needs {name}: it {text}", highlight=False, soft_wrap=True)
        elif (why := weights_obstacle(encoder)) and method in done:
            raise UserError(f"some runs of {method} are done, and what is to run needs its weights: {why}")
        elif why:
            console.print(f"[yellow]{method} is left out[/]: {escape(why)}", highlight=False, soft_wrap=True)
            found[method] = f"needs {name}"
    return found


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Within, SIGTERM does what Ctrl-C does: units that run are stopped too, and the next call resumes them."""

    def interrupt(*_: object) -> None:
        raise Interrupted("SIGTERM: what ran is stopped; run the same command again to resume", signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def make_launcher(records: "Records", slurm: str | None, per_gpu: int) -> "Launcher":
    if slurm is not None:
        from atlas_wm.study.slurm import SlurmLauncher

        return SlurmLauncher(records, slurm)
    from atlas_wm.study.local import LocalLauncher, visible_gpus

    return LocalLauncher(records, len(visible_gpus()), per_gpu)


class Shown:
    """A live table in a terminal; elsewhere a line for every change."""

    def __init__(self, console: Console, shown: "Callable[[], Mapping[str, Progress]]", records: "Records"):
        self.console, self.shown, self.records = console, shown, records
        self.states = {name: p.state for name, p in shown().items()}
        self.live = Live(console=console, refresh_per_second=2) if console.is_terminal else None

    def __enter__(self) -> "Shown":
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.update(self.table())
            self.live.stop()

    def update(self) -> None:
        for name, p in self.shown().items():
            if p.state != self.states.get(name):
                self.states[name] = p.state
                if self.live is None:
                    log = f"; log {self.records.log(p.unit)}" if p.state in ("running", "failed") else ""
                    line = escape(f"{p.state:8} {name}{_after(p)}{log}")
                    self.console.print(line, highlight=False, soft_wrap=True)
        if self.live is not None:
            self.live.update(self.table())

    def table(self) -> Table:
        """What runs or failed first; the rest as far as there is room."""
        progress = self.shown()
        columns = Column("unit", overflow="fold"), "state", "time", "now"
        title = escape(f"{_counts(progress)}; logs in {self.records.folder}")
        table = Table(*columns, title=title, expand=True)
        order = {"running": 0, "failed": 1, "blocked": 2, "waiting": 3, "done": 4}
        rows = sorted(progress.values(), key=lambda p: order[p.state])
        for p in rows[:MOST_ROWS]:
            seconds = p.seconds + (time.monotonic() - p.started if p.state == "running" else 0)
            name, now = escape(p.unit.name), p.why if p.state == "waiting" else ""
            if p.state in ("running", "failed"):
                log = self.records.log(p.unit)
                name, now = f"{name}\n[dim]{escape(log.name)}[/]", last_line(log)
            style = STYLES[p.state]
            since = duration(seconds) if seconds else ""
            table.add_row(name, f"[{style}]{p.state}[/]", since, escape(now[:160]))
        if len(rows) > MOST_ROWS:
            table.add_row(f"and {len(rows) - MOST_ROWS} more", "", "", "")
        return table


def _after(p: "Progress") -> str:
    if p.state == "running":
        return f" (attempt {p.attempts})" if p.attempts > 1 else f" ({p.why})" if p.why else ""
    return f" after {duration(p.seconds)}" if p.state in ("done", "failed") else ""


def _counts(progress: "Mapping[str, Progress]") -> str:
    return ", ".join(f"{n} {state}" for state, n in Counter(p.state for p in progress.values()).items())


def last_line(log: Path) -> str:
    """Of a log file that may be long."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").replace("\r", "\n").split("\n")
    except FileNotFoundError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def print_plan(
    console: Console, study: "Study", progress: "Mapping[str, Progress]", records: "Records", slurm: str | None
) -> None:
    from atlas_wm.study.estimate import estimate, place, together

    where = place(slurm)
    seconds, size, unknown = {}, 0.0, 0
    for p in progress.values():
        if p.state == "done":
            console.print(f"[green]done[/]  {p.unit.name}", highlight=False)
            continue
        if not p.unit.command:
            console.print(f"[green]same[/]  {p.unit.name} ({p.why})", highlight=False)
            continue
        guess = estimate(p.unit, study, progress.values(), where.cores, where.gpu)
        about = f"about {duration(guess.seconds)}" if guess.seconds is not None else "no estimate"
        seconds[p.unit] = guess.seconds or 0.0
        size += guess.bytes
        unknown += guess.seconds is None
        console.print(f"[bold]run[/]   {p.unit.name} ({p.why}; {about})", highlight=False)
        command = f"atlas {shlex.join(p.unit.command)} > {shlex.quote(str(records.log(p.unit)))}"
        console.print(f"      [dim]{escape(command)}[/]", highlight=False, soft_wrap=True)
    total = f"about {duration(together(seconds, where.at_once))} {where.how}"
    if unknown:
        total = f"no estimate for {unknown} of them, {total} for the others"
    units = f"{len(seconds)} of {len(progress)} units to run on {where.name}"
    console.print(f"{units}: {total}, {size / 1e9:.1f} GB", highlight=False)


def summarise(
    console: Console, study: "Study", out: Path, progress: "Mapping[str, Progress]", records: "Records"
) -> None:
    from atlas_wm.report.table import print_results
    from atlas_wm.study.results import evaluated, study_rows
    from atlas_wm.study.tries import read_tries

    rows = study_rows(study, progress)
    for task, recipe in product(study.tasks, study.recipes):
        mine = [one for one in evaluated(progress) if (one.run.task, one.run.recipe) == (task, recipe)]
        if results := [one.result for one in mine]:
            console.print(f"\n[bold]{task}, recipe {recipe}[/]")
            print_results(results)
    for one in read_tries(study, progress):
        if one.chosen:
            text = "{task} {method} {recipe}: {weights} ({factor:g} times the recipe's; planning score {score:.3f})"
            console.print(text.format(**one.row), highlight=False)
    for method, why in study.left_out.items():
        console.print(f"{method} was not run: {escape(why)}", highlight=False, soft_wrap=True)
    if rows:
        with (out / "study.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        console.print(f"every run: {out / 'study.csv'}", highlight=False)
        if study.mark is not None:
            console.print(against_mark(study.mark, rows), highlight=False)
    console.print(time_split(progress), highlight=False)
    if progress["report"].state == "done":
        console.print(f"the report: open {progress['report'].unit.makes} in a browser", highlight=False)
    failed = [p for p in progress.values() if p.state == "failed"]
    if failed:
        each = "; ".join(f"{p.unit.name}: {last_line(records.log(p.unit))} ({records.log(p.unit)})" for p in failed)
        raise UserError(f"{len(failed)} of {len(progress)} units failed twice: {each}. Call it again to retry them")


def against_mark(mark: float, rows: "Sequence[Mapping[str, Any]]") -> str:
    short = [r for r in rows if r["success"] is None or r["success"] < mark]
    names = (f"{r['task']} {r['method']} {r['recipe']} {r['seed']} at offset {r['offset']}" for r in short)
    return f"the mark of {mark:g} % is " + (f"not reached by {', '.join(names)}" if short else "reached")


def time_split(progress: "Mapping[str, Progress]") -> str:
    times = {p.unit.kind: 0.0 for p in progress.values()}
    for p in progress.values():
        times[p.unit.kind] += p.seconds
    split = ", ".join(f"{kind} {duration(seconds)}" for kind, seconds in times.items())
    return f"time: {split}; together {duration(sum(times.values()))}"
