"""The commands about models as such: where they come from, where they go, which there are. Arguments only."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from atlas_wm.errors import UserError, short
from atlas_wm.recipes import get_recipe

if TYPE_CHECKING:
    from atlas_wm.tasks import Task

# A run's file does not decide which code runs: a task that is not of this package is named again.
OwnTasks = Annotated[tuple[str, ...], arg(metavar="TASK [TASK ...]")]
RunFolder = Positional[Annotated[Path, arg(metavar="RUN")]]


def import_tasks(names: Sequence[str]) -> "list[Task]":
    """Import the tasks that were named on the command line: what a run's file names is followed only then."""
    if not names:
        return []
    from atlas_wm.tasks import get_task

    return [get_task(name) for name in names]


def import_tasks_of(runs: Sequence[Path], names: Sequence[str]) -> None:
    """The same where each must be the task of one of the runs."""
    tasks = import_tasks(names)
    if tasks:
        from atlas_wm.run_folder import read_run
        from atlas_wm.tasks import task_id

        known = {read_run(run)[0].task for run in runs}
        for name, task in zip(names, tasks, strict=True):
            if task_id(task) not in known:
                raise UserError(
                    f"no run is of --task {name}, but of {', '.join(sorted(map(short, known)))}: "
                    f"leave it out (only `atlas eval` runs another task than a model was trained on)"
                )


def bank(run: RunFolder, /, data: Path | None = None, device: str = "auto", task: OwnTasks = ()) -> None:
    """Give a run that lacks them the bank of training frames that `atlas plan` tells novelty by, and the training
    states that `atlas eval` tells ID from OOD episodes by.

    Training and `atlas import` do this themselves. A run of an older version also gets the action bounds that its
    plans are clipped to.

    Args:
        run: Run folder.
        data: The dataset it was trained on [default: where that was].
        device: auto, cpu, cuda, cuda:N or mps.
        task: Your own task, as module:Class, if the run is of one.
    """
    import_tasks_of([run], task)
    from atlas_wm.commands import write_bank

    print(write_bank(run, data, device))


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


def methods(recipe: str = "paper") -> None:
    """Show the methods side by side: encoder, predictor, weighted loss terms, parameters, source.

    Args:
        recipe: At whose size: paper or demo.
    """
    get_recipe(recipe)
    from atlas_wm.methods_table import print_methods

    print_methods(recipe)
