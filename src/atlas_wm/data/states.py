"""Training states of a run, by which evaluation labels episodes as in or out of distribution."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from atlas_wm.config import RunInfo
from atlas_wm.data.clips import held_out_of
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.errors import UserError, reason
from atlas_wm.runs.files import write_atomically
from atlas_wm.runs.folder import STATES
from atlas_wm.tasks import get_task_of

log = logging.getLogger(__name__)
MOST_STATES = 50_000


@dataclass(frozen=True)
class TrainingStates:
    """At most ``MOST_STATES`` rows of the novelty columns, drawn from the training split."""

    states: np.ndarray  # (M, s), not standardised
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
        about = {
            "about": json.dumps({"columns": self.columns, "data": self.data})
        }  # one key: the order of several varies
        with write_atomically(run / STATES) as temporary:
            temporary.write_bytes(save({"states": np.ascontiguousarray(self.states)}, about))

    @classmethod
    def read(cls, run: Path, info: RunInfo) -> "TrainingStates | None":
        """The training states of a run folder; None if it has none."""
        path = run / STATES
        if not path.exists():
            return None
        try:
            with safe_open(path, "numpy") as file:
                states, about = file.get_tensor("states"), json.loads((file.metadata() or {})["about"])
            columns = about["columns"]
            if states.ndim != 2 or 0 in states.shape or not np.isfinite(states).all():
                raise ValueError("it contains no states")
            if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
                raise ValueError("it names no columns")
            if about["data"] != info.data.hash:
                raise ValueError(f"it belongs to other data than the run, whose hash is {info.data.hash}")
        except (SafetensorError, OSError, LookupError, TypeError, ValueError, RecursionError) as error:
            why = f"{type(error).__name__}: {reason(error)}"
            raise UserError(f"{path} cannot be used ({why}): make it again with `atlas bank {run}`") from error
        return cls(states, tuple(columns), about["data"])


def training_rows(data: EpisodeData, info: RunInfo) -> np.ndarray:
    """Rows of the episodes a run was trained on: all rows, unless it held out episodes of this dataset."""
    if info.config.train.split == "clips" or info.data.hash != data.content_hash():
        return np.arange(len(data.actions))
    return np.flatnonzero(~np.repeat(held_out_of(info, len(data.lengths)), data.lengths))


def save_states(run: Path, data: EpisodeData, info: RunInfo) -> None:
    """Write the training states to the run folder. Data without the columns can be trained on, too."""
    try:
        TrainingStates.of(data, info).write(run)
    except UserError as error:
        log.warning("%s is not written, so evaluations cannot label ID and OOD episodes: %s", STATES, error)


def training_data(run: Path, info: RunInfo, data: EpisodeData, remedy: str) -> EpisodeData:
    """The dataset that a run was trained on: ``data`` if the hash agrees, else the dataset at the path of the run.

    An imported checkpoint may come without its training data. Then ``data`` replaces it, with a warning.
    """
    if data.content_hash() == info.data.hash:
        return data
    try:
        there = EpisodeData(info.data.path, get_task_of(info), data.image_size, data.frameskip)
        if there.content_hash() == info.data.hash:
            return there
        why = f"{info.data.path} contains other data"
    except UserError as error:
        why = str(error)
    if info.recipe == "imported":
        log.warning("novelty is measured against %s: the training data of %s is not available", data.path, run)
        return data
    raise UserError(
        f"novelty in {data.path} is measured against the training data of {run}, with hash {info.data.hash}, which "
        f"is not available ({why}): {remedy}"
    )
