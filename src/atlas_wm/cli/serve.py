"""``atlas serve``"""

from dataclasses import fields
from typing import Annotated

from tyro.conf import arg

from atlas_wm.cli.arguments import Device, RunFolder
from atlas_wm.cli.plan import PLAN_FLAGS, THE_RUNS_OWN, PlanFlags
from atlas_wm.serve.config import ServeConfig

DEFAULT = ServeConfig()
SERVE_FLAGS = PLAN_FLAGS | {f"serve.{f.name}": f"--{f.name.replace('_', '-')}" for f in fields(ServeConfig)}


def serve(
    run: RunFolder,
    /,
    server: Annotated[ServeConfig, arg(name="")] = DEFAULT,
    device: Device = "auto",
    search: Annotated[PlanFlags, arg(name="")] = THE_RUNS_OWN,
) -> None:
    """Plan for robots and other programs over the network.

    It needs `pip install ".[serve]"`, in a clone. Try it, then stop it with Ctrl-C:

        atlas serve runs/tworoom-atlas-demo
        curl -F frame=@now.png -F goal=@goal.png http://127.0.0.1:8000/plan

    From Python use atlas_wm.client.RemotePlanner("ws://127.0.0.1:8000"), which needs no torch
    (docs/guides/serve.md).

    Replan after every action chunk, from the rest of the last plan:

        atlas serve runs/tworoom-atlas-demo --cost nearest --replan-every 1

    To accept connections from other machines it needs a token:

        ATLAS_TOKEN=$(openssl rand -hex 16) atlas serve runs/tworoom-atlas-demo --host 0.0.0.0

    SIGTERM and Ctrl-C stop it after the requests that it has received are answered.

    Args:
        run: Run folder, or demo: a TwoRoom model that comes with the package.
        server: Settings of the server.
        device: Where to plan; auto takes CUDA, then MPS, then the CPU.
        search: Settings of the planner.
    """
    from atlas_wm.parallel.devices import pick_device
    from atlas_wm.plan.planner import Planner, dtype_of
    from atlas_wm.runs.model import load_model
    from atlas_wm.serve.server import PlanningServer

    model = load_model(run, pick_device(device))
    assert model.run is not None
    config = search.applied_to(model.run.config.plan)
    planner = Planner(model, config, plain=search.plain, dtype=dtype_of(search.precision))
    PlanningServer(planner, server, run).run()
