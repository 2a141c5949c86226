"""The states that a run was trained on: evaluation tells by them which episodes are in and out of distribution."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from atlas_wm.config import RunInfo
from atlas_wm.data.clips import held_out_episodes
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.errors import UserError, reason
from atlas_wm.runs.files import write_atomically
from atlas_wm.runs.folder import STATES
from atlas_wm.tasks import get_task_of

log = logging.getLogger(__name__)
MOST_STATES = 50_000


@dataclass(frozen=True)
class TrainingStates:
    """At most ``MOST_STATES`` rows of the columns that novelty is measured in, drawn from the training part."""

    states: np.ndarray  # (M, s) as the dataset has them
    columns: tuple[str, ...]
    data: str  # hash of the dataset

    @classmethod
    def of(cls, data: EpisodeData, info: RunInfo) -> "TrainingStates":
        columns = data.find(data.task.novelty_columns or data.task.state_columns)
        if not columns:
            raise UserError(f"{data.path} has no state column")
        states = data.columns((columns,))[training_rows(data, info)]
        if len(states) > MOST_STATES:
            states = states[np.random.default_rng(0).choice(len(states), MOST_STATES, replace=False)]
        return cls(states, columns, data.content_hash())

    def write(self, run: Path) -> None:
        about = {"about": json.dumps({"columns": self.columns, "data": self.data})}  # of two keys the order varies
        with write_atomically(run / STATES) as temporary:
            temporary.write_bytes(save({"states": np.ascontiguousarray(self.states)}, about))

    @classmethod
    def read(cls, run: Path, info: RunInfo) -> "TrainingStates | None":
        """Those of a run folder; None where it has none."""
        path = run / STATES
        if not path.exists():
            return None
        try:
            with safe_open(path, "numpy") as file:
                states, about = file.get_tensor("states"), json.loads((file.metadata() or {})["about"])
            columns = about["columns"]
            if states.ndim != 2 or 0 in states.shape or not np.isfinite(states).all():
                raise ValueError("it holds no states")
            if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
                raise ValueError("it names no columns")
            if about["data"] != info.data.hash:
                raise ValueError(f"it is of other data than the run, whose have hash {info.data.hash}")
        except (SafetensorError, OSError, LookupError, TypeError, ValueError, RecursionError) as error:
            why = f"{type(error).__name__}: {reason(error)}"
            raise UserError(f"{path} cannot be used ({why}): make it again with `atlas bank {run}`") from error
        return cls(states, tuple(columns), about["data"])


def training_rows(data: EpisodeData, info: RunInfo) -> np.ndarray:
    """Rows of the episodes a run was trained on: all of them unless it held whole episodes of this dataset out."""
    if info.config.train.split != "episodes" or info.data.hash != data.content_hash():
        return np.arange(len(data.actions))
    return np.flatnonzero(~np.repeat(held_out_episodes(len(data.lengths), info.config.train), data.lengths))


def save_states(run: Path, data: EpisodeData, info: RunInfo) -> None:
    """Write the training states to the run folder. Data without the columns can be trained on, too."""
    try:
        TrainingStates.of(data, info).write(run)
    except UserError as error:
        log.warning("%s is not written, so evaluations cannot label ID and OOD episodes: %s", STATES, error)


def training_data(run: Path, info: RunInfo, data: EpisodeData, remedy: str) -> EpisodeData:
    """The dataset that a run was trained on: ``data`` if it is that, else what is at the path that the run names.

    An imported checkpoint may come without its data: then ``data`` stand in for them, and a line says so.
    """
    if data.content_hash() == info.data.hash:
        return data
    try:
        there = EpisodeData(info.data.path, get_task_of(info), data.image_size, data.frameskip)
        if there.content_hash() == info.data.hash:
            return there
        why = f"{info.data.path} holds other data"
    except UserError as error:
        why = str(error)
    if info.recipe == "imported":
        log.warning("%s stand in for the training data of %s: what is unusual is told by them", data.path, run)
        return data
    raise UserError(
        f"what is unusual in {data.path} is told by the data that {run} was trained on, with hash "
        f"{info.data.hash}, and they are not there ({why}): {remedy}"
    )
