"""The tasks by name; your own by ``module:Class``."""

from typing import Any

from atlas_wm.config import RunInfo
from atlas_wm.errors import UserError, short, unknown, user_code_location
from atlas_wm.plugins import import_named, imported_already
from atlas_wm.tasks.base import Task

TASKS = {
    "tworoom": "atlas_wm.tasks.tworoom:TwoRoom",
    "pusht": "atlas_wm.tasks.pusht:PushT",
    "cube": "atlas_wm.tasks.cube:Cube",
}


def get_task(name: str) -> Task:
    """A task of the table, or an object of your own class: ``my_package.my_task:MyTask``.

    Modules in the working directory are found too.
    """
    if ":" not in name and name not in TASKS:
        raise unknown("task", name, TASKS)
    return _make(name, import_named("task", TASKS.get(name, name)))


def get_task_of(run: RunInfo) -> Task:
    """The task that the file of a run names: one of the table, or of a module that this program has imported.

    The file may come from a stranger, so it does not decide what is imported: whoever runs the program does.
    """
    if ":" not in run.task:
        return get_task(run.task)
    named = imported_already(run.task)
    if named is None:
        name = short(run.task)
        raise UserError(
            f"the run is of the task {name}, and a file does not decide which code runs: if the code is yours, or "
            f"you trust it, pass --task {name} (in Python: import its module first)"
        )
    return _make(run.task, named)


def _make(name: str, named: Any) -> Task:
    if not (isinstance(named, type) and issubclass(named, Task)):  # nothing else is called
        raise UserError(f"task {name!r} is not a Task: write it as module:Class, derived from atlas_wm.tasks.Task")
    try:
        return named()
    except Exception as error:
        place = user_code_location(error)
        what = f"it failed at {place}: {type(error).__name__}: {error}" if place else error
        raise UserError(f"task {name!r} cannot be made: {what}") from error


def task_id(task: Task) -> str:
    """What to write down so that :func:`get_task` finds the task again: its name in the table, or module:Class."""
    return task.name if TASKS.get(task.name) == task.spec else task.spec


__all__ = ["TASKS", "Task", "get_task", "get_task_of", "task_id"]
