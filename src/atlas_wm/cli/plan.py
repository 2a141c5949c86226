"""``atlas plan``, and the flags of the planner that ``atlas eval`` shares"""

import json
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from atlas_wm.cli.arguments import Device, OwnTasks, RunFolder, by_default, import_tasks_of
from atlas_wm.config import PlanConfig
from atlas_wm.errors import UserError
from atlas_wm.plugins import import_named
from atlas_wm.settings import own_names

OF_THE_RUN = by_default("the run's", "INT")


@dataclass(frozen=True)
class PlanFlags:
    iterations: Annotated[int | None, OF_THE_RUN] = None
    """CEM iterations."""
    candidates: Annotated[int | None, OF_THE_RUN] = None
    """Action sequences sampled per CEM iteration."""
    elites: Annotated[int | None, OF_THE_RUN] = None
    """Best candidates, to which the next sampling distribution is fitted."""
    replan_every: Annotated[int | None, by_default("the run's; 5 in the paper, the whole plan", "INT")] = None
    """Action chunks to execute before planning again."""
    cost: Annotated[str | None, by_default("the run's", "{terminal,nearest,temporal,MODULE:CLASS}")] = None
    """terminal: the distance of the last latent of a plan to the goal (the paper). nearest: the distance of its
    nearest latent, and a search starts from the rest of the last plan; use it with --replan-every 1 or 2. temporal:
    as nearest, with the model steps to the goal that a head (`atlas head RUN` adds it) and the latent distance
    estimate: for goals far away. Or your own Cost as module:Class (docs/guides/own-model.md)."""
    start: Annotated[Literal["zero", "retrieval"] | None, by_default("the run's", "{zero,retrieval}")] = None
    """zero: searches start at zero (the paper), or with --cost nearest or temporal from the rest of the last plan.
    retrieval: from that or, where it costs less, from a training demonstration that began near the frame and came
    near the goal (docs/guides/planning.md)."""
    solver: Annotated[str | None, by_default("the run's", "{cem,MODULE:CLASS}")] = None
    """cem, or your own Solver as module:Class (docs/guides/own-model.md)."""
    options: Annotated[dict[str, int | float | str] | None, by_default("the run's", "NAME VALUE")] = None
    """Settings of your own cost and solver, as NAME VALUE pairs."""
    candidate_chunk: Annotated[int | None, OF_THE_RUN] = None
    """Candidates to roll out at once; bounds memory. On a GPU it is halved when memory runs out."""
    clip_actions: Annotated[bool | None, by_default("the run's; False in the paper recipe", "{True,False}")] = None
    """Clip planned actions to the action bounds stored in the run."""
    precision: Literal["auto", "bf16", "float32"] = "auto"
    """Precision of matrix products in the search; auto: bf16 on a CUDA device, float32 elsewhere."""
    plain: bool = False
    """Plan with the reference implementation in float32: no CUDA graphs, no kernels, no cache of keys and
    values."""

    def applied_to(self, plan: PlanConfig) -> PlanConfig:
        changes: dict[str, Any] = {
            "iterations": self.iterations,
            "candidates": self.candidates,
            "elites": self.elites,
            "execute": self.replan_every,
            "cost": self.cost,
            "start": self.start,
            "solver": self.solver,
            "options": self.options,
            "candidate_chunk": self.candidate_chunk,
            "clip_actions": self.clip_actions,
        }
        if self.elites is None and self.candidates is not None and 2 <= self.candidates < plan.elites:
            same_share = max(2, round(self.candidates * plan.elites / plan.candidates))
            raise UserError(
                f"--candidates {self.candidates} are fewer than the run's {plan.elites} elites: add --elites "
                f"{same_share}, about the run's share of {plan.elites} in {plan.candidates}"
            )
        if not own_names(cost=self.cost or plan.cost, solver=self.solver or plan.solver):
            changes["options"] = self.options or {}  # those of the run are for what the flags replace
        applied = replace(plan, **{k: v for k, v in changes.items() if v is not None})
        for part, name in applied.own_parts.items():
            if name in (self.cost, self.solver):  # named by the user, so imported; a name in the run's file is not
                import_named(part, name)
        return applied


THE_RUNS_OWN = PlanFlags()
PLAN_FLAGS = {  # what the user calls a setting, by the name that errors use
    f"plan.{ {'replan_every': 'execute'}.get(flag.name, flag.name) }": f"--{flag.name.replace('_', '-')}"
    for flag in fields(PlanFlags)
}


