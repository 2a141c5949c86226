"""Differences of two policies: closed forms, pairing, intervals that know that rows of a demonstration agree."""

from dataclasses import replace

import numpy as np
import pytest

from atlas_wm.report.intervals import paired
from atlas_wm.report.table import interval_line
from made_up_results import episode, evaluation, policy


def result(successes, demonstrations=None, seed=42, first_row=0):
    demonstrations = range(len(successes)) if demonstrations is None else demonstrations
    rows = [
        episode(first_row + i, bool(s), episode=int(d), steps=10 if s else 75)
        for i, (s, d) in enumerate(zip(successes, demonstrations, strict=True))
    ]
    return evaluation(policy({seed: rows}))


def test_a_policy_against_itself_is_level():
    d = paired({1: result([1, 0, 1])}, {1: result([1, 0, 1])})
    assert (d.points, d.low, d.high, d.won, d.lost) == (0, 0, 0, 0, 0)


def test_one_that_always_wins():
    d = paired({1: result([1] * 8)}, {1: result([0] * 8)})
    assert (d.points, d.low, d.high, d.won, d.lost) == (100, 100, 100, 8, 0)


def test_swapping_the_two_changes_the_sign():
    rng = np.random.default_rng(0)
    a, b = (result(rng.random(200) < p) for p in (0.7, 0.5))
    there, back = paired({1: a}, {1: b}), paired({1: b}, {1: a})
    assert there.points == pytest.approx(-back.points) and (there.won, there.lost) == (back.lost, back.won)
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low))


def test_repeating_rows_of_a_demonstration_does_not_make_it_surer():
    rng = np.random.default_rng(1)
    a, b = rng.random(60) < 0.6, rng.random(60) < 0.5
    once = paired({1: result(a)}, {1: result(b)})
    often = np.repeat(np.arange(60), 10)
    again = paired({1: result(a[often], often)}, {1: result(b[often], often)})
    assert again.points == pytest.approx(once.points)
    assert again.high - again.low == pytest.approx(once.high - once.low)
    assert once.high - once.low == pytest.approx(2 * 1.96 * 100 * np.std(a * 1.0 - b) / np.sqrt(60), rel=0.15)


def test_only_common_episodes_of_runs_with_the_same_key_count():
    a = {3072: result([1, 1, 1]), 3073: result([1, 0, 1]), 3074: result([1])}
    b = {3073: result([0, 0], first_row=1), 3072: result([1, 0, 1]), 3075: result([0])}
    d = paired(a, b)
    assert d.by_run == pytest.approx((100 / 3, 50)) and (d.won, d.lost) == (2, 0)
    assert d.points == pytest.approx(100 * 2 / 5) and d.range_text == "+33.3 to +50.0"
    assert paired({1: result([1])}, {1: result([1], seed=43)}) is None and paired({}, {}) is None


def test_a_failure_counts_as_the_whole_budget():
    assert result([1, 1, 0, 0]).model.steps == (2 * 10 + 2 * 75) / 4


def test_a_small_sample_is_printed_with_its_interval():
    result = evaluation(policy({42: [episode(row, row >= 2) for row in range(10)]}))
    assert interval_line(result) == "ATLAS: 95 % interval 49.0 to 94.3 %"
    nothing = evaluation(policy({42: [episode(0, True, solved_at_start=True)]}))
    assert interval_line(replace(nothing, protocol=replace(nothing.protocol, leave_out_solved=True))) == ""
