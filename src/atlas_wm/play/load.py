"""Load the models of a page once; each visitor then gets a session of their own."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from atlas_wm.config import PlanConfig
from atlas_wm.errors import UserError
from atlas_wm.parallel.devices import pick_device
from atlas_wm.play.player import load_player, warm_up
from atlas_wm.play.session import Session
from atlas_wm.tasks import get_task_of

log = logging.getLogger(__name__)


def load_session(
    runs: Sequence[Path], data: str | Path | None, device: str, settings: Callable[[PlanConfig], PlanConfig]
) -> Callable[[], Session]:
    """``settings``: from the plan settings of a run to those that the page plans with."""
    started = time.perf_counter()
    players = [load_player(run, settings, pick_device(device), data) for run in runs]
    infos = [player.planner.model.run for player in players]
    tasks = sorted({info.task for info in infos if info is not None})
    if len(tasks) > 1:
        raise UserError(f"the runs are of different tasks, {' and '.join(tasks)}: name two runs of the same task")
    assert infos[0] is not None
    task = get_task_of(infos[0])
    task.require_env("atlas play", "plan from images with `atlas plan`")
    task.make_env().close()  # its packages take seconds to import
    for player in players:
        warm_up(player)
        if player.without_frames:
            log.warning("no imagined frames of %s: %s", player.name, player.without_frames)
    log.info("loaded in %.1f s", time.perf_counter() - started)
    return partial(Session, players, task, data)
