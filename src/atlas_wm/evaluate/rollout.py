"""Closed-loop episodes in the real environment: plan, execute, plan again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from atlas_wm.data.dataset import EpisodeData
from atlas_wm.frames import frame_to_tensor
from atlas_wm.plan.planner import Planner
from atlas_wm.streams import stream
from atlas_wm.tasks import Task

FILM_EVERY = 5  # steps between two frames of a film


@dataclass
class Episode:
    """One episode under way: from a dataset row towards the row ``offset`` later."""

    row: int
    goal_row: int
    env: Any
    film: list[np.ndarray] | None = None
    steps: int = 0
    plans: int = 0
    success: bool = False


@dataclass(frozen=True)
class EpisodeRecord:
    """What happened in one episode."""

    row: int  # dataset row of the start; the goal is ``offset`` rows later
    episode: int  # dataset episode
    start: int  # row within that episode
    solved_at_start: bool
    success: bool
    steps: int  # to success, or the whole budget
    final_distance: float
    plans: int


# Actions to execute for each episode, (n, A) in the environment's units.
Policy = Callable[[Sequence[Episode]], list[np.ndarray]]


def planning_policy(planner: Planner, data: EpisodeData, seed: int) -> Policy:
    def act(episodes: Sequence[Episode]) -> list[np.ndarray]:
        frames = torch.cat([planner.prepare(frame_to_tensor(e.env.render())) for e in episodes])
        goals = torch.cat([data.frame(e.goal_row) for e in episodes])
        streams = [stream(seed, e.row, e.plans) for e in episodes]
        return [plan.actions for plan in planner.plan_batch(frames, goals, streams)]

    return act


def random_policy(seed: int, length: int = 25) -> Policy:
    """Uniform actions over the action space: the floor."""

    def act(episodes: Sequence[Episode]) -> list[np.ndarray]:
        spaces = [e.env.action_space for e in episodes]
        rngs = [np.random.default_rng([seed, e.row, e.plans, 1]) for e in episodes]
        return [rng.uniform(s.low, s.high, (length, *s.shape)) for s, rng in zip(spaces, rngs, strict=True)]

    return act


def run_episodes(
    task: Task,
    data: EpisodeData,
    policy: Policy,
    episodes: Sequence[Episode],
    budget: int,
) -> list[EpisodeRecord]:
    """Run episodes side by side: those still under way plan together, then act.

    Success is what the environment reports at any step within the budget. A film gets a frame every
    ``FILM_EVERY`` steps, the first and the last included, and the goal at its end.
    """
    for e in episodes:
        task.reset(e.env, data.states[e.row], data.states[e.goal_row])
        if e.film is not None:
            e.film.append(e.env.render())
    while under_way := [e for e in episodes if not e.success and e.steps < budget]:
        for e, actions in zip(under_way, policy(under_way), strict=True):
            e.plans += 1
            for action in actions[: budget - e.steps]:
                _, _, terminated, _, _ = e.env.step(np.asarray(action, np.float32))
                e.success = task.reached(e.env, data.states[e.goal_row], bool(terminated))
                e.steps += 1
                if e.film is not None and (e.steps % FILM_EVERY == 0 or e.success):
                    e.film.append(e.env.render())
                if e.success:
                    break
    return [_record(task, data, e) for e in episodes]


def _record(task: Task, data: EpisodeData, e: Episode) -> EpisodeRecord:
    start, goal = data.states[e.row], data.states[e.goal_row]
    final_distance = task.distance(task.state(e.env), goal)
    if e.film is not None:
        task.reset(e.env, goal, start)
        e.film.append(e.env.render())
    number = int(np.searchsorted(data.offsets, e.row, side="right") - 1)
    return EpisodeRecord(
        row=e.row,
        episode=number,
        start=int(e.row - data.offsets[number]),
        solved_at_start=task.solved(start, goal),
        success=bool(e.success),
        steps=e.steps,
        final_distance=final_distance,
        plans=e.plans,
    )
