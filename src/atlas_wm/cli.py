"""The command line: arguments only. Each command is a function; its flags come from its signature."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg

from atlas_wm.cli_models import (
    OwnTasks,
    RunFolder,
    bank,
    export_checkpoint,
    import_checkpoint,
    import_tasks,
    methods,
)
from atlas_wm.cli_results import diagnose, report
from atlas_wm.config import PlanConfig, RunConfig
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

`atlas COMMAND --help` explains each one."""

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

        Args:
            task: tworoom, pusht or cube, or your own as module:Class (docs/own-data.md).
            method: atlas, lewm, lewm+ood, wemreg, pldm, dino-wm, fast-wm (`atlas methods`) or your module:NAME.
            recipe: paper (18 M parameters, for a GPU) or demo (minutes on a laptop).
            data: Dataset [default: data/TASK.lance].
            out: Run folder [default: runs/TASK-METHOD-RECIPE].
            device: auto, cpu, cuda, cuda:N or mps.
            overwrite: Replace an existing run folder.
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
    iterations: int | None = None,
    candidates: int | None = None,
    random_floor: bool = True,
    films: int = 4,
    workers: int | None = None,
    timeout: float = 300,
    device: str = "auto",
    plain: bool = False,
    task: OwnTasks = (),
) -> None:
    """Plan many episodes in the real environment and report success beside the random floor.

    Start and goal are two rows of one demonstration, `offset` steps apart. Results, settings and every episode
    are written to RUN/evaluation/*.json.

    Args:
        run: Run folder.
        offset: Steps of the demonstration between start and goal.
        budget: Steps an episode may take [default: offset + 25].
        episodes: Episodes for each seed.
        seeds: Evaluation seeds: a range such as 42-46, or a list such as 1,2,3.
        part: Draw from all episodes, as the paper does, or only from those training never saw.
        leave_out_solved: Leave episodes already solved at the start out of the success rates.
        data: Dataset [default: the one the run was trained on].
        iterations: CEM iterations [default: the run's].
        candidates: CEM candidates [default: the run's].
        random_floor: Also run uniformly random actions.
        films: Episodes to film, from the one with the longest way to go to the median one.
        workers: Processes that plan and act on a CPU, or hold the environments beside a GPU [default: one for each
            core].
        timeout: Seconds an environment may take to start an episode, or for the steps of one plan; 0: any time. An
            episode that takes longer, or whose environment fails, is recorded with its error and counts as failed.
        device: auto, cpu, cuda, cuda:N or mps.
        plain: Plan as the formulas are written, without the fast path.
        task: Your own task, as module:Class, if the run is of one (docs/own-data.md).
    """
    import_tasks(task)
    from atlas_wm.run_folder import read_run

    info, _ = read_run(run)
    from atlas_wm.commands import evaluate_with_progress
    from atlas_wm.evaluate.protocol import Protocol
    from atlas_wm.report.table import print_results

    changes = {"iterations": iterations, "candidates": candidates}
    plan: PlanConfig = replace(info.config.plan, **{k: v for k, v in changes.items() if v is not None})
    protocol = Protocol(offset, budget, episodes, parse_seeds(seeds), part, leave_out_solved)
    reports = evaluate_with_progress(
        run,
        [protocol],
        plan,
        data_path=data,
        random_floor=random_floor,
        films=films,
        workers=workers,
        timeout=timeout,
        device=device,
        plain=plain,
    )
    print_results(reports)
    print(f"written to {run / 'evaluation' / protocol.name}.json")


def plan(
    run: RunFolder,
    /,
    frame: Path,
    goal: Path,
    seed: int = 0,
    iterations: int | None = None,
    candidates: int | None = None,
    plain: bool = False,
    device: str = "auto",
) -> None:
    """Plan from one picture to another; prints the actions as JSON, in the environment's units.

    With them come the costs, and how novel the frame, the goal and the imagined end are beside training frames: 50
    is usual, 100 is unlike any of them.

    Args:
        run: Run folder.
        frame: Picture of the current state.
        goal: Picture of the goal.
        seed: Seed of the search.
        iterations: CEM iterations [default: the run's].
        candidates: CEM candidates [default: the run's].
        plain: No captured graphs, kernels or kept work: the search as it is written, in float32.
        device: auto, cpu, cuda, cuda:N or mps.
    """
    from atlas_wm.device import pick_device
    from atlas_wm.frames import read_image
    from atlas_wm.models.world_model import WorldModel
    from atlas_wm.plan.planner import Planner

    model = WorldModel.load(run, pick_device(device))
    changes = {"iterations": iterations, "candidates": candidates}
    assert model.run is not None
    config = replace(model.run.config.plan, **{k: v for k, v in changes.items() if v is not None})
    result = Planner(model, config, plain=plain).plan(read_image(frame), read_image(goal), seed=seed)
    answer = {"actions": result.actions.tolist(), "cost": result.cost, "start_cost": result.start_cost}
    print(json.dumps({**answer, "novelty": result.novelty and result.novelty._asdict()}))
    if result.novelty is None:
        print(f"{run} has no bank of training frames for novelty: `atlas bank {run}` makes one", file=sys.stderr)


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
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    logging.getLogger("atlas_wm").setLevel(logging.INFO)  # lines such as "fast path: …", to stderr
    if logging.lastResort is not None:
        logging.lastResort.setLevel(logging.INFO)
    try:
        commands = dict(COMMANDS)
        if arguments and not arguments[0].startswith("-") and arguments[0] not in commands:
            raise unknown("command", arguments[0], commands)
        if arguments[:1] == ["train"]:
            commands["train"] = make_train(recipe_defaults(arguments))
        tyro.extras.subcommand_cli_from_dict(
            commands, prog="atlas", description=DESCRIPTION, args=arguments or ["--help"]
        )
    except UserError as error:
        sys.exit(f"atlas: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


__all__ = ["RECIPES", "main"]
