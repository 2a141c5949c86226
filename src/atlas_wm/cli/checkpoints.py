"""``atlas import`` and ``atlas export``: checkpoints of other libraries"""

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from atlas_wm.cli.arguments import RunFolder


def import_checkpoint(
    path: Positional[Annotated[Path, arg(metavar="PATH")]],
    /,
    task: str,
    format: Literal["lewm"] = "lewm",
    data: Path | None = None,
    out: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Make a run folder from the checkpoint of another library.

    A LeWM checkpoint does not hold the mean and deviation of the actions it was trained on. They are measured on
    the dataset, as training would: give the one it was trained on.

    Args:
        path: A folder with weights.pt and config.json, or the .pt file itself with config.json beside it.
        task: tworoom, pusht or cube, or your own as module:Class (docs/own-data.md).
        format: lewm: a LeWM that stable-worldmodel saved.
        data: Dataset [default: data/TASK.lance].
        out: Run folder [default: runs/TASK-lewm-imported].
        overwrite: Replace an existing run folder.
    """
    from atlas_wm.tasks import get_task

    known_task = get_task(task)
    from atlas_wm.convert.lewm import import_lewm

    out = out or Path(f"runs/{known_task.name}-{format}-imported")
    data = data or Path(f"data/{known_task.name}.lance")
    print(import_lewm(path, known_task, data, out, overwrite=overwrite))


def export_checkpoint(
    run: RunFolder,
    /,
    out: Path,
    format: Literal["lewm"] = "lewm",
    vit_names: Literal["installed", "old", "new"] = "installed",
    overwrite: bool = False,
) -> None:
    """Write a run for another library: weights.pt and config.json, as stable-worldmodel loads them.

    Args:
        run: Run folder of a model with LeWM's architecture, whatever its losses.
        out: Folder to write.
        format: lewm: stable-worldmodel's LeWM.
        vit_names: How the encoder's layers are named, which transformers has changed: as in the version installed
            here, or as in published checkpoints (old) or since (new).
        overwrite: Replace an existing folder.
    """
    from atlas_wm.convert.lewm import export_lewm

    print(export_lewm(run, out, names=vit_names, overwrite=overwrite))
