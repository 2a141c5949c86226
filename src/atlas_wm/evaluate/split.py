"""In or out of distribution (ID/OOD): the distance of an episode's expert path from the training states.

No model is involved."""

from dataclasses import dataclass

import numpy as np
from scipy.spatial import cKDTree

from atlas_wm.errors import UserError


@dataclass(frozen=True)
class StateBank:
    """Training states, each coordinate standardised by its mean and standard deviation over the bank."""

    states: np.ndarray  # (M, s) standardised
    mean: np.ndarray  # (s,)
    std: np.ndarray  # (s,)

    def standardise(self, states: np.ndarray) -> np.ndarray:
        return (states - self.mean) / self.std


def state_bank(states: np.ndarray, size: int = 50_000, seed: int = 0) -> StateBank:
    """``size`` of the training rows (N, s), drawn without replacement; all of them if there are fewer."""
    states = _finite(states)
    if len(states) > size:
        states = states[np.random.default_rng(seed).choice(len(states), size, replace=False)]
    # A constant coordinate is not scaled. Rounding may make its standard deviation non-zero, but not its range.
    std = np.where(np.ptp(states, axis=0) > 0, states.std(axis=0), 1.0)
    mean = states.mean(axis=0)
    return StateBank((states - mean) / std, mean, std)


def path_scores(states: np.ndarray, rows: np.ndarray, offset: int, bank: StateBank, k: int = 50) -> np.ndarray:
    """The novelty of each episode: (E,) for E start rows.

    The mean distance to the ``k`` nearest states of the bank, averaged over the expert path from the start row to
    the row ``offset`` later, both included. A state that is in the bank is its own neighbour.
    """
    if not 1 <= k <= len(bank.states):
        raise UserError(f"k must lie between 1 and the {len(bank.states)} states of the bank, not {k}")
    if states.ndim != 2 or states.shape[1] != len(bank.mean):
        raise UserError(f"states have shape {states.shape}, the bank has {len(bank.mean)} coordinates")
    paths = np.asarray(rows, np.int64)[:, None] + np.arange(offset + 1)  # (E, offset + 1)
    wanted, inverse = np.unique(paths, return_inverse=True)  # paths overlap: query each state once
    if len(wanted) and not 0 <= wanted[0] <= wanted[-1] < len(states):
        raise UserError(f"the paths lead from row {wanted[0]} to row {wanted[-1]} of {len(states)} rows")
    queries = bank.standardise(_finite(states[wanted], wanted))
    distances, _ = cKDTree(bank.states).query(queries, k=np.arange(1, k + 1), workers=-1)
    return distances.mean(axis=1)[inverse.reshape(paths.shape)].mean(axis=1)


def ood_labels(scores: np.ndarray) -> np.ndarray:
    """True for the episodes above the median of their condition: (E,) bool, exactly E // 2 of them True.

    If scores tie at the median, the later episode counts as more novel, so that the halves are equal and the labels
    depend on the scores alone. With an odd number of episodes the median itself is ID.
    """
    scores = np.asarray(scores, np.float64)
    if not np.isfinite(scores).all():
        raise UserError(f"the score of episode {int(np.argmin(np.isfinite(scores)))} is not finite")
    labels = np.zeros(len(scores), bool)
    labels[np.argsort(scores, kind="stable")[len(scores) - len(scores) // 2 :]] = True
    return labels


def _finite(states: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
    states = np.asarray(states, np.float64)
    if states.ndim != 2 or 0 in states.shape:
        raise UserError(f"states must have shape (rows, coordinates), not {states.shape}")
    bad = np.argwhere(~np.isfinite(states))
    if len(bad):
        row, coordinate = bad[0].tolist()
        where = row if rows is None else int(rows[row])
        raise UserError(
            f"the state in row {where} is not finite: coordinate {coordinate} is {states[row, coordinate]} "
            f"({len(bad)} such values): novelty cannot be measured there"
        )
    return states
