"""Tasks by name, or your own by ``module:Class``."""

from typing import Any

from atlas_wm.config import RunInfo
from atlas_wm.errors import UserError, short, unknown, user_code_location
from atlas_wm.plugins import import_named, imported_already
from atlas_wm.task_table import TASKS
from atlas_wm.tasks.base import Task
from atlas_wm.tasks.offline import OfflineTask


def get_task(name: str) -> Task:
    """A task of the table, or an object of your own class: ``my_package.my_task:MyTask``.

    Modules in the working directory are found too.
    """
    if ":" not in name and name not in TASKS:
        raise unknown("task", name, TASKS)
    return _make(name, import_named("task", TASKS[name].spec if name in TASKS else name))


def get_task_of(run: RunInfo) -> Task:
    """The task that a run names: one of the table, or a class in a module that this program has already imported.

    A run may come from a stranger, so its file does not decide which modules are imported.
    """
    if ":" not in run.task:
        return get_task(run.task)
    named = imported_already(run.task)
    if named is None:
        name = short(run.task)
        raise UserError(
            f"the run was trained on {name}, a task outside this package, and a run folder does not decide which "
            f"code runs: if you trust that code, pass --task {name} (in Python: import its module first)"
        )
    return _make(run.task, named)


def _make(name: str, named: Any) -> Task:
    if not (isinstance(named, type) and issubclass(named, Task)):  # nothing else is called
        raise UserError(f"task {name!r} is not a subclass of atlas_wm.tasks.Task: write it as module:Class")
    try:
        return named()
    except Exception as error:
        where = user_code_location(error)
        what = f"it failed at {where}: {type(error).__name__}: {error}" if where else error
        raise UserError(f"task {name!r} cannot be made: {what}") from error


def task_id(task: Task) -> str:
    """The string :func:`get_task` makes the task from: its name in the table, or module:Class."""
    return task.name if task.name in TASKS and TASKS[task.name].spec == task.spec else task.spec


__all__ = ["TASKS", "OfflineTask", "Task", "get_task", "get_task_of", "task_id"]
