"""Moments of a dataset, beside those of published data: does a collected dataset resemble what the paper used?"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from atlas_wm.data.dataset import EpisodeData
from atlas_wm.errors import UserError
from atlas_wm.tasks import Task

QUANTILES = (0.5, 0.9, 0.99)
MOST_SHOWN = 24  # moments in a table; a task may have a wide state


class Moment(NamedTuple):
    here: tuple[float, ...]
    unit: str = ""
    published: tuple[float, ...] | None = None

    @property
    def ratio(self) -> tuple[float, ...] | None:
        """To the published values, each of which is positive."""
        if self.published is None or min(self.published) <= 0:
            return None
        return tuple(ours / theirs for ours, theirs in zip(self.here, self.published, strict=True))


def moments(task: Task, lengths: np.ndarray, actions: np.ndarray, states: np.ndarray) -> dict[str, Moment]:
    """Of E episodes with lengths (E,), actions (R, A) and rows (R, s) of the task's coordinate columns.

    The last row of an episode has no action. Means and standard deviations are those of each coordinate.
    """
    taken = np.delete(actions, (np.cumsum(lengths) - 1)[lengths > 0], axis=0).astype(np.float64)
    values = {
        "action mean": (taken.mean(0), ""),
        "action std": (taken.std(0), ""),
        "|action| 50, 90, 99 %": (np.quantile(np.linalg.norm(taken, axis=1), QUANTILES), ""),
        "episode length": (lengths.mean(keepdims=True), "rows"),
    }
    for part in task.quantities(states) if states.shape[1] else ():
        values[f"{part.name} mean"] = part.values.mean(0, dtype=np.float64), part.unit
        values[f"{part.name} std"] = part.values.std(0, dtype=np.float64), part.unit
    for name, published in task.published_moments.items():
        if name in values and len(published) != len(values[name][0]):
            raise UserError(f"published_moments[{name!r}] has {len(published)} values, not {len(values[name][0])}")
    return {
        name: Moment(tuple(float(f"{v:.6g}") for v in found), unit, task.published_moments.get(name))
        for name, (found, unit) in values.items()
    }


def moments_of(data: EpisodeData) -> dict[str, Moment]:
    task = data.task
    states = data.columns(task.coordinate_columns or task.state_columns)
    return moments(task, data.lengths, data.actions, states)


def moments_table(card: dict[str, Any]) -> str:
    """The ``moments`` of a dataset's card as aligned text: ours, published, ratio."""
    head, *rows = moment_rows({name: Moment(**entry) for name, entry in card.items()})
    lines = [head, *rows[:MOST_SHOWN]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    more = [f"{len(rows) - MOST_SHOWN} more are on the card"] if len(rows) > MOST_SHOWN else []
    return "\n".join(texts + more)


def moment_rows(found: Mapping[str, Moment]) -> list[list[str]]:
    """Cells of a table: a header, and a row for each moment. Published values only where some are known."""
    head, rows = ["", "this dataset"], []
    known = any(moment.published for moment in found.values())
    for name, moment in found.items():
        row = [f"{name} [{moment.unit}]" if moment.unit else name, _text(moment.here)]
        if known:
            ratio = None if name.endswith(" mean") else moment.ratio  # a mean depends on where zero is
            row += [_text(moment.published), ", ".join(f"{value:.2f}" for value in ratio or ())]
        rows.append(row)
    return [head + ["published", "ratio"] * known, *rows]


def _text(values: tuple[float, ...] | None) -> str:
    return ", ".join(f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}" for value in values or ())
