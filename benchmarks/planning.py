"""Milliseconds a plan: stable-worldmodel's LeWM and CEMSolver, and our planner with the same weights and images.

    python benchmarks/planning.py [--device cpu] [--episodes 1] [--iterations 2]

On a GPU also the share of the arithmetic floor: the multiplications that a plan cannot do without, at the measured
rate of a large bf16 product.
"""

import argparse
import contextlib
import io
import warnings
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from pairs import PEAK, lewm_pair, milliseconds, normalised, their_config
from rich.console import Console
from rich.table import Table
from torch import Tensor

from atlas_wm.config import ModelConfig, PlanConfig
from atlas_wm.parallel.devices import pick_device
from atlas_wm.plan.planner import Plan, Planner
from atlas_wm.rng import make_rng

THEIRS_AT_MOST = 8  # episodes that theirs is timed with: it plans one after the other


def plan_flop(model: ModelConfig, plan: PlanConfig, action_block: int) -> float:
    """Of the predictor, with keys and values kept while the window grows: what no plan can do without."""
    p, inner = model.predictor, model.predictor.heads * model.predictor.head_dim
    per_token = 2 * p.width * (4 * inner + 2 * p.mlp)  # a block: q, k, v, out; up, down
    growing = min(plan.horizon, model.history)
    sliding = plan.horizon - growing
    last = 2 * p.width * (2 * inner * model.history + 2 * inner + 2 * p.mlp)  # k, v of all, the rest of one token
    blocks = growing * p.depth * per_token + sliding * ((p.depth - 1) * model.history * per_token + last)
    actions = action_block * model.action_hidden + model.action_hidden * p.width + 6 * p.depth * p.width**2
    head = model.hidden * (p.width + model.latent)
    return plan.candidates * plan.iterations * (blocks + plan.horizon * 2 * (actions + head))


def their_solver(model: Any, plan: PlanConfig, episodes: int, device: torch.device) -> Any:
    from stable_worldmodel.policy import PlanConfig as TheirPlanConfig
    from stable_worldmodel.solver import CEMSolver

    solver = CEMSolver(
        model,
        batch_size=1,  # LeWM.get_cost takes no more: it does not broadcast the goals of several episodes
        num_samples=plan.candidates,
        n_steps=plan.iterations,
        topk=plan.elites,
        device=device,
    )
    space = gym.spaces.Box(-1, 1, (episodes, 2), dtype=np.float32)
    solver.configure(
        action_space=space, n_envs=episodes, config=TheirPlanConfig(plan.horizon, plan.execute, action_block=5)
    )
    return solver


def compare(
    episodes: int, plan: PlanConfig, device: torch.device, rounds: int
) -> tuple[float, float, float, float]:
    """Milliseconds a plan of theirs and ours, and mean costs of what they found, theirs for the first few."""
    theirs, ours = lewm_pair(device)
    frames, goals = torch.randint(0, 256, (2, episodes, 3, 224, 224), dtype=torch.uint8, generator=make_rng(1))
    few = min(episodes, THEIRS_AT_MOST)
    planner, solver = Planner(ours, plan), their_solver(theirs, plan, few, device)
    found: dict[str, Any] = {}

    def run_theirs() -> None:
        pixels: dict[str, Tensor] = {
            "pixels": normalised(frames[:few])[:, None],
            "goal": normalised(goals[:few])[:, None],
        }
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its own time
            found["theirs"] = solver.solve({**pixels, "action": torch.zeros(few, 1, 10)})["costs"]

    def run_ours() -> None:
        plans: list[Plan] = planner.plan_batch(frames, goals, [make_rng(0, e) for e in range(episodes)])
        found["ours"] = [p.cost for p in plans]

    before, after = milliseconds(device, rounds, run_theirs, run_ours)
    return before / few, after / episodes, float(np.mean(found["theirs"])), float(np.mean(found["ours"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--episodes", type=int, nargs="+", help="planned together [default: 1; on a GPU 1 8 50 200]"
    )
    parser.add_argument("--iterations", type=int, help="[default: 4 on a CPU, 30 on a GPU]")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    device = pick_device(arguments.device)
    gpu = device.type == "cuda"
    plan = replace(PlanConfig(), iterations=arguments.iterations or (30 if gpu else 4))
    flop = plan_flop(their_config().model, plan, action_block=10)
    table = Table(
        "episodes", "stable-worldmodel, ms/plan", "atlas-wm, ms/plan", "ratio", "share of the floor", "costs"
    )
    for episodes in arguments.episodes or ([1, 8, 50, 200] if gpu else [1]):
        before, after, their_cost, our_cost = compare(episodes, plan, device, arguments.rounds)
        share = f"{100 * flop / PEAK / (after / 1e3):.0f} %" if gpu else "–"
        costs = f"{their_cost:.2f}, {our_cost:.2f}"
        table.add_row(str(episodes), f"{before:,.1f}", f"{after:,.1f}", f"{before / after:.2f}", share, costs)
    console = Console()
    console.print(table)
    settings = f"CEM {plan.candidates}×{plan.iterations}×{plan.horizon}, {flop / 1e12:.2f} TFLOP a plan"
    console.print(
        f"LeWM at the paper's size, {settings}, images to actions, {torch.get_num_threads()} threads, "
        f"median of {arguments.rounds} rounds on {device}"
    )


if __name__ == "__main__":
    main()
