"""Trained models that come with the package, by name."""

import shutil
from pathlib import Path

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
        shutil.copytree(original, copy)
    return copy
