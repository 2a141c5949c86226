"""Arguments that several commands share."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from atlas_wm.errors import UserError, short
from atlas_wm.task_table import TASKS

if TYPE_CHECKING:
    from atlas_wm.tasks import Task


def by_default(text: str, metavar: str = "PATH") -> Any:
    """For a flag that is None unless it is given: the help says what is used then."""
    return arg(metavar=metavar, help_behavior_hint=f"(default: {text})")


TASK_HELP = f"{', '.join(TASKS)}, or your own as module:Class (docs/guides/own-data.md, docs/guides/robot-data.md)."
TaskName = Positional[Annotated[str, arg(metavar="TASK", help=TASK_HELP)]]
RunFolders = Positional[Annotated[tuple[Path, ...], arg(metavar="RUN [RUN ...]", help_behavior_hint="(required)")]]
# A file never decides which code is imported, so your own task is named again on the command line.
OwnTasks = Annotated[tuple[str, ...], by_default("the task of the run", "TASK [TASK ...]")]
Device = Annotated[str, arg(metavar="{auto,cpu,cuda,cuda:N,mps}")]
RunFolder = Positional[Annotated[Path, arg(metavar="RUN")]]


def split_plugins(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments without --plugin MODULE, which any command takes any number of times, and its modules."""
    parser = argparse.ArgumentParser(prog="atlas", add_help=False, allow_abbrev=False)
    parser.add_argument("--plugin", action="append", default=[], metavar="MODULE")
    known, rest = parser.parse_known_args(arguments)
    return rest, known.plugin


def import_tasks(names: Sequence[str]) -> "list[Task]":
    """Import the tasks named on the command line. The name of a task in a run's file is used only then."""
    if not names:
        return []
    from atlas_wm.tasks import get_task

    return [get_task(name) for name in names]


def import_tasks_of(runs: Sequence[Path], names: Sequence[str]) -> None:
    """Import the tasks named on the command line, each of which must be the task of one of the runs."""
    tasks = import_tasks(names)
    if tasks:
        from atlas_wm.runs.folder import read_run
        from atlas_wm.runs.shipped import shipped
        from atlas_wm.tasks import task_id

        known = {read_run(shipped(run) or run)[0].task for run in runs}
        for name, task in zip(names, tasks, strict=True):
            if task_id(task) not in known:
                raise UserError(
                    f"no run is of --task {name}, but of {', '.join(sorted(map(short, known)))}: "
                    f"leave it out (only `atlas eval` runs another task than a model was trained on)"
                )


def check_given(runs: tuple[Path, ...], command: str) -> None:
    if not runs:
        raise UserError(f"name at least one run folder: atlas {command} RUN [RUN ...]")
