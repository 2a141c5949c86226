"""Closed-loop episodes in the real environment: plan, execute, plan again."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from atlas_wm.data.dataset import EpisodeData
from atlas_wm.evaluate.env_pool import StageProcesses
from atlas_wm.evaluate.stage import Ending, Stage, Start
from atlas_wm.plan.planner import Planner
from atlas_wm.rng import stream
from atlas_wm.runs.results import EpisodeRecord


@dataclass
class Episode:
    """One episode as a policy sees it. The pictures, (3, S, S) uint8, are there if the policy looks."""

    row: int
    frame: Any = None
    goal: Any = None
    plans: int = 0
    rest: np.ndarray | None = None  # what the last plan left over
    ending: Ending | None = None


def record_of(data: EpisodeData, row: int, offset: int, ending: Ending, plans: int) -> EpisodeRecord:
    """What happened in the episode that began in a row of the dataset."""
    (episode,), (start,) = data.places(np.array([row]))
    return EpisodeRecord(
        row=row,
        episode=int(episode),
        start=int(start),
        solved_at_start=data.task.solved(data.states[row], data.states[row + offset]),
        success=ending.success,
        steps=ending.steps,
        final_distance=ending.final_distance,
        last_states=ending.last_states.tolist(),
        plans=plans,
        error=ending.error,
    )


# Actions to execute for each episode, (n, A) in the environment's units.
Policy = Callable[[Sequence[Episode]], list[np.ndarray]]


def planning_policy(planner: Planner, seed: int) -> Policy:
    def act(episodes: Sequence[Episode]) -> list[np.ndarray]:
        frames = torch.from_numpy(np.stack([e.frame for e in episodes]))
        goals = torch.stack([e.goal for e in episodes])
        streams = [stream(seed, e.row, e.plans) for e in episodes]
        plans = planner.plan_batch(frames, goals, streams, [e.rest for e in episodes])
        for episode, plan in zip(episodes, plans, strict=True):
            episode.rest = plan.rest
        return [plan.actions for plan in plans]

    return act


def random_policy(space: Any, seed: int, length: int = 25) -> Policy:
    """Uniform actions over the action space: the floor."""

    def act(episodes: Sequence[Episode]) -> list[np.ndarray]:
        rngs = [np.random.default_rng([seed, e.row, e.plans, 1]) for e in episodes]
        return [rng.uniform(space.low, space.high, (length, *space.shape)) for rng in rngs]

    return act


def replay_policy(data: EpisodeData, length: int = 25) -> Policy:
    """The actions of the demonstration: the ceiling, where a reset restores the whole state. Good for as many steps
    as there are rows from the start to the goal."""

    def act(episodes: Sequence[Episode]) -> list[np.ndarray]:
        starts = [e.row + length * e.plans for e in episodes]
        return [data.actions[start : start + length] for start in starts]

    return act


def run_episodes(
    stages: Sequence[Stage | StageProcesses],
    data: EpisodeData,
    policy: Policy,
    rows: Sequence[int],
    offset: int,
    budget: int,
    *,
    look: bool = True,
    films: Collection[int] = (),
) -> tuple[list[EpisodeRecord], dict[int, np.ndarray]]:
    """Run an episode from each row towards the row ``offset`` later → records, and films by row.

    The episodes are dealt out to the stages. Those of one stage that are under way plan together, then act; while
    one stage's episodes are planned for, the others' act. ``look``: whether the policy needs pictures. ``films``:
    rows to film. Episodes that were lost with the process of their stage are run again, each alone.
    """
    episodes = [Episode(row) for row in rows]
    parts = [(stage, episodes[i :: len(stages)]) for i, stage in enumerate(stages)]
    for stage, mine in parts:
        begin = data.start_states(np.array([e.row for e in mine], np.int64))
        goal_states = [data.states[e.row + offset] for e in mine]
        starts = [Start(s, g, e.row in films) for s, g, e in zip(begin, goal_states, mine, strict=True)]
        stage.ask("reset", dict(enumerate(starts)), budget, look)
    if look:
        goals = data.frames_of(np.asarray(rows) + offset)  # while the stages reset
        for episode, goal in zip(episodes, goals, strict=True):
            episode.goal = goal
    while parts:
        parts = [(stage, mine) for stage, mine in parts if _plan_and_act(stage, mine, policy)]
    films_by_row: dict[int, np.ndarray] = {}
    records = []
    for e in episodes:
        assert e.ending is not None
        if e.ending.lost and len(episodes) > 1:  # perhaps for what another one did
            alone, film = run_episodes(stages, data, policy, [e.row], offset, budget, look=look, films=films)
            records += alone
            films_by_row |= film
            continue
        records.append(record_of(data, e.row, offset, e.ending, e.plans))
        if e.ending.film is not None:
            films_by_row[e.row] = e.ending.film
    return records, films_by_row


def _plan_and_act(stage: Stage | StageProcesses, episodes: list[Episode], policy: Policy) -> bool:
    """Take in what is seen and have the episodes that are under way act on new plans; False if none is."""
    under_way: dict[int, Episode] = {}
    for number, seen in stage.answer().items():
        if isinstance(seen, Ending):
            episodes[number].ending = seen
        else:
            episodes[number].frame = seen
            under_way[number] = episodes[number]
    if under_way:
        actions = policy(list(under_way.values()))
        for episode in under_way.values():
            episode.plans += 1
        stage.ask("act", dict(zip(under_way, actions, strict=True)))
    return bool(under_way)
