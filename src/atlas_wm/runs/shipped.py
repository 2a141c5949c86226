"""Trained models that come with the package, by name."""

import filecmp
import os
import shutil
from pathlib import Path
from secrets import token_hex

from atlas_wm.errors import UserError

FOLDER = Path(__file__).parents[1] / "pretrained"
NAMES = ("demo",)  # ATLAS on TwoRoom, of `atlas demo`


def shipped(source: str | Path) -> Path | None:
    """The folder of a model that comes with the package; None for any other source, and where there is a folder of
    that name."""
    return FOLDER / str(source) if str(source) in NAMES and not Path(source).exists() else None


def working_copy(run: Path) -> Path:
    """The run folder itself; of a model that comes with the package, a copy that results can be added to."""
    original = shipped(run)
    if original is None:
        return run
    copy = Path("runs") / f"pretrained-{run}"
    if not copy.exists():
        staging = copy.with_name(f"{copy.name}.{token_hex(8)}.partial")
        try:
            os.rename(shutil.copytree(original, staging), copy)
        except OSError:
            shutil.rmtree(staging, ignore_errors=True)
            if not copy.exists():  # else another process was first
                raise
    weights = "model.safetensors"
    if not (copy / weights).exists() or not filecmp.cmp(original / weights, copy / weights, shallow=False):
        raise UserError(
            f"{copy} holds another model than {run} of this version of atlas-wm: rename or remove it, and run this "
            f"command again, or name that folder in place of {run}"
        )
    return copy
