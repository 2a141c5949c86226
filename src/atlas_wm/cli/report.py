"""``atlas report``"""

from pathlib import Path
from typing import Annotated

from atlas_wm.cli.arguments import RunFolders, by_default, check_given

Names = tuple[str, ...]


def report(
    runs: RunFolders,
    /,
    out: Annotated[Path | None, by_default("RUN/report, or report/ next to several runs")] = None,
    tuning: Path | None = None,
    left_out: Annotated[Names, by_default("none", "METHOD=WHY [METHOD=WHY ...]")] = (),
) -> None:
    """Write one HTML page about runs, with each figure as PNG and SVG and each table as CSV and LaTeX.

    It reads the results of `atlas eval` and `atlas diagnose` and runs nothing itself. Missing results are listed.

        atlas report runs/tworoom-atlas-demo runs/tworoom-lewm-demo

    Args:
        runs: Run folders to compare.
        out: Folder to write.
        tuning: Table of tries that `atlas study` wrote (tuning.csv), to show how weights were chosen.
        left_out: Methods that were not run, and why: each is a row of the table of success.
    """
    check_given(runs, "report")
    from atlas_wm.report.page import write_report

    assigned = {method: why or "not run" for method, _, why in (one.partition("=") for one in left_out)}
    print(f"open {write_report(runs, out, tuning, assigned)} in a browser")
