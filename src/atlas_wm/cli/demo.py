"""``atlas demo``"""

from pathlib import Path


def demo(
    out: Path = Path("runs/demo"),
    seeds: int = 1,
    fresh: bool = False,
) -> None:
    """Collect data, train ATLAS and LeWM on TwoRoom, evaluate, diagnose and report. 8 to 15 minutes on 2 cores.

    Open OUT/report/index.html when it ends. Run it again to resume. It is `atlas study demo`
    in one process, with a film and curves.

        atlas demo
        atlas demo --seeds 3 --out runs/demo3

    Args:
        out: Folder for the dataset, the run folders and the report.
        seeds: Number of training seeds. With several, the table shows means over them.
        fresh: Delete OUT and start over.
    """
    from atlas_wm.cli.demo_job import run_demo

    run_demo(out, seeds, fresh)
