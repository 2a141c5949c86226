"""The tasks by name."""

from collections.abc import Callable

from atlas_wm.errors import unknown
from atlas_wm.tasks.base import Task
from atlas_wm.tasks.tworoom import TwoRoom

TASKS: dict[str, Callable[[], Task]] = {"tworoom": TwoRoom}


def get_task(name: str) -> Task:
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    return TASKS[name]()


__all__ = ["TASKS", "Task", "get_task"]
