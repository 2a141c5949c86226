"""``atlas bank``"""

from typing import Annotated

from atlas_wm.cli.arguments import Device, OwnTasks, RunFolder, by_default, import_tasks_of


def bank(
    run: RunFolder,
    /,
    data: Annotated[str | None, by_default("the path stored in the run")] = None,
    frames: bool = False,
    device: Device = "auto",
    task: OwnTasks = (),
) -> None:
    """Add the bank of training latents (for novelty) and demonstrations (for `--start retrieval`) to a run.

    Training already does both, `atlas import` the first. Use it for runs of older versions, or after deleting
    bank.safetensors or demonstrations.safetensors:

        atlas bank runs/tworoom-atlas-demo

    It also stores the training states that `atlas eval` needs to split episodes into ID and OOD, and the action
    bounds that plans are clipped to.

    Args:
        run: Run folder.
        data: The dataset the run was trained on.
        frames: Also store small images of the bank's frames (frames.webp), with which `atlas play` and
            `atlas plan --film` show imagined futures on machines without the dataset.
        device: Where to compute; auto takes CUDA, then MPS, then the CPU.
        task: Your own task as module:Class, if the run was trained on one.
    """
    from atlas_wm.runs.shipped import working_copy

    run = working_copy(run)
    import_tasks_of([run], task)
    from atlas_wm.train.bank import write_bank

    print(write_bank(run, data, device, frames))
