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
MOST_PLAIN = 4096  # episodes of equal length of which all pairs are compared; more are hashed first
MISSED = 1e-9  # probability, at most, that a pair with nearly equal actions shares no hash
PAIRS_AT_ONCE = 100_000
PAIR_COST = 25  # of a pair from the hash tables, in pairs of a matrix product


def episode_groups(data: EpisodeData, compared: np.ndarray | None = None) -> np.ndarray:
    """The number of the group of each episode: (E,).

    Two episodes of equal length are variants if their actions are nearly equal, or if they start in the same state
    and their actions are similar. A group holds all episodes that are connected by such pairs. ``compared``: the
    episodes to compare with all others, None: all.
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
    """For each of n episodes of equal length, one that names its group, from (n, steps·A) and (n, s): (n,). Each of
    the first ``compared`` episodes is compared with those after it."""
    n = len(actions)
    unit = actions / np.maximum(np.linalg.norm(actions, axis=1, keepdims=True), 1e-9)
    if compared < n or n <= MOST_PLAIN:
        return _compare(unit, starts, tolerance, np.full(compared, n))
    groups = _nearly_equal(unit, _same_start(unit, starts, tolerance))
    return _compare(unit, starts, tolerance, np.full(n, n)) if groups is None else groups


def _compare(unit: np.ndarray, starts: np.ndarray, tolerance: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Groups (n,) of episodes, each of which is compared with those after it, up to its end if it has one."""
    groups = np.arange(len(unit))
    for first in range(0, len(ends), ROWS_AT_ONCE):
        here = slice(first, min(first + ROWS_AT_ONCE, len(ends)))
        there = slice(first, ends[here.stop - 1])
        similarity = unit[here] @ unit[there].T  # with itself and those after it
        linked = (similarity >= SAME_START_ACTIONS) & bool(starts.shape[1])
        for values, near in zip(starts.T, tolerance, strict=True):
            if not linked.any():
                break
            linked &= np.abs(values[here, None] - values[None, there]) <= near
        one, other = np.nonzero(linked | (similarity >= SAME_ACTIONS))
        groups = _joined(groups, first + one, first + other)
    return groups


def _joined(groups: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The groups after linked episodes, ``one[i]`` with ``other[i]``, have become one group."""
    pairs = np.stack([groups[one], groups[other]])
    names, numbers = np.unique(pairs[:, pairs[0] != pairs[1]], return_inverse=True)
    if not len(names):
        return groups
    numbers = numbers.reshape(2, -1)
    links = coo_matrix((np.ones(numbers.shape[1], bool), tuple(numbers)), shape=(len(names), len(names)))
    component = connected_components(links, directed=False)[1]
    renamed = np.arange(len(groups))
    renamed[names] = names[np.unique(component, return_index=True)[1]][component]
    return renamed[groups]


def _same_start(unit: np.ndarray, starts: np.ndarray, tolerance: np.ndarray) -> np.ndarray:
    """Groups (n,) of episodes that start in the same state with similar actions. Sorted by a coordinate of the
    start, an episode is compared with those up to ``tolerance`` after it."""
    groups = np.arange(len(unit))
    sorted_by = []
    for values, near in zip(starts.T, tolerance, strict=True):
        order = np.argsort(values, kind="stable")
        ends = np.searchsorted(values[order], values[order] + 1.001 * near, "right")  # near: also after rounding
        sorted_by.append((int((ends - groups).sum()), order, ends))
    if not sorted_by:
        return groups
    _, order, ends = min(sorted_by, key=lambda found: found[0])
    groups[order] = order[_compare(unit[order], starts[order], tolerance, ends)]
    return groups


def _nearly_equal(unit: np.ndarray, groups: np.ndarray) -> np.ndarray | None:
    """The groups after episodes with nearly equal actions were joined; None if comparing all pairs is faster.

    Random hyperplanes hash the actions: a pair at the angle θ is on the same side of one with probability 1 - θ/π.
    Episodes that share the hash of a table are compared. There are enough tables to miss no pair.
    """
    n, bits = len(unit), int(np.ceil(np.log2(len(unit))))
    shared = (1 - np.arccos(SAME_ACTIONS) / np.pi) ** bits
    tables = int(np.ceil(np.log(MISSED) / np.log1p(-shared)))
    moving = np.flatnonzero(unit.any(axis=1))  # the others are like nobody
    rng = np.random.default_rng(0)
    for _ in range(tables):
        planes = rng.standard_normal((unit.shape[1], bits), dtype=np.float32)
        keys = ((unit @ planes > 0) @ (2.0 ** np.arange(bits))).astype(np.int64)[moving]
        # Neighbours first: they join most of a large group, whose pairs need no comparison then.
        order = np.argsort(keys)
        same = np.flatnonzero(keys[order[1:]] == keys[order[:-1]])
        groups = _join_similar(unit, groups, moving[order[same]], moving[order[same + 1]])
        # Each with the episodes of other groups that have its hash: those after its own group.
        order = np.argsort(keys * n + groups[moving])
        by_key, by_both = keys[order], (keys * n + groups[moving])[order]
        begin = np.searchsorted(by_both, by_both, "right")
        counts = np.searchsorted(by_key, by_key, "right") - begin
        if counts.sum() * tables * PAIR_COST > n * n / 2:
            return None
        done = np.concatenate([[0], np.cumsum(counts)])
        for first in range(0, int(done[-1]), PAIRS_AT_ONCE):
            pair = np.arange(first, min(first + PAIRS_AT_ONCE, int(done[-1])))
            one = np.searchsorted(done, pair, "right") - 1
            other = begin[one] + pair - done[one]
            groups = _join_similar(unit, groups, moving[order[one]], moving[order[other]])
    return groups


def _join_similar(unit: np.ndarray, groups: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The groups after pairs of episodes with nearly equal actions were joined."""
    apart = groups[one] != groups[other]
    one, other = one[apart], other[apart]
    linked = np.einsum("ij,ij->i", unit[one], unit[other]) >= SAME_ACTIONS
    return _joined(groups, one[linked], other[linked])


def with_variants(groups: np.ndarray) -> np.ndarray:
    """Episodes that share their group with others: a mask (E,)."""
    return np.bincount(groups)[groups] > 1
