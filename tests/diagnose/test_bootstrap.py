"""Intervals: a function of the number of queries alone, paired between runs, and of the width they claim."""

import numpy as np

from atlas_wm.diagnose.bootstrap import RESAMPLES, interval, median_interval, resamples


def test_resamples_are_the_same_for_every_run_with_as_many_queries():
    assert resamples(7).shape == (RESAMPLES, 7) == (1000, 7)
    assert np.array_equal(resamples(7), resamples(7))
    assert set(np.unique(resamples(7))) == set(range(7))


def test_the_interval_is_that_of_resampled_medians():
    per_query = np.random.default_rng(0).normal(size=(20, 3))
    medians = np.array([[np.median([column[i] for i in some]) for column in per_query.T] for some in resamples(20)])
    middle, low, high = median_interval(per_query)
    np.testing.assert_array_equal(middle, np.median(per_query, axis=0))
    np.testing.assert_allclose(low, np.percentile(medians, 2.5, axis=0))
    np.testing.assert_allclose(high, np.percentile(medians, 97.5, axis=0))
    assert (low < middle).all() and (middle < high).all()


def test_two_runs_that_differ_by_the_same_on_every_query_differ_by_that_without_doubt():
    one = np.random.default_rng(1).normal(size=30)
    draws = resamples(30)
    difference = np.median((one + 0.25)[draws], axis=1) - np.median(one[draws], axis=1)
    low, high = interval(difference)
    np.testing.assert_allclose([low, high], 0.25)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(2)
    covered = []
    for _ in range(200):
        _, low, high = median_interval(rng.exponential(size=40))
        covered.append(low <= np.log(2) <= high)
    assert 0.89 <= np.mean(covered) <= 0.99
