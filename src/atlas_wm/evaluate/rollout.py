"""Closed-loop episodes in the real environment: plan, execute, plan again."""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import numpy as np
import torch

from atlas_wm.data.dataset import EpisodeData
from atlas_wm.errors import UserError
from atlas_wm.evaluate.env_batch import Asked, EnvBatch, EpisodeEnd, EpisodeStart, Observe
from atlas_wm.evaluate.env_pool import EnvPool
from atlas_wm.evaluate.oracle import Oracle
from atlas_wm.normalizer import Normalizer
from atlas_wm.plan.planner import LatentNovelty, Novelty, Planner
from atlas_wm.plan.retrieval import NONE
from atlas_wm.rng import make_rng
from atlas_wm.runs.results import EpisodeRecord

RISK = ("remaining", "strayed", "crossed", "risk")


@dataclass
class Episode:
    """One episode as a policy sees it."""

    row: int
    observed: Any = None  # the current frame, (3, S, S) uint8, or state, if the policy needs it
    goal: Any = None  # the same of the goal
    plans: int = 0
    first: dict[str, float | None] = field(default_factory=dict)  # Plan.risk of the first plan, and its parts
    rest: np.ndarray | None = None  # actions of the last plan that were not executed
    ending: EpisodeEnd | None = None


def record_of(
    data: EpisodeData, row: int, offset: int, ending: EpisodeEnd, plans: int, **first: float | None
) -> EpisodeRecord:
    """The record of the episode that started in a row of the dataset. first: what its first plan said."""
    (episode,), (start,) = data.locate(np.array([row]))
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
        **first,
    )


# Actions to execute for each episode, (n, A) in the environment's units.
Policy = Callable[[Sequence[Episode]], list[np.ndarray]]


def planning_policy(
    planner: Planner,
    seed: int,
    on_novelty: Callable[[Novelty | LatentNovelty | None], None] = lambda novelty: None,
    left_out: Callable[[int], int] = lambda row: NONE,
) -> Policy:
    """left_out: as leave_out_own says."""

    def act(episodes: Sequence[Episode]) -> list[np.ndarray]:
        frames = torch.from_numpy(np.stack([e.observed for e in episodes]))
        goals = torch.stack([e.goal for e in episodes])
        rngs = [make_rng(seed, e.row, e.plans) for e in episodes]
        rests, without = [e.rest for e in episodes], [left_out(e.row) for e in episodes]
        plans = planner.plan_batch(frames, goals, rngs, rests, without)
        for episode, plan in zip(episodes, plans, strict=True):
            episode.rest = plan.rest
            if episode.plans == 0 and isfinite(plan.remaining):
                episode.first = {name: getattr(plan, name) for name in RISK}
            on_novelty(plan.novelty)
        return [plan.actions for plan in plans]

    return act


def oracle_policy(oracle: Oracle, seed: int) -> Policy:
    """With the noise of the planning policy, so that both compare the same first candidates."""

    def act(episodes: Sequence[Episode]) -> list[np.ndarray]:
        actions = []
        for e in episodes:
            mine, e.rest = oracle.plan(e.observed, e.goal, make_rng(seed, e.row, e.plans), e.rest)
            actions.append(mine)
        return actions

    return act


def random_policy(space: Any, seed: int, normalizer: Normalizer | None = None, length: int = 25) -> Policy:
    """Uniform actions over the action space: the floor. Where it has no bounds, within those of the normaliser."""
    bounds = np.array([getattr(space, name, np.nan) for name in ("low", "high")], np.float64)
    if normalizer is not None and normalizer.low is not None and bounds.shape == (2, normalizer.size):
        known = np.array([normalizer.low, normalizer.high], np.float64)
        bounds = np.where(np.isfinite(bounds), bounds, known)
    if not np.isfinite(bounds).all():
        raise UserError(f"the action space {space} is no box with bounds: leave random out of --policy")

    def act(episodes: Sequence[Episode]) -> list[np.ndarray]:
        rngs = [np.random.default_rng([seed, e.row, e.plans, 1]) for e in episodes]
        return [rng.uniform(bounds[0], bounds[1], (length, *space.shape)) for rng in rngs]

    return act


