"""The episodes of a run's evaluation: two diagnostics look at them again."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atlas_wm.config import PlanConfig, from_dict
from atlas_wm.errors import UserError, reason
from atlas_wm.run_folder import read_json

MOST_BUDGET = 1_000_000  # steps of an episode


@dataclass(frozen=True)
class Evaluated:
    """One evaluation seed at one offset."""

    seed: int
    budget: int
    plan: PlanConfig
    episodes: list[dict[str, Any]]  # the records, as evaluation stores them

    @property
    def key(self) -> str:
        """Another one if anything went, or was planned, otherwise."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def find_evaluated(run: Path, offset: int, data: str) -> Evaluated | None:
    """The first seed of the run's largest evaluation at this offset on the dataset with this hash.

    Among equals the paper's counts: its budget, starts from all episodes, none of them left out.
    """
    try:
        return _find(run, offset, data)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        why = f"{type(error).__name__}: {reason(error)}"
        raise UserError(f"an evaluation of {run} is damaged ({why}): run `atlas eval {run}` again") from error


def _find(run: Path, offset: int, data: str) -> Evaluated | None:
    reports = [read_json(path) for path in sorted((run / "evaluation").glob("*.json"))]
    fitting = [r for r in reports if r["protocol"]["offset"] == offset and r["data"]["hash"] == data]
    if not fitting:
        return None

    def fits(report: dict[str, Any]) -> tuple[int, bool, bool, bool]:
        p = report["protocol"]
        return p["episodes"], p["budget"] == offset + 25, p["part"] == "all", not p["leave_out_solved"]

    best = max(fitting, key=fits)
    protocol = best["protocol"]
    episodes = best["model"]["episodes"][str(protocol["seeds"][0])]
    if any("last_states" not in e for e in episodes):
        raise UserError(f"the evaluation of {run} is of an older version: run `atlas eval {run}` again")
    plan = from_dict(PlanConfig, best["plan"], f"the plan of an evaluation of {run}")
    seed, budget = protocol["seeds"][0], protocol["budget"]
    if type(seed) is not int or type(budget) is not int or not 0 < budget <= MOST_BUDGET:
        raise ValueError(f"seed {seed!r}, budget {budget!r}")
    # What an environment failed over says nothing about the model.
    return Evaluated(seed, budget, plan, [_checked(e) for e in episodes if e.get("error") is None])


def _checked(episode: dict[str, Any]) -> dict[str, Any]:
    """What the diagnostics use is there, and is what it should be."""
    states = np.asarray(episode["last_states"], np.float64)
    numbers = (episode["row"], episode["steps"])
    if (
        not all(type(n) is int and n >= 0 for n in numbers)
        or type(episode["success"]) is not bool
        or not math.isfinite(episode["novelty"])
        or states.ndim != 2
        or not np.isfinite(states).all()
    ):
        raise ValueError(f"the episode from row {episode['row']!r}")
    return episode


def evaluated(run: Path, offset: int, data: str) -> Evaluated:
    found = find_evaluated(run, offset, data)
    if found is None:
        raise UserError(
            f"{run} has no evaluation at offset {offset} on this dataset: "
            f"run `atlas eval {run} --offset {offset}` first"
        )
    return found
