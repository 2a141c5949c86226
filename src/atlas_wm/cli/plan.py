"""The command that plans, and the flags that all planning has. Arguments only."""

import json
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from atlas_wm.cli.arguments import RunFolder
from atlas_wm.config import PlanConfig
from atlas_wm.errors import UserError


@dataclass(frozen=True)
class PlanFlags:
    iterations: int | None = None
    """CEM iterations [default: the run's]."""
    candidates: int | None = None
    """CEM candidates [default: the run's]."""
    elites: int | None = None
    """Best candidates that the next ones are drawn around [default: the run's]."""
    replan_every: int | None = None
    """Blocks of actions executed before planning again [default: the run's; 5, the whole plan, in the paper]."""
    rule: Literal["terminal", "nearest"] | None = None
    """terminal: a plan costs what its end is away from the goal (the paper). nearest: what its nearest step is
    away, and it begins with what the last plan left over; for --replan-every 1 or 2 [default: the run's]."""
    candidate_chunk: int | None = None
    """Most candidates rolled out at once; bounds memory [default: the run's]. Fewer are taken where memory ends."""
    clip_actions: bool | None = None
    """Clip the actions of plans to the action bounds of the run [default: the run's; False in the paper recipe]."""
    precision: Literal["auto", "bf16", "float32"] = "auto"
    """Of the products while candidates are compared; auto: bf16 on a CUDA device, float32 elsewhere."""
    plain: bool = False
    """No captured graphs, kernels or kept work: the search as it is written, in float32."""

    def applied_to(self, plan: PlanConfig) -> PlanConfig:
        changes: dict[str, Any] = {
            "iterations": self.iterations,
            "candidates": self.candidates,
            "elites": self.elites,
            "execute": self.replan_every,
            "rule": self.rule,
            "candidate_chunk": self.candidate_chunk,
            "clip_actions": self.clip_actions,
        }
        if self.elites is None and self.candidates is not None and 2 <= self.candidates < plan.elites:
            same_share = max(2, round(self.candidates * plan.elites / plan.candidates))
            raise UserError(
                f"--candidates {self.candidates} are fewer than the run's {plan.elites} elites: add --elites "
                f"{same_share}, about the run's share of {plan.elites} in {plan.candidates}"
            )
        return replace(plan, **{k: v for k, v in changes.items() if v is not None})


THE_RUNS_OWN = PlanFlags()
PLAN_FLAGS = {  # what the user calls a setting, by the name that errors use
    f"plan.{ {'replan_every': 'execute'}.get(flag.name, flag.name) }": f"--{flag.name.replace('_', '-')}"
    for flag in fields(PlanFlags)
}


def plan(
    run: RunFolder,
    /,
    frame: Path,
    goal: Path,
    seed: int = 0,
    device: str = "auto",
    weights: str | None = None,
    search: Annotated[PlanFlags, arg(name="")] = THE_RUNS_OWN,
) -> None:
    """Plan from one image to another; prints the actions as JSON, in the environment's units.

    With them come the costs; how novel the frame, the goal and the imagined end are beside training frames: 50 is
    usual, 100 is unlike any of them; the seconds it took, and the most memory in bytes.

    Args:
        run: Run folder.
        frame: Image of the current state.
        goal: Image of the goal.
        seed: Seed of the search.
        device: auto, cpu, cuda, cuda:N or mps.
        weights: Other weights of the run than the final ones: best (validation), or step-2000 if train.save_every
            saved them. Novelty is measured with the final weights only.
        search: How to search.
    """
    from atlas_wm.images import read_image
    from atlas_wm.parallel.devices import peak_memory, pick_device
    from atlas_wm.plan.planner import Planner, dtype_of
    from atlas_wm.runs.model import load_model

    model = load_model(run, pick_device(device), weights=weights)
    assert model.run is not None
    config = search.applied_to(model.run.config.plan)
    planner = Planner(model, config, plain=search.plain, dtype=dtype_of(search.precision))
    result = planner.plan(read_image(frame), read_image(goal), seed=seed)
    answer: dict[str, Any] = {
        "actions": result.actions.tolist(),
        "cost": result.cost,
        "start_cost": result.start_cost,
    }
    answer["novelty"] = result.novelty and result.novelty._asdict()
    print(json.dumps({**answer, "seconds": planner.seconds, "peak_memory": peak_memory(planner.device)}))
    if result.novelty is None and weights is None:
        print(f"{run} has no bank of training frames for novelty: `atlas bank {run}` makes one", file=sys.stderr)
