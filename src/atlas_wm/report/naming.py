"""What methods and tasks are called in tables and figures."""

import re

from atlas_wm.task_table import TASKS

NAMES = {
    "atlas": "ATLAS",
    "lewm": "LeWM",
    "lewm+ood": "LeWM + OOD-recovery",
    "wemreg": "WEMReg alone",
    "pldm": "PLDM",
    "dino-wm": "DINO-WM",
    "fast-wm": "FAST-WM",
}
RANDOM, REPLAY = "Random actions", "Replayed actions"  # the floor and the ceiling


def method_name(method: str) -> str:
    return NAMES.get(method, _own(method))


def task_name(task: str) -> str:
    return TASKS[task].title if task in TASKS else _own(task)


def _own(name: str) -> str:
    """The last part of module:name, as long as a label may be."""
    return name.rpartition(":")[-1][:40]


def file_name(name: str) -> str:
    """Of a task, the last part of module:Class, which may be a stranger's: it stays in the folder it is put in."""
    return re.sub(r"[^\w+-]+", "-", _own(name))
