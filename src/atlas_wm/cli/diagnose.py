"""``atlas diagnose``"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from atlas_wm.cli.arguments import OwnTasks, RunFolders, check_given, import_tasks_of

Diagnostic = Literal["all", "probe", "marginal", "rollout", "relational", "regret", "geometry", "cases"]


def diagnose(
    runs: RunFolders,
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
    check_given(runs, "diagnose")
    import_tasks_of(runs, task)
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


def diagnose_with_progress(
    runs: Sequence[Path],
    what: Sequence[str],
    *,
    queries: int | None = None,
    candidates: int = 128,
    offset: int = 50,
    seed: int = 0,
    **options: Any,
) -> list[Path]:
    from atlas_wm.cli.progress import Bar
    from atlas_wm.diagnose.diagnose import DIAGNOSTICS, diagnose
    from atlas_wm.diagnose.queries import QuerySettings

    settings = QuerySettings(queries, candidates, offset=offset, seed=seed)
    with Bar("diagnose", "parts") as bar:

        def show(name: str, done: int, total: int) -> None:
            if bar.title != name:
                bar.rename(name, "parts")
            bar.update(done, total)

        files = diagnose(
            runs,
            tuple(DIAGNOSTICS) if "all" in what else tuple(what),
            settings=settings,
            on_step=show,
            say=bar.say,
            **options,
        )
    for file in files:
        print(file)
    return files
