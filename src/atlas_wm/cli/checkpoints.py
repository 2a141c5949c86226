"""``atlas import`` and ``atlas export``: checkpoints of other libraries"""

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from atlas_wm.cli.arguments import TASK_HELP, RunFolder, by_default


def import_checkpoint(
    path: Positional[Annotated[Path, arg(metavar="PATH")]],
    /,
    task: Annotated[str, arg(help=TASK_HELP)],
    format: Literal["lewm"] = "lewm",
    data: Annotated[str | None, by_default("data/TASK.lance")] = None,
    out: Annotated[Path | None, by_default("runs/TASK-lewm-imported")] = None,
    overwrite: bool = False,
) -> None:
    """Convert a checkpoint of another library into a run folder.

    A LeWM checkpoint does not store the mean and standard deviation of the training actions, so they are measured
    on the dataset: pass the one the model was trained on. Afterwards `atlas eval`, `atlas plan` and `atlas
    diagnose` work as with any run:

        atlas import lewm-checkpoint/ --task tworoom --data data/tworoom.lance

    Args:
        path: A folder with weights.pt and config.json, or a .pt file with config.json in the same folder.
        format: lewm: a LeWM saved by stable-worldmodel.
        data: The dataset the model was trained on.
        out: Run folder to write.
        overwrite: Replace an existing run folder.
    """
    from atlas_wm.tasks import get_task

    known_task = get_task(task)
    from atlas_wm.convert.lewm import import_lewm

    out = out or Path(f"runs/{known_task.name}-{format}-imported")
    data = data or f"data/{known_task.name}.lance"
    print(import_lewm(path, known_task, data, out, overwrite=overwrite))


def export_checkpoint(
    run: RunFolder,
    /,
    out: Path,
    format: Literal["lewm"] = "lewm",
    vit_names: Literal["installed", "old", "new"] = "installed",
    overwrite: bool = False,
) -> None:
    """Convert a run folder into a checkpoint of another library: weights.pt and config.json.

    stable-worldmodel loads the result with load_state_dict(strict=True). The bank, demonstrations and temporal head
    of the run stay behind:

        atlas export runs/tworoom-lewm-paper --out lewm-checkpoint

    Args:
        run: Run folder of a model with LeWM's architecture; any losses.
        out: Folder to write.
        format: lewm: stable-worldmodel's LeWM.
        vit_names: Names of the ViT's layers, which changed between versions of transformers. installed: those of
            your version; old: those of published checkpoints; new: those of current versions.
        overwrite: Replace an existing folder.
    """
    from atlas_wm.convert.lewm import export_lewm

    print(export_lewm(run, out, names=vit_names, overwrite=overwrite))
