"""``atlas report``"""

from pathlib import Path
from typing import Annotated

from atlas_wm.cli.arguments import RunFolders, by_default, check_given


def report(
    runs: RunFolders,
    /,
    out: Annotated[Path | None, by_default("RUN/report, or report/ next to several runs")] = None,
    tuning: Path | None = None,
) -> None:
    """Write one HTML page about runs, with each figure as PNG and SVG and each table as CSV and LaTeX.

    It reads the results of `atlas eval` and `atlas diagnose` and runs nothing itself. Missing results are listed.

        atlas report runs/tworoom-atlas-demo runs/tworoom-lewm-demo

    Args:
        runs: Run folders to compare.
        out: Folder to write.
        tuning: Table of tries that `atlas study` wrote (tuning.csv), to show how weights were chosen.
    """
    check_given(runs, "report")
    from atlas_wm.report.page import write_report

    print(f"open {write_report(runs, out, tuning)} in a browser")
