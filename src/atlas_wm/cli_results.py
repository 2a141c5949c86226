"""The commands about what runs left on disk. Arguments only."""

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from atlas_wm.cli_models import OwnTasks, import_tasks_of
from atlas_wm.errors import UserError

Diagnostic = Literal["all", "probe", "marginal", "rollout", "relational", "regret", "geometry", "cases"]


def diagnose(
    runs: Positional[Annotated[tuple[Path, ...], arg(metavar="RUN [RUN ...]")]],
    /,
    what: tuple[Diagnostic, ...] = ("all",),
    queries: int | None = None,
    candidates: int = 128,
    offset: int = 50,
    seed: int = 0,
    data: Path | None = None,
    workers: int | None = None,
    timeout: float = 300,
    device: str = "auto",
    fresh: bool = False,
    task: OwnTasks = (),
) -> None:
    """Measure when a frozen model can be trusted: the paper's diagnostics, one JSON each in RUN/diagnostics.

    Runs that are compared meet the same queries, candidates and random frames. Files that are there already are
    kept. docs/diagnostics.md explains each; `atlas report` draws them.

    Args:
        runs: Run folders; probe and cases need an evaluation (`atlas eval`).
        what: all, or some of: probe (does novelty foretell failure?), marginal (is the latent Gaussian?), rollout
            (error of imagined latents), relational (distortion of distances), regret (the planning bound),
            geometry (a map of the latent), cases (films of the same episodes).
        queries: Start states for rollout, relational and regret [default: 100, for cube 16].
        candidates: Action sequences for each of them.
        offset: Rows between start and goal.
        seed: Of queries and random frames.
        data: Dataset [default: the one each run was trained on].
        workers: Processes that simulate [default: one for each core].
        timeout: Seconds an environment may take for the sequences of one query; 0: any time.
        device: auto, cpu, cuda, cuda:N or mps.
        fresh: Measure again what is there already.
        task: Your own tasks, as module:Class, if runs are of such (docs/own-data.md).
    """
    _check_given(runs, "diagnose")
    import_tasks_of(runs, task)
    from atlas_wm.commands import diagnose_with_progress

    diagnose_with_progress(
        runs,
        what,
        queries=queries,
        candidates=candidates,
        offset=offset,
        seed=seed,
        data_path=data,
        workers=workers,
        timeout=timeout,
        device=device,
        fresh=fresh,
    )


def report(
    runs: Positional[Annotated[tuple[Path, ...], arg(metavar="RUN [RUN ...]")]],
    /,
    out: Path | None = None,
) -> None:
    """Make one HTML page of what runs left on disk, with every table and figure as PNG, SVG, CSV and LaTeX.

    Args:
        runs: Run folders; their evaluations and diagnostics are drawn, what is missing is named.
        out: Folder to write [default: RUN/report, or report/ beside the runs where there are several].
    """
    _check_given(runs, "report")
    from atlas_wm.report.page import write_report

    print(f"open {write_report(runs, out)} in a browser")


def _check_given(runs: tuple[Path, ...], command: str) -> None:
    if not runs:
        raise UserError(f"name at least one run folder: atlas {command} RUN [RUN ...]")
