"""``atlas diagnose``"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from atlas_wm.cli.arguments import Device, OwnTasks, RunFolders, by_default, check_given, import_tasks_of

Diagnostic = Literal["all", "probe", "marginal", "rollout", "relational", "regret", "geometry", "cases"]


def diagnose(
    runs: RunFolders,
    /,
    what: tuple[Diagnostic, ...] = ("all",),
    queries: Annotated[int | None, by_default("100; 16 for cube", "INT")] = None,
    candidates: int = 128,
    offset: int = 50,
    seed: int = 0,
    data: Annotated[Path | None, by_default("the dataset each run was trained on")] = None,
    workers: Annotated[int | None, by_default("one per core", "INT")] = None,
    timeout: float = 300,
    device: Device = "auto",
    fresh: bool = False,
    task: OwnTasks = (),
) -> None:
    """Run the paper's diagnostics on trained models. Writes one JSON file each to RUN/diagnostics.

    - probe: does novelty predict failure? (needs `atlas eval` first)
    - marginal: how far is the latent distribution from a Gaussian?
    - rollout: error of predicted latents over the horizon
    - relational: how much does the latent distort distances?
    - regret: the planning bound and its parts
    - geometry: a 2-D map of the latent
    - cases: films of the same episodes for all runs (needs `atlas eval` first)

    Runs in one call share the same start states, goals and action sequences, so their numbers are paired. Results
    that are still valid are reused. `atlas report` draws them; docs/reference/diagnostics.md describes the files.

        atlas diagnose runs/tworoom-atlas-demo runs/tworoom-lewm-demo
        atlas diagnose runs/tworoom-atlas-demo --what rollout regret --queries 50

    Args:
        runs: Run folders.
        what: all, or some of the names above.
        queries: Number of start states for rollout, relational and regret.
        candidates: Action sequences per start state.
        offset: Steps of the demonstration between start and goal.
        seed: Seed of the queries and the random-policy frames.
        data: Dataset to take start states from.
        workers: Number of processes that simulate.
        timeout: Seconds an environment may take for one query; 0 for no limit.
        device: Where to compute; auto takes CUDA, then MPS, then the CPU.
        fresh: Recompute results that are still valid.
        task: Your own tasks as module:Class, if runs were trained on such (docs/own-data.md).
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
