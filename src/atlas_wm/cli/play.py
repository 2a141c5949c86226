"""``atlas play``"""

from dataclasses import fields
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from atlas_wm.cli.arguments import Device, OwnTasks, by_default, import_tasks_of
from atlas_wm.cli.plan import PLAN_FLAGS, THE_RUNS_OWN, PlanFlags
from atlas_wm.errors import UserError
from atlas_wm.serve.config import Address

if TYPE_CHECKING:
    from collections.abc import Callable

    from atlas_wm.play.session import Session

PLAY_FLAGS = PLAN_FLAGS | {f"serve.{f.name}": f"--{f.name}" for f in fields(Address)}
DEFAULT = Address(port=8765)
MOST_RUNS = 2
Runs = Positional[Annotated[tuple[Path, ...], arg(metavar="[RUN [RUN]]", help_behavior_hint="(default: demo)")]]


def play(
    runs: Runs = (Path("demo"),),
    /,
    browser: bool = True,
    data: Annotated[str | None, by_default("the path stored in the run")] = None,
    address: Annotated[Address, arg(name="")] = DEFAULT,
    device: Device = "auto",
    task: OwnTasks = (),
    search: Annotated[PlanFlags, arg(name="")] = THE_RUNS_OWN,
) -> None:
    """Set a goal with the mouse and watch a model plan and act, in the browser.

    Without a run it takes the TwoRoom model that comes with the package:

        atlas play

    Your own model, or two models side by side on the same goal:

        atlas play runs/tworoom-atlas-demo
        atlas play runs/demo/atlas runs/demo/lewm

    The page shows the environment, the search, what the model imagines, and how novel the scene is. Ctrl-C stops
    it. It needs `pip install "atlas-wm[envs,data,serve]"`. From another machine, through ssh:

        atlas play --no-browser        # there
        ssh -L 8765:127.0.0.1:8765 HOST  # here, then open http://127.0.0.1:8765/

    Args:
        runs: One or two run folders of the same task.
        browser: Open the page in the browser of this machine.
        data: The dataset the runs were trained on, whose frames can be goals.
        address: Where the page is served.
        device: Where to plan; auto takes CUDA, then MPS, then the CPU.
        task: Your own task as module:Class, if the runs were trained on one.
        search: Settings of the planner.
    """
    if not 1 <= len(runs) <= MOST_RUNS:
        raise UserError(f"atlas play shows one or two runs, not {len(runs)}: leave some out")
    from atlas_wm.play.app import PlayServer

    def load() -> "Callable[[], Session]":
        import torch

        from atlas_wm.play.load import load_session

        torch.set_num_threads(max(1, torch.get_num_threads() - 1))  # a core for the browser
        import_tasks_of(runs, task)
        return load_session(runs, data, device, search.applied_to)

    def opened(url: str) -> None:
        print(f"{url}  (Ctrl-C stops it)", flush=True)
        if browser:
            import webbrowser

            Thread(target=webbrowser.open, args=(url,), daemon=True).start()  # some browsers return when they close

    PlayServer(address, load, opened).run()
