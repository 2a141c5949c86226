"""Metrics of a run in Weights & Biases: an ``on_metrics`` callback for training."""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from atlas_wm.config import RunConfig
from atlas_wm.errors import UserError, short
from atlas_wm.runs.files import read_json, write_json
from atlas_wm.runs.folder import staging_folder
from atlas_wm.settings import to_dict
from atlas_wm.train.metrics import OnMetrics

log = logging.getLogger(__name__)
WANDB = "wandb.json"  # in the run folder: which W&B run it is


@contextmanager
def wandb_log(out: Path, config: RunConfig, **settings: str) -> Iterator[OnMetrics]:
    """Yields a callback that logs rows to the W&B run of the run folder ``out``.

    The W&B run starts at the first row. Its id is stored in the run folder, so that a resumed run continues it. If
    it cannot start, the callback raises once and then does nothing. The project is $WANDB_PROJECT or the name of
    the folder that holds ``out``; ``settings`` are logged with ``config``.
    """
    try:
        import wandb
    except ImportError as error:
        raise UserError(
            f"--log wandb needs Weights & Biases ({error}): pip install 'atlas-wm[wandb]', or leave --log out"
        ) from error
    run: Any = None
    tried, exit_code = False, 1

    def log_row(step: int, row: dict[str, float]) -> None:
        nonlocal run, tried
        if not tried:
            tried = True
            settings_of_run = {**settings, **to_dict(config)}
            run = wandb.init(**_identity(out), name=out.name, resume="allow", config=settings_of_run)
        if run is not None:
            run.log(row, step=step)

    try:
        yield log_row
        exit_code = 0
    finally:
        if run is not None:
            try:
                run.finish(exit_code=exit_code)
            except Exception as error:  # it must not hide how training ended
                log.warning("Weights & Biases did not finish its run: %s", error)


def _identity(out: Path) -> dict[str, str]:
    """Project and id of the W&B run: those stored in the run folder that is being trained, else new ones."""
    path = staging_folder(out) / WANDB
    if path.exists():
        stored = read_json(path)
        known = stored if isinstance(stored, dict) else {}
        found = {name: str(known.get(name)) for name in ("project", "id")}
        if known.keys() != found.keys() or not re.fullmatch(r"[\w-]{1,128}", found["id"]):
            raise UserError(f"{path} is damaged ({short(stored)}): delete it to start a new W&B run")
        return found
    project = os.environ.get("WANDB_PROJECT") or out.resolve().parent.name or "atlas-wm"
    new = {"project": project, "id": uuid4().hex[:12]}
    write_json(path, new)
    return new
