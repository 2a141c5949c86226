"""``atlas eval``"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import UseAppendAction, arg

from atlas_wm.cli.arguments import Device, OwnTasks, RunFolder, by_default, import_tasks
from atlas_wm.cli.plan import THE_RUNS_OWN, PlanFlags
from atlas_wm.config import PlanConfig
from atlas_wm.errors import UserError, short

if TYPE_CHECKING:
    from atlas_wm.runs.results import EvaluationResult, Protocol

MOST_SEEDS = 10_000


def evaluate(
    run: RunFolder,
    /,
    offset: int = 50,
    budget: Annotated[int | None, by_default("offset + 25", "INT")] = None,
    episodes: int = 200,
    seeds: str = "42-46",
    part: Literal["all", "heldout"] = "all",
    leave_out_solved: bool = False,
    data: Annotated[str | None, by_default("the dataset the run was trained on")] = None,
    policy: tuple[Literal["model", "random", "replay", "oracle"], ...] = ("model", "random", "replay"),
    oracle_episodes: int = 20,
    oracle_candidates: Annotated[int | None, by_default("--candidates, at most 100", "INT")] = None,
    oracle_iterations: Annotated[int | None, by_default("--iterations, at most 10", "INT")] = None,
    films: int = 4,
    workers: Annotated[int | None, by_default("one per core", "INT")] = None,
    timeout: float = 300,
    device: Device = "auto",
    weights: str | None = None,
    task: OwnTasks = (),
    vary: UseAppendAction[
        Annotated[tuple[tuple[str, ...], ...], by_default("nothing", "NAME=VALUE [NAME=VALUE ...]")]
    ] = (),
    search: Annotated[PlanFlags, arg(name="")] = THE_RUNS_OWN,
) -> None:
    """Measure success in the environment: plan many episodes from dataset states to dataset goals.

    Start and goal are two rows of one demonstration, OFFSET steps apart. The same episodes are also run with
    uniformly random actions (the floor) and with the demonstration's own actions (a ceiling). With --policy oracle
    the planner also searches in the environment itself: what it would reach with a perfect model. Success rates,
    settings and every episode go to RUN/evaluation/*.json. A result is replaced only by one with the same settings.

        atlas eval runs/tworoom-atlas-demo --part heldout
        atlas eval runs/tworoom-atlas-paper --offset 25 --budget 50 --seeds 42-46
        atlas eval runs/mine --task my_task:MyTask --episodes 50 --seeds 42
        atlas eval runs/mine --policy model random oracle --seeds 42
        atlas eval runs/tworoom-atlas-demo --vary door.position=150 agent.color=0,0,255

    Args:
        run: Run folder, or demo: a TwoRoom model that comes with the package; results go to runs/pretrained-demo.
        offset: Steps of the demonstration between start and goal.
        budget: Steps an episode may take.
        episodes: Episodes per seed.
        seeds: Evaluation seeds: a range such as 42-46, or a list such as 1,2,3.
        part: all: draw from all episodes, as the paper does. heldout: only from episodes that training never saw.
        leave_out_solved: Exclude episodes that are already solved at the start from the success rates.
        data: Dataset to draw episodes from: a path, or a URL (docs/guides/own-data.md).
        policy: What acts, on the same episodes. model: plans of the run's model, always needed. random: uniformly
            random actions. replay: the demonstration's actions. oracle: the planner's search with the environment
            in place of the model and the task's own distance as the cost; it takes minutes to hours.
        oracle_episodes: Episodes per seed that the oracle runs.
        oracle_candidates: Candidates per iteration of the oracle; the share of elites is the planner's.
        oracle_iterations: Iterations of the oracle.
        films: Number of episodes to film, from the one with the longest path to the median one.
        workers: On a CPU, processes that plan and act; with a GPU, processes that run the environments.
        timeout: Seconds an environment may take to start an episode or to execute one plan; 0 for no limit. An
            episode that takes longer, or whose environment fails, is recorded with its error and counts as failed.
        device: Where to plan; auto takes CUDA, then MPS, then the CPU.
        weights: Other weights of the run than the final ones: best (validation), or step-2000 if train.save_every
            saved them.
        task: The task to evaluate on, as module:Class: your own (docs/guides/own-data.md), or one with the same
            actions and columns as the task of the run.
        vary: Change the environment within stable-worldmodel's variation space, for the episodes and their goal
            images: colours, sizes, a door. `--vary help` lists the names with their defaults and ranges. The result
            has its own file. Start and goal states are those of the dataset, so positions and angles of agent,
            block, cube and target have no effect.
        search: Settings of the planner.
    """
    given = import_tasks(task)
    if len(given) > 1:
        raise UserError(f"--task takes one task for an evaluation, not {len(given)}: {', '.join(task)}")
    from atlas_wm.runs.folder import read_run
    from atlas_wm.runs.shipped import working_copy

    run = working_copy(run)
    info, _ = read_run(run)
    from atlas_wm.report.table import beside_plain, ceiling_line, interval_line, print_results, risk_line
    from atlas_wm.runs.results import Protocol, read_results
    from atlas_wm.tasks import get_task_of
    from atlas_wm.tasks.variation import NO_VARIATION, list_variations, parse_variation

    texts = [text for group in vary for text in group]
    varied_task = (given[0] if given else get_task_of(info)) if texts else None
    if varied_task is not None and texts == ["help"]:
        print(list_variations(varied_task))
        return
    config = search.applied_to(info.config.plan)
    protocol = Protocol(offset, budget, episodes, parse_seeds(seeds), part, leave_out_solved)
    reports = evaluate_with_progress(
        run,
        [protocol],
        config,
        data_path=data,
        task=given[0] if given else None,
        variation=NO_VARIATION if varied_task is None else parse_variation(varied_task, texts),
        policies=policy,
        oracle_episodes=oracle_episodes,
        oracle_candidates=oracle_candidates,
        oracle_iterations=oracle_iterations,
        films=films,
        workers=workers,
        timeout=timeout,
        device=device,
        weights=weights,
        plain=search.plain,
        precision=search.precision,
        command=sys.argv[1:],
    )
    print_results(reports)
    for line in (interval_line(reports[0]), ceiling_line(reports[0]), risk_line(reports[0])):
        if line:
            print(line)
    if reports[0].variation:
        print(beside_plain(reports[0], list(read_results(run).values())))
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
            if not 0 <= last - first < MOST_SEEDS:
                why = "is an empty range" if last < first else f"are more than {MOST_SEEDS:,} seeds"
                raise UserError(f"--seeds {text} {why}: write it as 42-46")
            return tuple(range(first, last + 1))
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--seeds must look like 42-46 or 1,2,3, not {short(text)}") from None


def evaluate_with_progress(
    run: Path, protocols: "Sequence[Protocol]", plan: PlanConfig | None = None, **options: Any
) -> "list[EvaluationResult]":
    from atlas_wm.cli.progress import Bar
    from atlas_wm.evaluate.evaluate import evaluate

    with Bar(f"evaluate {run.name}", "episodes") as bar:

        def show(done: int, total: int, success: float | None, planner: str = "model") -> None:
            bar.update(done, total, "" if success is None else f"{planner}: {100 * success:.0f} % success so far")

        def show_oracle(done: int, total: int, success: float | None) -> None:
            if done == 0:
                bar.rename(f"oracle of {run.name}", "episodes")
            show(done, total, success, "oracle")

        return evaluate(run, list(protocols), plan=plan, on_progress=show, on_oracle=show_oracle, **options)
