"""``atlas report``"""

from pathlib import Path

from atlas_wm.cli.arguments import RunFolders, check_given


def report(
    runs: RunFolders,
    /,
    out: Path | None = None,
) -> None:
    """Make one HTML page of what runs left on disk, with every table and figure as PNG, SVG, CSV and LaTeX.

    Args:
        runs: Run folders; their evaluations and diagnostics are drawn, what is missing is named.
        out: Folder to write [default: RUN/report, or report/ beside the runs where there are several].
    """
    check_given(runs, "report")
    from atlas_wm.report.page import write_report

    print(f"open {write_report(runs, out)} in a browser")
