"""The tasks by name; your own by ``module:Class``."""

from atlas_wm.errors import UserError, unknown
from atlas_wm.imports import import_named
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
    named = import_named("task", TASKS.get(name, name))
    try:
        task = named()
    except TypeError as error:
        raise UserError(f"task {name!r} cannot be made ({error}): write it as module:Class") from error
    if not isinstance(task, Task):
        raise UserError(f"{name} is not a Task: derive it from atlas_wm.tasks.Task")
    return task


def task_id(task: Task) -> str:
    """What to write down so that :func:`get_task` finds the task again: its name in the table, or module:Class."""
    return task.name if TASKS.get(task.name) == task.spec else task.spec


__all__ = ["TASKS", "Task", "get_task", "task_id"]
