"""``atlas collect``"""

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import UseAppendAction

from atlas_wm.cli.arguments import TaskName, by_default
from atlas_wm.settings import as_text

if TYPE_CHECKING:
    from atlas_wm.tasks import Task


def collect(
    task: TaskName,
    /,
    episodes: int = 5000,
    out: Annotated[Path | None, by_default("data/TASK.lance")] = None,
    seed: int = 0,
    pixels: bool = True,
    workers: Annotated[int | None, by_default("one per core; Cube with frames: at most 6", "INT")] = None,
    timeout: float = 300,
    overwrite: bool = False,
    demonstrator: UseAppendAction[
        Annotated[tuple[tuple[str, ...], ...], by_default("those of the task", "NAME=VALUE [NAME=VALUE ...]")]
    ] = (),
) -> None:
    """Record a dataset of demonstrations.

    Writes the dataset and a card, OUT.card.json, with the policy, seeds, versions and a hash of the data. Prints
    the moments of the data, beside the published ones where they are known (docs/guides/collect.md). If it is
    interrupted, run the same command again: collection resumes after the last complete batch of episodes.

        atlas collect tworoom --episodes 5000 --no-pixels
        atlas collect pusht --episodes 2000 --out data/pusht.h5
        atlas collect cube --demonstrator targets=many action_noise=0.2
        atlas collect my_task:MyTask --episodes 100

    Args:
        episodes: Number of demonstrations.
        out: Dataset to write: a .lance folder or an .h5 file.
        seed: Episode n depends only on (seed, n), so the dataset is the same for any number of workers.
        pixels: Store rendered frames. With --no-pixels, TwoRoom frames are drawn from states during training.
        workers: Number of processes. Those of Cube share one renderer, which can hang with more than 7.
        timeout: Seconds an episode may take; 0 for no limit. Episodes that take longer, or whose environment fails,
            are left out and listed on the card.
        overwrite: Replace an existing dataset.
        demonstrator: Settings of the policy that records (docs/guides/collect.md). `--demonstrator help` lists them
            with their defaults. The card holds all of them.
    """
    from atlas_wm.tasks import get_task

    known_task = get_task(task)
    given = [text for texts in demonstrator for text in texts]
    if given == ["help"]:
        print(as_text(known_task.with_demonstrator(()).demonstrator_config).replace(", ", "\n"))
        return
    if given:
        known_task = known_task.with_demonstrator(given)
    default = Path(f"data/{known_task.name}.lance")
    out = out or default
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
    from atlas_wm.data.moments import moments_table

    print(f"{out}: {card['episodes']} episodes, {card['rows']} rows, hash {card['hash']}")
    if card.get("moments"):
        print(moments_table(card["moments"]))
    place, own = shlex.quote(str(out)), f" --task {task}" if ":" in task else ""
    elsewhere = "" if out == default else f" --data {place}"
    print(f"look at it: atlas show {place}{own}; train: atlas train {task} --recipe demo{elsewhere}")


def collect_with_progress(task: "Task", out: Path, episodes: int, **options: Any) -> dict[str, Any]:
    from atlas_wm.cli.progress import Bar
    from atlas_wm.data.collect import collect

    started = time.monotonic()
    with Bar(f"collect {task.name}", "episodes") as bar:

        def show(done: int, rows: int) -> None:
            bar.update(done, episodes, f"{rows:,} rows, {rows / (time.monotonic() - started):,.0f} rows/s")

        return collect(task, out, episodes, on_episodes=show, say=bar.say, **options)
