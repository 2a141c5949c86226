"""Results of evaluations with made-up numbers, as evaluate() would write them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from atlas_wm.config import PlanConfig
from atlas_wm.runs.results import (
    EpisodeResult,
    EvaluatedData,
    EvaluationResult,
    NoveltyBank,
    PolicyResult,
    Protocol,
)


def episode(row: int = 7, success: bool = True, **changes: Any) -> EpisodeResult:
    usual: dict[str, Any] = {
        "row": row,
        "episode": 0,
        "start": row,
        "solved_at_start": False,
        "success": success,
        "steps": 3,
        "final_distance": 1.0,
        "last_states": [[1.0, 2.0]],
        "plans": 1,
        "error": None,
        "novelty": 0.5,
        "ood": False,
    }
    return EpisodeResult(**{**usual, **changes})


def policy(
    episodes: Mapping[int, list[EpisodeResult]],
    rates: Mapping[str, Mapping[int, float]] | None = None,
    planned: bool = True,
    **changes: Any,
) -> PolicyResult:
    """rates: by "", "id" and "ood" the success by seed, if not that of the episodes."""
    every = {seed: 100 * float(np.mean([e.success for e in mine])) for seed, mine in episodes.items()}
    summary: dict[str, Any] = {}
    for half in ("", "id", "ood"):
        mine = {str(seed): value for seed, value in (rates or {}).get(half, every).items()}
        key = f"success_{half}" if half else "success"
        summary |= {f"{key}_mean": float(np.mean(list(mine.values()))), f"{key}_by_seed": mine}
        summary[f"{key}_std"] = float(np.std(list(mine.values())))
    plans = 4 * len(episodes) if planned else 0
    summary |= {"solved_at_start": 10.0, "success_without_solved": 50.0, "plans": plans, "errors": 0}
    summary |= {"wall_seconds": 100.0, "episodes": {str(seed): mine for seed, mine in episodes.items()}}
    if planned:
        summary |= {"planning_seconds": 0.5 * plans, "seconds_per_plan": 0.5, "peak_memory": 2**30}
    return PolicyResult(**{**summary, **changes})


def evaluation(
    model: PolicyResult,
    random: PolicyResult | None = None,
    replay: PolicyResult | None = None,
    *,
    offset: int = 50,
    part: Any = "all",
    data: str = "0" * 16,
    **changes: Any,
) -> EvaluationResult:
    seeds = tuple(int(seed) for seed in model.episodes)
    count = len(next(iter(model.episodes.values())))
    usual: dict[str, Any] = {
        "task": "tworoom",
        "trained_task": "tworoom",
        "method": "atlas",
        "recipe": "paper",
        "protocol": Protocol(offset, offset + 25, count, seeds, part),
        "plan": PlanConfig(),
        "precision": "float32",
        "plain": False,
        "data": EvaluatedData("data/tworoom.lance", data),
        "novelty_bank": NoveltyBank(1000, 50, 0, "training data", data),
        "device": "cpu",
        "environments": "local",
        "workers": 2,
        "processes": 1,
        "film_every": 5,
        "written": "2026-01-02T03:04:05+00:00",
        "versions": {"python": "3.11.7", "atlas-wm": "0.1.0", "torch": "2.15.0"},
    }
    return EvaluationResult(model=model, random=random, replay=replay, **{**usual, **changes})
