"""The command line: arguments only. Each command is a function; its flags come from its signature."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg

from atlas_wm import __version__
from atlas_wm.cli_errors import setting_flags, split_debug, told
from atlas_wm.cli_models import (
    OwnTasks,
    RunFolder,
    bank,
    export_checkpoint,
    import_checkpoint,
    import_tasks,
    methods,
)
from atlas_wm.cli_plan import PLAN_FLAGS, THE_RUNS_OWN, PlanFlags, plan
from atlas_wm.cli_results import diagnose, report
from atlas_wm.config import RunConfig
from atlas_wm.errors import UserError, unknown
from atlas_wm.recipes import RECIPES, get_recipe

# Before torch is imported: idle threads sleep instead of spinning. Alone it costs nothing; beside another busy
# process on the same cores the spinning made training ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

DESCRIPTION = """Latent world models whose planning can be trusted.

A first run on a laptop:

    atlas demo

Step by step:

    atlas collect tworoom --episodes 5000 --no-pixels
    atlas train tworoom --method atlas --recipe demo
    atlas eval runs/tworoom-atlas-demo --part heldout
    atlas plan runs/tworoom-atlas-demo --frame now.png --goal goal.png

`atlas COMMAND --help` explains each one, `atlas --version` says which this is. With --debug (or ATLAS_DEBUG=1) an
error comes with its whole traceback."""

TaskName = Positional[Annotated[str, arg(metavar="TASK")]]


def collect(
    task: TaskName,
    /,
    episodes: int = 5000,
    out: Path | None = None,
    seed: int = 0,
    pixels: bool = True,
    workers: int | None = None,
    timeout: float = 300,
    overwrite: bool = False,
) -> None:
    """Record demonstrations of a task with all cores, and a card that says how.

    Args:
        task: tworoom, pusht or cube, or your own as module:Class (docs/own-data.md).
        episodes: How many demonstrations.
        out: A .lance folder or .h5 file [default: data/TASK.lance].
        seed: Episode n is a function of (seed, n): the set is the same for any number of workers.
        pixels: Store rendered frames. Without them TwoRoom is drawn from its states while it trains.
        workers: Processes [default: one for each core].
        timeout: Seconds an episode may take; 0: any time. One that takes longer, or whose environment fails, is
            left out and named on the card.
        overwrite: Replace an existing dataset.
    """
    from atlas_wm.tasks import get_task

    known_task = get_task(task)
    from atlas_wm.commands import collect_with_progress

    out = out or Path(f"data/{known_task.name}.lance")
    card = collect_with_progress(
        known_task,
        out,
        episodes,
        seed=seed,
        pixels=pixels,
        workers=workers,
        timeout=timeout,
        overwrite=overwrite,
    )
    print(f"{out}: {card['episodes']} episodes, {card['rows']} rows, hash {card['hash']}")


def make_train(default: RunConfig) -> Callable[..., None]:
    """``atlas train`` with the settings of the recipe as its defaults."""

    def train(
        task: TaskName,
        /,
        method: str = "atlas",
        recipe: str = "paper",
        data: Path | None = None,
        out: Path | None = None,
        device: str = "auto",
        overwrite: bool = False,
        plain: bool = False,
        config: Annotated[RunConfig, arg(name="")] = default,
    ) -> None:
        """Train a world model. Every setting of the recipe is a flag; the defaults shown are the recipe's.

        Interrupted, by Ctrl-C, a signal, a full disk or a power cut, the same command goes on from the last good
        state, to the same weights (docs/reliability.md).

        Args:
            task: tworoom, pusht or cube, or your own as module:Class (docs/own-data.md).
            method: atlas, lewm, lewm+ood, wemreg, pldm, dino-wm, fast-wm (`atlas methods`) or your module:NAME.
            recipe: paper (18 M parameters, for a GPU) or demo (minutes on a laptop).
            data: Dataset [default: data/TASK.lance].
            out: Run folder [default: runs/TASK-METHOD-RECIPE].
            device: auto, cpu, cuda, cuda:N or mps.
            overwrite: Replace an existing run folder, and an interrupted run that was started with other settings.
            plain: On a GPU, no captured graphs: every step as it is written.
            config: Settings.
        """
        from atlas_wm.tasks import get_task

        known_task = get_task(task)
        from atlas_wm.commands import train_with_progress

        out = out or Path(f"runs/{known_task.name}-{method.rpartition(':')[-1]}-{recipe}")
        data = data or Path(f"data/{known_task.name}.lance")
        options: dict[str, Any] = {"recipe": recipe, "device": device, "overwrite": overwrite, "plain": plain}
        print(train_with_progress(config, known_task, data, out, method, **options))

    return train


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
        task: The task to evaluate on, as module:Class: your own, if the run is of one (docs/own-data.md), or
            another one than it was trained on [default: the run's].
        search: How to search.
    """
    given = import_tasks(task)
    if len(given) > 1:
        raise UserError(f"a run is evaluated on one --task at a time, not on {', '.join(task)}")
    from atlas_wm.run_folder import read_run

    info, _ = read_run(run)
    from atlas_wm.commands import evaluate_with_progress
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


