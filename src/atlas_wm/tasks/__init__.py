"""The tasks by name; your own by ``module:Class``."""

import sys
from importlib import import_module
from pathlib import Path

from atlas_wm.errors import UserError, unknown
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
    module, _, attribute = TASKS.get(name, name).partition(":")
    if name not in TASKS and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        task = getattr(import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError) as error:
        raise UserError(f"task {name!r} cannot be imported ({error}): write it as module:Class") from error
    if not isinstance(task, Task):
        raise UserError(f"{name} is not a Task: derive it from atlas_wm.tasks.Task")
    return task


def task_id(task: Task) -> str:
    """What to write down so that :func:`get_task` finds the task again: its name in the table, or module:Class."""
    return task.name if TASKS.get(task.name) == task.spec else task.spec


__all__ = ["TASKS", "Task", "get_task", "task_id"]
