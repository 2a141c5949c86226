"""``atlas eval``"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from atlas_wm.cli.arguments import OwnTasks, RunFolder, import_tasks
from atlas_wm.cli.plan import THE_RUNS_OWN, PlanFlags
from atlas_wm.config import PlanConfig
from atlas_wm.errors import UserError

if TYPE_CHECKING:
    from atlas_wm.runs.results import EvaluationResult, Protocol


def evaluate(
    run: RunFolder,
    /,
    offset: int = 50,
    budget: int | None = None,
    episodes: int = 200,
    seeds: str = "42-46",
    part: Literal["all", "heldout"] = "all",
    leave_out_solved: bool = False,
    data: Path | None = None,
    random_floor: bool = True,
    replay_ceiling: bool = True,
    films: int = 4,
    workers: int | None = None,
    timeout: float = 300,
    device: str = "auto",
    weights: str | None = None,
    task: OwnTasks = (),
    search: Annotated[PlanFlags, arg(name="")] = THE_RUNS_OWN,
) -> None:
    """Plan many episodes in the real environment and report success beside random and replayed actions.

    Start and goal are two rows of one demonstration, `offset` steps apart. Results, settings and every episode
    are written to RUN/evaluation/*.json; only a result with the same settings is replaced.

    Args:
        run: Run folder.
        offset: Steps of the demonstration between start and goal.
        budget: Steps an episode may take [default: offset + 25].
        episodes: Episodes for each seed.
        seeds: Evaluation seeds: a range such as 42-46, or a list such as 1,2,3.
        part: Draw from all episodes, as the paper does, or only from those training never saw.
        leave_out_solved: Leave episodes already solved at the start out of the success rates.
        data: Dataset [default: the one the run was trained on].
        random_floor: Also run uniformly random actions.
        replay_ceiling: Also run the recorded actions of the demonstration, from the start to the goal.
        films: Episodes to film, from the one with the longest way to go to the median one.
        workers: Processes that plan and act on a CPU, or hold the environments beside a GPU [default: one for each
            core].
        timeout: Seconds an environment may take to start an episode, or for the steps of one plan; 0: any time. An
            episode that takes longer, or whose environment fails, is recorded with its error and counts as failed.
        device: auto, cpu, cuda, cuda:N or mps.
        weights: Other weights of the run than the final ones: best (validation), or step-2000 if train.save_every
            saved them.
        task: The task to evaluate on, as module:Class: your own, if the run is of one (docs/own-data.md), or
            another one than it was trained on [default: the run's].
        search: How to search.
    """
    given = import_tasks(task)
    if len(given) > 1:
        raise UserError(f"a run is evaluated on one --task at a time, not on {', '.join(task)}")
    from atlas_wm.runs.folder import read_run

    info, _ = read_run(run)
    from atlas_wm.evaluate.protocol import Protocol
    from atlas_wm.report.table import print_results

    config = search.applied_to(info.config.plan)
    protocol = Protocol(offset, budget, episodes, parse_seeds(seeds), part, leave_out_solved)
    reports = evaluate_with_progress(
        run,
        [protocol],
        config,
        data_path=data,
        task=given[0] if given else None,
        random_floor=random_floor,
        replay_ceiling=replay_ceiling,
        films=films,
        workers=workers,
        timeout=timeout,
        device=device,
        weights=weights,
        plain=search.plain,
        precision=search.precision,
    )
    print_results(reports)
    planned = reports[0].model
    print(
        f"{planned.plans} plans, {planned.seconds_per_plan or 0:.3f} s each; "
        f"at most {(planned.peak_memory or 0) / 2**30:.2f} GiB"
    )
    print(f"written to {run / 'evaluation' / reports[0].name}.json")


def parse_seeds(text: str) -> tuple[int, ...]:
    """``42-46`` or ``1,2,3``"""
    try:
        if "-" in text:
            first, last = (int(part) for part in text.split("-"))
            return tuple(range(first, last + 1))
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--seeds must look like 42-46 or 1,2,3, not {text!r}") from None


def evaluate_with_progress(
    run: Path, protocols: "Sequence[Protocol]", plan: PlanConfig | None = None, **options: Any
) -> "list[EvaluationResult]":
    from atlas_wm.cli.progress import Bar
    from atlas_wm.evaluate.evaluate import evaluate

    with Bar(f"evaluate {run.name}", "episodes") as bar:

        def show(done: int, total: int, success: float) -> None:
            bar.update(done, total, f"success so far {100 * success:.0f} %")

        return evaluate(run, list(protocols), plan=plan, on_progress=show, **options)
