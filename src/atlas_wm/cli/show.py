"""``atlas show``, and ``atlas doctor DATA``"""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from atlas_wm.cli.arguments import by_default
from atlas_wm.errors import UserError

if TYPE_CHECKING:
    from atlas_wm.data.findings import Finding

DataPath = Positional[Annotated[str, arg(metavar="DATA")]]
DataTask = Annotated[str | None, by_default("that of the dataset's card; offline for LeRobot datasets", "TASK")]


def show(
    data: DataPath,
    /,
    out: Annotated[Path | None, by_default("DATA.html")] = None,
    task: DataTask = None,
    episodes: int = 3,
) -> None:
    """Write one HTML page about a dataset: size, moments, coverage, actions, films, and what is wrong with it.

    It reads any dataset that `atlas train` reads: Lance, HDF5, LeRobot folders, with or without frames. Each
    finding says how many rows or episodes it concerns and what to do. `atlas doctor DATA` prints only the findings.

        atlas show data/tworoom.lance
        atlas show pusht_expert_train.h5 --task pusht --out pusht.html
        atlas show my_robot/ --task my_task:MyRobot --episodes 8

    Args:
        data: Dataset: a path, or a URL (docs/guides/own-data.md), whose page goes to the current folder.
        out: HTML file to write. It contains all figures.
        task: Task of the dataset: tworoom, pusht, cube, offline, or your own as module:Class.
        episodes: Number of random episodes to show as film strips, beside the longest, the shortest and the one
            with the largest actions.
    """
    from atlas_wm.cli.progress import Bar
    from atlas_wm.data.findings import open_to_inspect
    from atlas_wm.show.page import write_page

    if not 0 <= episodes <= 100:
        raise UserError(f"--episodes must be between 0 and 100, not {episodes}")
    opened = open_to_inspect(data, task)
    with Bar(f"show {Path(opened.path).name}", "steps") as bar:
        page, found = write_page(opened, out, episodes, bar.update)
    own = f" --task {task}" if task else ""
    printed = f" (`atlas doctor {shlex.quote(str(data))}{own}` prints them)" if found else ""
    print(f"{summary(found)}{printed}: open {page} in a browser")


def check_dataset(data: str, task: str | None) -> None:
    """Print the findings. Exit status 1 if the dataset cannot be trained on."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from atlas_wm.cli.progress import Bar
    from atlas_wm.data.findings import findings, open_to_inspect, trainable

    opened = open_to_inspect(data, task)
    with Bar(f"check {Path(opened.path).name}", "checks") as bar:
        found = findings(opened, bar.update)
    print(f"{opened.path}: {len(opened.lengths)} episodes, {len(opened.actions)} rows; {summary(found)}")
    marks = {"error": "[red]error[/]", "warning": "[yellow]warning[/]", "note": "note"}
    table = Table("", "found", "what to do")
    for finding in found:
        table.add_row(marks[finding.level], escape(finding.text), escape(finding.remedy))
    if found:
        Console().print(table)
    if not trainable(found):
        sys.exit(1)


def summary(found: "list[Finding]") -> str:
    """``1 error, 2 warnings``"""
    from atlas_wm.data.findings import LEVELS

    counts = [(level, sum(finding.level == level for finding in found)) for level in LEVELS]
    return ", ".join(f"{n} {level}{'s' if n > 1 else ''}" for level, n in counts if n) or "no findings"
