"""``atlas collect``"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlas_wm.cli.arguments import TaskName

if TYPE_CHECKING:
    from atlas_wm.tasks import Task


def collect(
    task: TaskName,
    /,
    episodes: int = 5000,
    out: Path | None = None,
    seed: int = 0,
    pixels: bool = True,
    workers: int | None = None,
    timeout: float = 300,
    overwrite: bool = False,
) -> None:
    """Record demonstrations of a task with all cores, and a card that says how.

    Args:
        task: tworoom, pusht or cube, or your own as module:Class (docs/own-data.md).
        episodes: How many demonstrations.
        out: A .lance folder or .h5 file [default: data/TASK.lance].
        seed: Episode n is a function of (seed, n): the set is the same for any number of workers.
        pixels: Store rendered frames. Without them TwoRoom is drawn from its states while it trains.
        workers: Processes [default: one for each core].
        timeout: Seconds an episode may take; 0: any time. One that takes longer, or whose environment fails, is
            left out and named on the card.
        overwrite: Replace an existing dataset.
    """
    from atlas_wm.tasks import get_task

    known_task = get_task(task)
    out = out or Path(f"data/{known_task.name}.lance")
    card = collect_with_progress(
        known_task,
        out,
        episodes,
        seed=seed,
        pixels=pixels,
        workers=workers,
        timeout=timeout,
        overwrite=overwrite,
    )
    print(f"{out}: {card['episodes']} episodes, {card['rows']} rows, hash {card['hash']}")


def collect_with_progress(task: "Task", out: Path, episodes: int, **options: Any) -> dict[str, Any]:
    from atlas_wm.cli.progress import Bar
    from atlas_wm.data.collect import collect

    started = time.monotonic()
    with Bar(f"collect {task.name}", "episodes") as bar:

        def show(done: int, rows: int) -> None:
            bar.update(done, episodes, f"{rows:,} rows, {rows / (time.monotonic() - started):,.0f} rows/s")

        return collect(task, out, episodes, on_episodes=show, say=bar.say, **options)
