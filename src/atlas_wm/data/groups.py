"""Groups of episodes that are variants of one demonstration, such as replays with noise.

The published PushT data has 185 demonstrations in 101 variants each, and no column says which belong together. A
split by episodes would validate on variants of what was trained on.
"""

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from atlas_wm.data.dataset import EpisodeData

# Cosine similarity of standardised actions. Independent demonstrations of equal length reach 0.45 in TwoRoom, PushT
# and Cube; in a task with one slow action, one pair in 100,000 reaches 0.98.
SAME_ACTIONS, SAME_START_ACTIONS = 0.98, 0.5
SAME_START = 0.01  # of each state coordinate's standard deviation
LEAST_ROWS = 16  # of an episode: a few actions are alike by chance, and shorter episodes hold no clip
ROWS_AT_ONCE = 128


def episode_groups(data: EpisodeData, compared: np.ndarray | None = None) -> np.ndarray:
    """The number of the group of each episode: (E,).

    Two episodes of equal length are variants if their actions are nearly equal, or if they start in the same state
    and their actions are similar. A group holds all episodes that are connected by such pairs. ``compared``: the
    episodes to compare with all others, None: all, which takes minutes for 100,000 episodes of equal length.
    """
    taken = np.ones(len(data.actions), bool)
    taken[(data.offsets + data.lengths - 1)[data.lengths > 0]] = False  # the last row of an episode has no action
    groups = np.arange(len(data.lengths))
    if not taken.any():
        return groups
    columns = (column[taken] for column in data.actions.T)  # NumPy is slow along axis 0
    mean, std = np.array([(c.mean(dtype=np.float64), c.std(dtype=np.float64)) for c in columns]).T
    tolerance = SAME_START * np.array([column.std(dtype=np.float64) for column in data.states.T])
    is_compared = np.isin(groups, groups if compared is None else compared) & (data.lengths >= LEAST_ROWS)
    for length in np.unique(data.lengths[is_compared]):
        which = np.flatnonzero(data.lengths == length)
        which = which[np.argsort(~is_compared[which], kind="stable")]  # the compared ones first
        starts = data.offsets[which]
        rows = starts[:, None] + np.arange(length - 1)
        actions = ((data.actions[rows] - mean) / np.where(std > 0, std, 1.0)).astype(np.float32)
        count = int(is_compared[which].sum())
        groups[which] = which[_variants(actions.reshape(len(which), -1), data.states[starts], tolerance, count)]
    return np.unique(groups, return_inverse=True)[1]


def _variants(actions: np.ndarray, starts: np.ndarray, tolerance: np.ndarray, compared: int) -> np.ndarray:
    """For each of n episodes of equal length, the first of its group, from (n, steps·A) and (n, s): (n,). Each of
    the first ``compared`` episodes is compared with those after it."""
    n = len(actions)
    unit = actions / np.maximum(np.linalg.norm(actions, axis=1, keepdims=True), 1e-9)
    groups = np.arange(n)
    for first in range(0, compared, ROWS_AT_ONCE):
        here = slice(first, min(first + ROWS_AT_ONCE, compared))
        similarity = unit[here] @ unit[first:].T  # with itself and those after it
        linked = (similarity >= SAME_START_ACTIONS) & bool(starts.shape[1])
        for values, near in zip(starts.T, tolerance, strict=True):
            if not linked.any():
                break
            linked &= np.abs(values[here, None] - values[None, first:]) <= near
        one, other = np.nonzero(linked | (similarity >= SAME_ACTIONS))
        links = coo_matrix((np.ones(len(one), bool), (groups[first + one], groups[first + other])), shape=(n, n))
        groups = connected_components(links, directed=False)[1][groups]
    return np.unique(groups, return_index=True)[1][np.unique(groups, return_inverse=True)[1]]


def with_variants(groups: np.ndarray) -> np.ndarray:
    """Episodes that share their group with others: a mask (E,)."""
    return np.bincount(groups)[groups] > 1
