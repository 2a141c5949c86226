"""Whether datasets have the rows that evaluations want: known once they are collected, hours before one asks."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np

from atlas_wm.errors import UserError
from atlas_wm.recipes import recipe_config
from atlas_wm.study.schedule import Progress
from atlas_wm.study.units import Unit


def check_rows(progress: Mapping[str, Progress]) -> None:
    """Fail if an evaluation that has to run would, once its run is trained. All datasets exist."""
    from atlas_wm.data.dataset import episode_lengths

    lengths_of = cache(episode_lengths)
    to_run = (p.unit for p in progress.values() if p.unit.kind == "eval" and p.unit.command and p.state != "done")
    for unit in to_run:
        flags, training = dict(pairwise(unit.command)), progress[unit.needs[0]].unit
        path = flags.get("--data") or dict(pairwise(training.command))["--data"]
        rows = np.maximum(lengths_of(path) - int(flags["--offset"]), 0)  # of each episode, with enough left
        held_out = flags.get("--part") == "heldout"
        if held_out:
            rows = rows[_held_out(training, len(rows))]
        if rows.sum() < int(flags["--episodes"]):
            setting = "eval_episodes" if "--data" in flags else "episodes"
            raise UserError(
                f"{unit.name} wants {flags['--episodes']} start rows with {flags['--offset']} rows left in their "
                f"episode; {path} has {rows.sum()}{' held out' if held_out else ''}: record more "
                f"demonstrations ({setting}), or lower offset or episodes of the evaluation"
            )


def _held_out(training: Unit, episodes: int) -> np.ndarray:
    """The episodes that a run will hold out: a mask (E,). Groups are not known before, and count as held out."""
    from atlas_wm.data.clips import held_out_episodes

    assert training.run is not None
    flags = dict(pairwise(training.command))
    train = recipe_config(training.run.recipe, training.run.method, training.run.task).train
    if flags.get("--train.split", train.split) == "groups":
        return np.ones(episodes, dtype=bool)
    train = replace(
        train,
        holdout=float(flags.get("--train.holdout", train.holdout)),
        split_seed=int(flags.get("--train.split-seed", train.split_seed)),
    )
    return held_out_episodes(episodes, train)
