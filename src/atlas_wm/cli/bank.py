"""``atlas bank``"""

from pathlib import Path

from atlas_wm.cli.arguments import OwnTasks, RunFolder, import_tasks_of


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
    from atlas_wm.train.bank import write_bank

    print(write_bank(run, data, device))
