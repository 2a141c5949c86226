"""The oracle: the planner's search with the true environment in place of the model.

It shows what the planner reaches with a perfect model and the task's own distance. It is slow: every candidate is
simulated."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atlas_wm.config import PlanConfig
from atlas_wm.errors import UserError
from atlas_wm.models.world_model import WorldModel
from atlas_wm.parallel.workers import startup_limit, time_limit
from atlas_wm.plan.bounds import clip_limits
from atlas_wm.plan.cem import make_solver
from atlas_wm.plan.costs import COSTS, candidate_costs, make_cost, starts
from atlas_wm.tasks import Task
from atlas_wm.tasks.variation import NO_VARIATION, Variation, make_varied_env

CANDIDATES, ITERATIONS = 100, 10  # at most, unless others are asked for
EPISODES = 20  # for each seed


def oracle_plan(plan: PlanConfig, candidates: int | None = None, iterations: int | None = None) -> PlanConfig:
    """The settings of the oracle's search: the planner's, with fewer candidates and iterations and the same share
    of elites; it retrieves nothing."""
    if plan.solver != "cem" or plan.cost not in COSTS:
        own = ", ".join(f"{part} {name}" for part, name in plan.own_parts.items())
        raise UserError(
            f"--policy oracle knows --solver cem and the costs {', '.join(COSTS)}, not your own {own}: "
            f"leave oracle out, or pass --solver cem --cost terminal"
        )
    candidates = min(plan.candidates, CANDIDATES) if candidates is None else candidates
    iterations = min(plan.iterations, ITERATIONS) if iterations is None else iterations
    if candidates < 2 or iterations < 1:
        raise UserError("--oracle-candidates must be at least 2 and --oracle-iterations at least 1")
    elites = min(candidates, max(2, round(candidates * plan.elites / plan.candidates)))
    cost = "nearest" if plan.cost == "temporal" else plan.cost  # the distance is the task's own
    return replace(plan, cost=cost, start="zero", candidates=candidates, iterations=iterations, elites=elites)


class Simulation:
    """An environment with the verbs of a world model; a latent is a state."""

    def __init__(self, task: Task, model: WorldModel, timeout: float, variation: Variation):
        self.task, self.timeout = task, timeout
        self.normalizer, self.action_size = model.normalizer, model.action_size
        with time_limit(startup_limit(timeout)):
            self.env: Any = make_varied_env(task, variation)

    def start(self, state: np.ndarray, goal: np.ndarray) -> None:
        """From where and to which goal the next rollouts lead. state: a full one."""
        self.state, self.goal = state, goal
        with time_limit(self.timeout):
            self.task.reset(self.env, state, goal)

    def rollout(self, z: Tensor, actions: Tensor) -> Tensor:
        """actions: (1, S, H, frameskip·A) standardised → the states after each chunk: (1, S, H, s) float64.

        z is not read: :meth:`start` sets the start. A rollout continues after the goal is reached, as the model's.
        """
        raw = self.normalizer.invert(actions[0].unflatten(-1, (-1, self.action_size))).numpy()
        states = []
        for candidate in raw:
            with time_limit(self.timeout):
                self.task.rewind(self.env, self.state, self.goal)
                for chunk in candidate:
                    for action in chunk:
                        self.env.step(action)
                    states.append(np.array(self.task.state(self.env), np.float64))
        return torch.from_numpy(np.stack(states)).unflatten(0, raw.shape[:2])[None]

    def terminal(self, z: Tensor, actions: Tensor) -> Tensor:
        return self.rollout(z, actions)[:, :, -1]

    def distance(self, states: Tensor, goal: Tensor) -> Tensor:
        """(…, s) → (…): what the task minimises. goal is not read, as z above."""
        flat = [self.task.cost_to_goal(self.env, state, self.goal) for state in states.flatten(0, -2).numpy()]
        return torch.tensor(flat, dtype=torch.float64).view(states.shape[:-1])

    def close(self) -> None:
        self.env.close()


class Oracle:
    """Plans for one episode at a time from its state."""

    def __init__(
        self,
        task: Task,
        model: WorldModel,
        config: PlanConfig,
        timeout: float = 0.0,
        variation: Variation = NO_VARIATION,
    ):
        self.model, self.config = model, config
        self.cost, self.solver = make_cost(config, model), make_solver(config)
        self.simulation = Simulation(task, model, timeout, variation)
        self.seconds = 0.0  # spent planning

    def plan(
        self, state: np.ndarray, goal: np.ndarray, rng: torch.Generator, rest: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The actions to execute, (n, A) in the environment's units, and the rest of the plan (Plan.rest)."""
        started, model, there = time.perf_counter(), self.model, self.simulation
        there.start(state, goal)
        nothing = torch.empty(1, 0)  # the simulation has its start and goal

        def costs(candidates: Tensor) -> Tensor:
            return candidate_costs(self.cost, there, there, nothing, candidates, nothing)  # type: ignore[arg-type]

        start = starts(self.cost, model.config.frameskip * model.action_size, [rest])
        mean, limits = self.solver(costs, start, [rng]).mean, clip_limits(self.config, model)
        if limits is not None:
            mean = mean.clamp(*limits)
        chunks, rest = mean[0, : self.config.execute], mean[0, self.config.execute :].numpy()
        raw = model.normalizer.invert(chunks.unflatten(-1, (-1, model.action_size)).flatten(0, 1))
        if self.config.clip_actions:
            raw = model.normalizer.clip(raw)
        self.seconds += time.perf_counter() - started
        return raw.numpy(), rest

    def close(self) -> None:
        self.simulation.close()