def plan(
    run: RunFolder,
    /,
    frame: Path | None = None,
    goal: Path | None = None,
    row: int | None = None,
    offset: int = 25,
    film: Path | None = None,
    data: Annotated[str | None, by_default("the path stored in the run")] = None,
    seed: int = 0,
    device: Device = "auto",
    weights: str | None = None,
    task: OwnTasks = (),
    search: Annotated[PlanFlags, arg(name="")] = THE_RUNS_OWN,
) -> None:
    """Plan from an image of the current state to an image of the goal. Prints JSON.

    - actions: what to execute, in the environment's units
    - cost, start_cost: latent distance to the goal at the end of the plan, and now; in model steps with --cost
      temporal
    - remaining: the share of that distance that is left at the end
    - strayed: how far the imagined path leaves what was seen in training, in steps, at most 1
    - crossed: the share of what changed in the scene that lies on the imagined path
    - risk: 1 - (1 - remaining) (1 - strayed) (1 - crossed); high values predict failure
    - novelty: percentiles of the latents of frame, goal and predicted end, and of the images of frame and goal,
      among known frames. 50 is typical; do not trust a plan with one above 99.
    - seconds, peak_memory: planning time, and memory in bytes

        atlas plan runs/tworoom-atlas-demo --frame now.png --goal goal.png
        atlas plan demo --frame now.png --goal goal.png

    --film writes an animation of what the model imagines. There is no decoder: for each imagined latent it shows
    the nearest training frame and the distance from it (1: as near as training frames are to one another). With
    --row the start and the goal come from the dataset, the plan is executed in the environment, and the film shows
    the real future below the imagined one:

        atlas plan demo --frame now.png --goal goal.png --film imagined.gif
        atlas plan runs/tworoom-atlas-demo --row 1000 --offset 25 --film both.gif

    Args:
        run: Run folder, or demo: a TwoRoom model that comes with the package.
        frame: Image of the current state.
        goal: Image of the goal.
        row: Start from this row of the dataset, in place of --frame and --goal.
        offset: With --row: rows from the start to the goal.
        film: Write an animation of the imagined future (GIF).
        data: The dataset of --row and of --film.
        seed: Seed of the search.
        device: Where to plan; auto takes CUDA, then MPS, then the CPU.
        weights: Other weights of the run than the final ones: best (validation), or step-2000 if train.save_every
            saved them. Novelty and --film need the final weights.
        task: Your own task as module:Class, if the run was trained on one; for --row and --film.
        search: Settings of the planner.
    """
    if (row is None) != (frame is not None and goal is not None) or (row is not None and (frame or goal)):
        raise UserError("name the start and the goal: --frame now.png --goal goal.png, or --row of the dataset")
    if film is not None and weights is not None:
        raise UserError("--film needs the final weights, to which the bank of the run belongs: leave --weights out")
    if film is not None and not film.parent.is_dir():
        raise UserError(f"--film {film}: there is no folder {film.parent}")
    import_tasks_of([run], task)
    from atlas_wm.images import read_image
    from atlas_wm.parallel.devices import peak_memory, pick_device
    from atlas_wm.plan.planner import Planner, check_seed, dtype_of
    from atlas_wm.runs.model import load_model

    check_seed(seed)
    model = load_model(run, pick_device(device), weights=weights)
    assert model.run is not None
    config = search.applied_to(model.run.config.plan)
    planner = Planner(model, config, plain=search.plain, dtype=dtype_of(search.precision))
    if row is not None:
        from atlas_wm.evaluate.imagine import film_of_row

        result = film_of_row(planner, run, data, row, offset, seed, film)
    else:
        assert frame is not None and goal is not None
        images = read_image(frame), read_image(goal)
        result = planner.plan(*images, seed=seed)
        if film is not None:
            from atlas_wm.evaluate.imagine import film_of_images

            film_of_images(planner, run, data, result, *images, film)
    answer: dict[str, Any] = {
        "actions": result.actions.tolist(),
        "cost": result.cost,
        "start_cost": result.start_cost,
        "remaining": result.remaining,
        "strayed": result.strayed,
        "crossed": result.crossed,
        "risk": result.risk,
    }
    answer["novelty"] = result.novelty and result.novelty._asdict()
    print(json.dumps({**answer, "seconds": planner.seconds, "peak_memory": peak_memory(planner.device)}))
    if film is not None:
        print(f"film {film}", file=sys.stderr)
    if result.novelty is None and weights is None:
        print(f"{run} has no bank, so novelty is unknown: run `atlas bank {run}`", file=sys.stderr)
