"""Names of methods and tasks in tables and figures, and the colours of methods."""

import re
from typing import NamedTuple

from atlas_wm.task_table import TASKS


class MethodStyle(NamedTuple):
    name: str
    colour: str


# The colours of Okabe and Ito, distinct for all colour vision. Blues: WEMReg, oranges: SIGReg.
METHODS = {
    "atlas": MethodStyle("ATLAS", "#0072b2"),
    "lewm": MethodStyle("LeWM", "#d55e00"),
    "lewm+ood": MethodStyle("LeWM + OOD-recovery", "#e69f00"),
    "wemreg": MethodStyle("WEMReg alone", "#56b4e9"),
    "pldm": MethodStyle("PLDM", "#009e73"),
    "dino-wm": MethodStyle("DINO-WM", "#cc79a7"),
    "fast-wm": MethodStyle("FAST-WM", "#8f8f1f"),
}
PARTS = {"heldout": "held-out episodes", "all": "all episodes"}
RANDOM, REPLAY, ORACLE = "Random actions", "Replayed actions", "Oracle planner"  # the floor and two ceilings


def method_name(method: str) -> str:
    return METHODS[method].name if method in METHODS else _own(method)


def method_colour(method: str) -> str | None:
    return METHODS[method].colour if method in METHODS else None


def task_name(task: str) -> str:
    return TASKS[task].title if task in TASKS else _own(task)


def _own(name: str) -> str:
    """The last part of module:name, cut to the length of a label."""
    return name.rpartition(":")[-1][:40]


def file_name(name: str) -> str:
    """The last part of module:Class without path separators: the name may come from an untrusted file."""
    return re.sub(r"[^\w+-]+", "-", _own(name))