def doctor() -> None:
    """Say what this machine can do: device, precision, renderer, environments, versions; and what to install."""
    from atlas_wm.doctor import print_doctor

    print_doctor()


def demo(
    out: Path = Path("runs/demo"),
    seeds: tuple[int, ...] = (3072,),
    fresh: bool = False,
) -> None:
    """Train ATLAS and LeWM on TwoRoom, plan with both, and show what came out. About 10 minutes on 2 cores.

    Args:
        out: Where everything goes.
        seeds: Training seeds; several give a table with means over them.
        fresh: Start over instead of keeping the finished parts of an earlier run.
    """
    from atlas_wm.demo import run_demo

    run_demo(out, seeds, fresh)


COMMANDS: dict[str, Callable[..., None]] = {
    "collect": collect,
    "train": make_train(get_recipe("paper")("atlas")),
    "eval": evaluate,
    "plan": plan,
    "diagnose": diagnose,
    "report": report,
    "bank": bank,
    "import": import_checkpoint,
    "export": export_checkpoint,
    "methods": methods,
    "doctor": doctor,
    "demo": demo,
}


def parse_seeds(text: str) -> tuple[int, ...]:
    """``42-46`` or ``1,2,3``"""
    try:
        if "-" in text:
            first, last = (int(part) for part in text.split("-"))
            return tuple(range(first, last + 1))
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--seeds must look like 42-46 or 1,2,3, not {text!r}") from None


def recipe_defaults(arguments: Sequence[str]) -> RunConfig:
    """The settings that --recipe and --method stand for, so that the other flags change those."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--method", default="atlas")
    parser.add_argument("--recipe", default="paper")
    known, _ = parser.parse_known_args(arguments)
    return get_recipe(known.recipe)(known.method)


def main(arguments: Sequence[str] | None = None) -> None:
    given, debug = split_debug(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--version"]:
        print(f"atlas-wm {__version__}")
        return
    flags = {"train": setting_flags(), "eval": PLAN_FLAGS, "plan": PLAN_FLAGS}
    with told(flags.get(given[0], {}) if given else {}, debug):
        run_command(given)


def run_command(arguments: list[str]) -> None:
    from atlas_wm.launch import place

    if place().size > 1 and arguments[:1] not in (["train"], ["eval"], ["diagnose"]):
        raise UserError("only train, eval and diagnose run in several processes: start one, without torchrun")
    if place().rank:  # of several processes one speaks; errors are said by the one that has them
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        logging.getLogger("atlas_wm").setLevel(logging.ERROR)
    elif logging.lastResort is not None:
        logging.getLogger("atlas_wm").setLevel(logging.INFO)  # lines such as "fast path: …", to stderr
        logging.lastResort.setLevel(logging.INFO)
    commands = dict(COMMANDS)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in commands:
        raise unknown("command", arguments[0], commands)
    if arguments[:1] == ["train"]:
        commands["train"] = make_train(recipe_defaults(arguments))
    tyro.extras.subcommand_cli_from_dict(
        commands, prog="atlas", description=DESCRIPTION, args=arguments or ["--help"]
    )


__all__ = ["RECIPES", "main"]
