"""``atlas demo``"""

from pathlib import Path


def demo(
    out: Path = Path("runs/demo"),
    seeds: tuple[int, ...] = (3072,),
    fresh: bool = False,
) -> None:
    """Train ATLAS and LeWM on TwoRoom, plan with both, and show what came out. About 10 minutes on 2 cores.

    Args:
        out: Where everything goes.
        seeds: Training seeds; several give a table with means over them.
        fresh: Start over instead of keeping the finished parts of an earlier run.
    """
    from atlas_wm.cli.demo_job import run_demo

    run_demo(out, seeds, fresh)
