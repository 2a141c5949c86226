"""Percentile intervals over queries, paired between runs: resamples depend only on the number of queries."""

import numpy as np

RESAMPLES, LEVEL = 1000, 95.0


def resamples(queries: int) -> np.ndarray:
    """(RESAMPLES, Q) indices with replacement, the same for every run with Q queries."""
    return np.random.default_rng([0, queries]).integers(queries, size=(RESAMPLES, queries))


def interval(estimates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The low and the high end over the first axis, (RESAMPLES, …)."""
    with np.errstate(invalid="ignore"):  # between two infinities
        low, high = np.percentile(estimates, [50 - LEVEL / 2, 50 + LEVEL / 2], axis=0)
    return low, high


def median_interval(per_query: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(Q, …) → the median over queries and its interval, (…) each."""
    low, high = interval(np.median(per_query[resamples(len(per_query))], axis=1))
    return np.median(per_query, axis=0), low, high
