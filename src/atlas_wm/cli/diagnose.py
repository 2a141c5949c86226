"""``atlas diagnose``"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from atlas_wm.cli.arguments import Device, OwnTasks, RunFolders, by_default, check_given, import_tasks_of
from atlas_wm.diagnose.catalog import DIAGNOSTICS, DiagnosticName, QuerySettings
from atlas_wm.parallel.workers import TIMEOUT

QUESTIONS = "; ".join(f"{name} ({diagnostic.question})" for name, diagnostic in DIAGNOSTICS.items())
What = tuple[Literal["all"] | DiagnosticName, ...]


def diagnose(
    runs: RunFolders,
    /,
    what: Annotated[What, arg(help=f"all, or any of: {QUESTIONS}.")] = ("all",),
    queries: Annotated[int | None, by_default("100; 16 for cube", "INT")] = None,
    candidates: int = QuerySettings.candidates,
    offset: int = QuerySettings.offset,
    seed: int = QuerySettings.seed,
    data: Annotated[str | None, by_default("the dataset each run was trained on")] = None,
    workers: Annotated[int | None, by_default("one per core", "INT")] = None,
    timeout: float = TIMEOUT,
    device: Device = "auto",
    fresh: bool = False,
    task: OwnTasks = (),
) -> None:
    """Run the paper's diagnostics on trained models. Writes one JSON file each to RUN/diagnostics.

    Runs in one call share the same start states, goals and action sequences, so their numbers are paired. Results
    that are still valid are reused. `atlas report` draws them; docs/reference/diagnostics.md describes the files.

        atlas diagnose runs/tworoom-atlas-demo runs/tworoom-lewm-demo
        atlas diagnose runs/tworoom-atlas-demo --what rollout regret --queries 50

    Args:
        runs: Run folders; probe, cases and imagined need an evaluation (`atlas eval`).
        queries: Number of start states for rollout, relational and regret.
        candidates: Action sequences per start state.
        offset: Steps of the demonstration between start and goal.
        seed: Seed of the queries, the random-policy frames and the frames of the state probe.
        data: Dataset to take start states from.
        workers: Number of processes that simulate.
        timeout: Seconds an environment may take for one query; 0 for no limit.
        device: Where to compute; auto takes CUDA, then MPS, then the CPU.
        fresh: Recompute results that are still valid.
        task: Your own tasks as module:Class, if runs were trained on such (docs/guides/own-data.md).
    """
    check_given(runs, "diagnose")
    import_tasks_of(runs, task)
    diagnose_with_progress(
        runs,
        what,
        settings=QuerySettings(queries, candidates, offset=offset, seed=seed),
        data_path=data,
        workers=workers,
        timeout=timeout,
        device=device,
        fresh=fresh,
    )


def diagnose_with_progress(runs: Sequence[Path], what: What, **options: Any) -> list[Path]:
    from atlas_wm.cli.progress import Bar
    from atlas_wm.diagnose.diagnose import diagnose

    with Bar("diagnose", "parts") as bar:

        def show(name: str, done: int, total: int) -> None:
            if bar.title != name:
                bar.rename(name, "parts")
            bar.update(done, total)

        names = tuple(name for name in what if name != "all")
        files = diagnose(runs, tuple(DIAGNOSTICS) if "all" in what else names, on_step=show, say=bar.say, **options)
    for file in files:
        print(file)
    return files
