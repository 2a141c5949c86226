"""``atlas head``"""

from typing import Annotated

from atlas_wm.cli.arguments import Device, OwnTasks, RunFolder, by_default, import_tasks_of
from atlas_wm.errors import UserError


def head(
    run: RunFolder,
    /,
    data: Annotated[str | None, by_default("the path stored in the run")] = None,
    frames: int = 20_000,
    steps: int = 3000,
    seed: int = 0,
    device: Device = "auto",
    task: OwnTasks = (),
) -> None:
    """Fit the temporal head of a run, so that plans can minimise the time to the goal (`--cost temporal`).

    The latent distance to a goal behind a wall is small, the way there is long. The head estimates how many action
    chunks lie between two latents. It learns this from the order of frames in the training episodes, and from what
    the model imagines of them; the model stays as it is. Near the goal the latent distance is finer, so the cost is
    the mean of both. It takes about a minute for the demo on a CPU:

        atlas head runs/tworoom-atlas-demo
        atlas eval runs/tworoom-atlas-demo --part heldout --cost temporal --replan-every 1

    Writes RUN/temporal_head.safetensors, for the final weights of the run. The paper's bounds on regret are for
    latent distances and do not cover plans with this cost.

    Args:
        run: Run folder.
        data: The dataset the run was trained on.
        frames: Frames of training episodes to learn from, at most, one action chunk apart.
        steps: Updates of the head.
        seed: Seed of the head's weights and of the pairs it is fitted to.
        device: Where to compute; auto takes CUDA, then MPS, then the CPU.
        task: Your own task as module:Class, if the run was trained on one.
    """
    if frames < 2 or steps < 1:
        raise UserError("--frames must be at least 2 and --steps at least 1")
    from atlas_wm.plan.planner import check_seed
    from atlas_wm.runs.shipped import working_copy

    check_seed(seed)
    run = working_copy(run)
    import_tasks_of([run], task)
    from atlas_wm.cli.progress import Bar
    from atlas_wm.train.temporal_head import write_temporal_head

    with Bar(f"encode frames of {run.name}", "frames") as bar:

        def show_step(done: int, total: int) -> None:
            if done == 1:
                bar.rename(f"fit the head of {run.name}", "steps")
            bar.update(done, total)

        written = write_temporal_head(run, data, device, seed, frames, steps, bar.update, show_step)
    print(written)