def replay_policy(data: EpisodeData, length: int = 25) -> Policy:
    """The actions of the demonstration: the ceiling, if a reset restores the whole state. Valid for as many steps
    as there are rows from start to goal."""

    def act(episodes: Sequence[Episode]) -> list[np.ndarray]:
        starts = [e.row + length * e.plans for e in episodes]
        return [data.actions[start : start + length] for start in starts]

    return act


class _Part:
    """The episodes of one env batch. When one is over, its slot starts the next, so that the plans of many episodes
    are made together until few are left."""

    def __init__(
        self, envs: EnvBatch | EnvPool, episodes: Sequence[Episode], starts: Sequence[EpisodeStart], slots: int
    ):
        self.envs, self.waiting = envs, deque(zip(episodes, starts, strict=True))
        self.running: dict[int, Episode] = {}
        self.envs.ask({slot: self._next(slot) for slot in range(min(slots, len(episodes)))})

    def _next(self, slot: int) -> EpisodeStart:
        self.running[slot], start = self.waiting.popleft()
        return start

    def go_on(self, policy: Policy) -> bool:
        """Read the observations, and let the running episodes act on new plans; False if there are none left."""
        planned: dict[int, Episode] = {}
        asked: Asked = {}
        for slot, observed in self.envs.answer().items():
            episode = self.running[slot]
            if isinstance(observed, EpisodeEnd):
                episode.ending = observed
                if self.waiting:
                    asked[slot] = self._next(slot)
                continue
            if observed is not None and observed.ndim == 4:
                observed, goal = observed
                episode.goal = torch.from_numpy(goal)
            episode.observed = observed
            planned[slot] = episode
        if planned:
            asked |= dict(zip(planned, policy(list(planned.values())), strict=True))
            for episode in planned.values():
                episode.plans += 1
        if asked:
            self.envs.ask(asked)
        return bool(asked)


def run_episodes(
    env_batches: Sequence[EnvBatch | EnvPool],
    data: EpisodeData,
    policy: Policy,
    rows: Sequence[int],
    offset: int,
    budget: int,
    *,
    observe: Observe = "frame",
    films: Collection[int] = (),
    at_once: int | None = None,
) -> tuple[list[EpisodeRecord], dict[int, np.ndarray]]:
    """Run an episode from each row to the row ``offset`` later → records, and films by row.

    The env batches share the episodes. The running episodes of one batch are planned together and then act; while
    one batch is planned for, the others act. ``observe``: what the policy needs. ``films``: rows to film.
    ``at_once``: the most environments; None for one per episode. An episode that was lost because its process died
    runs again, alone.
    """
    episodes = [Episode(row) for row in rows]
    begin = data.start_states(np.asarray(rows, np.int64))
    starts = [
        EpisodeStart(state, data.states[row + offset], budget, observe, row in films)
        for state, row in zip(begin, rows, strict=True)
    ]
    count = len(env_batches)
    parts = [
        _Part(envs, episodes[i::count], starts[i::count], max(1, len(range(i, at_once or len(rows), count))))
        for i, envs in enumerate(env_batches)
    ]
    if observe == "frame":
        goals = data.frames_of(np.asarray(rows) + offset)  # read while the environments reset
        for episode, goal in zip(episodes, goals, strict=True):
            episode.goal = goal
    elif observe == "state":
        for episode in episodes:
            episode.goal = data.states[episode.row + offset]
    while parts:
        parts = [part for part in parts if part.go_on(policy)]
    films_by_row: dict[int, np.ndarray] = {}
    records = []
    for e in episodes:
        assert e.ending is not None
        if e.ending.lost and len(episodes) > 1:  # another episode may have killed the process
            alone, film = run_episodes(
                env_batches, data, policy, [e.row], offset, budget, observe=observe, films=films
            )
            records += alone
            films_by_row |= film
            continue
        records.append(record_of(data, e.row, offset, e.ending, e.plans, **e.first))
        if e.ending.film is not None:
            films_by_row[e.row] = e.ending.film
    return records, films_by_row
