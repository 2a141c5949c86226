"""Differences of two policies: closed forms, pairing, intervals that know that rows of a demonstration agree."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from atlas_wm.report.intervals import clustered_wilson, paired, success_over_runs, wilson, with_seeds
from atlas_wm.report.style import Estimate
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
    assert (d.points, d.won, d.lost) == (0, 0, 0)
    surprise = 100 * 1.96**2 / (3 + 1.96**2)  # what Wilson's interval leaves for a fourth demonstration
    assert (d.low, d.high) == pytest.approx((-surprise, surprise))


def test_one_that_always_wins():
    d = paired({1: result([1] * 8)}, {1: result([0] * 8)})
    assert (d.points, d.high, d.won, d.lost) == (100, 100, 8, 0)
    assert d.low == pytest.approx(100 * 8 / (8 + 1.96**2))
    twice = paired(dict.fromkeys((1, 2), result([1] * 8)), dict.fromkeys((1, 2), result([0] * 8)))
    assert twice.interval == pytest.approx((d.low, 100))


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


def test_seeds_that_agree_add_nothing_and_certain_demonstrations_leave_a_t_interval():
    assert with_seeds(90, [90, 90, 90], 84, 93) == pytest.approx((84, 93))
    rates = [88.0, 91.0, 94.0]
    expected = stats.t.interval(0.95, 2, np.mean(rates), stats.sem(rates))
    assert with_seeds(91, rates, 91, 91) == pytest.approx(expected)
    assert expected[1] - expected[0] == pytest.approx(2 * 4.303 * 3 / np.sqrt(3), rel=1e-3)  # 3 is divided by n − 1
    joined = with_seeds(91, rates, 87, 93)
    assert [(91 - joined[0]) ** 2, (joined[1] - 91) ** 2] == pytest.approx(
        [(91 - expected[0]) ** 2 + 4**2, (expected[1] - 91) ** 2 + 2**2]
    )


def test_success_of_equal_runs_is_as_sure_as_that_of_one_over_its_demonstrations():
    won = np.random.default_rng(2).random(300) < 0.7
    twice = success_over_runs([result(won).model] * 2, False)
    assert twice == success_over_runs([result(won).model] * 5, False)
    assert twice == pytest.approx(100 * (won.mean() + np.array([-1.96, 1.96]) * won.std() / np.sqrt(300)), abs=0.7)
    alike = success_over_runs([result(np.repeat(won, 9), np.repeat(np.arange(300), 9)).model] * 2, False)
    assert alike == pytest.approx(twice)  # more rows of a demonstration say nothing new
    assert success_over_runs([result(won).model], False) is None


def test_equal_outcomes_everywhere_are_not_certain():
    low, high = success_over_runs([result([1] * 20).model] * 3, False)
    assert high == 100 and low == pytest.approx(100 * 20 / (20 + 1.96**2))


def test_a_half_has_the_episodes_of_the_half_and_solved_ones_are_left_out():
    """The OOD half always succeeds; of the ID half what is solved at the start, and nothing else."""
    episodes = [episode(k, k % 3 != 0, episode=k, ood=k % 3 == 2, solved_at_start=k % 3 == 1) for k in range(90)]
    rates = {"": {42: 200 / 3}, "id": {42: 50.0}, "ood": {42: 100.0}}
    models = [policy({42: episodes}, rates)] * 2
    assert success_over_runs(models, False, "ood")[0] == pytest.approx(100 * 30 / (30 + 1.96**2))
    ends = success_over_runs(models, False, "id")
    assert ends == pytest.approx(50 + 100 * np.array([-1.96, 1.96]) * 0.5 / np.sqrt(60), abs=2)
    unsolved = success_over_runs([policy({42: episodes}, {**rates, "id": {42: 0.0}})] * 2, True, "id")
    assert unsolved == pytest.approx((0, 100 * 1.96**2 / (30 + 1.96**2)))


def test_the_difference_of_several_pairs_has_both_intervals():
    """Each training seed is compared with itself: there the first wins 4, 5 and 6 of 10 more."""
    first = {seed: result([1] * (4 + i) + [0] * (6 - i)) for i, seed in enumerate((1, 2, 3))}
    second = {seed: result([0] * 10) for seed in (3, 1, 2)}
    d = paired(first, second)
    assert d.by_run == pytest.approx((40, 50, 60)) and d.points == pytest.approx(50)
    assert (d.seeds_low, d.seeds_high) == d.interval == with_seeds(50, [40, 50, 60], d.low, d.high)
    assert d.seeds_low < d.low < d.high < d.seeds_high
    assert d.text == f"+50.0 [{d.seeds_low:+.1f}, {d.seeds_high:+.1f}]"
    one = paired({1: first[1]}, {1: second[1]})
    assert (one.seeds_low, one.seeds_high) == (None, None) and one.interval == (one.low, one.high)
    level = paired(dict.fromkeys((1, 2), first[1]), dict.fromkeys((1, 2), second[1]))
    assert level.interval == pytest.approx((level.low, level.high)) == (one.low, one.high)


def test_the_interval_holds_the_truth_for_other_seeds_and_demonstrations():
    """Three training seeds with effects of their own, 60 demonstrations, true success 70 %. The bootstrap over
    demonstrations alone holds it far less often than it says."""
    rng, held, held_alone, times = np.random.default_rng(3), 0, 0, 150
    nothing = {seed: result([0] * 60) for seed in range(3)}
    for _ in range(times):
        easy = rng.normal(0, 0.1, 60)
        chances = 0.7 + rng.normal(0, 0.1, (3, 1)) + easy
        runs = {seed: result(rng.random(60) < chances[seed]) for seed in range(3)}
        low, high = success_over_runs([run.model for run in runs.values()], False)
        alone = paired(runs, nothing)
        held += low <= 70 <= high
        held_alone += alone.low <= 70 <= alone.high
    assert held / times > 0.93 and held_alone / times < 0.85


def test_the_mean_of_several_runs_is_drawn_with_the_same_interval():
    assert Estimate.of([(0.7, 0.6, 0.8)]) == Estimate(0.7, 0.6, 0.8)
    found = Estimate.of([(0.7, 0.6, 0.8), (0.8, 0.7, 0.9), (None, None, None)], 0, 1)
    assert (found.low, found.high) == pytest.approx((max(0, with_seeds(0.75, [0.7, 0.8], 0.65, 0.85)[0]), 1))
    assert Estimate.of([(3.0, None, None), (5.0, None, None)]).high == pytest.approx(4 + stats.t.ppf(0.975, 1))


def test_a_failure_counts_as_the_whole_budget():
    assert result([1, 1, 0, 0]).model.steps == (2 * 10 + 2 * 75) / 4


def test_a_small_sample_is_printed_with_its_interval():
    result = evaluation(policy({42: [episode(row, row >= 2, episode=row) for row in range(10)]}))
    assert interval_line(result) == "ATLAS: 95 % interval 49.0 to 94.3 %"
    nothing = evaluation(policy({42: [episode(0, True, solved_at_start=True)]}))
    assert interval_line(replace(nothing, protocol=replace(nothing.protocol, leave_out_solved=True))) == ""


def test_an_interval_counts_demonstrations_and_not_their_copies():
    rng = np.random.default_rng(0)
    success = rng.random(200) < 0.8
    alone = clustered_wilson(np.arange(200), success)
    assert alone == pytest.approx(wilson(100 * success.mean(), 200))
    copies = clustered_wilson(np.repeat(np.arange(200), 5), np.repeat(success, 5))
    assert copies == pytest.approx(alone)
    of_few = np.repeat(np.arange(20), 50)
    assert clustered_wilson(of_few, np.ones(1000, bool)) == pytest.approx(wilson(100, 20))  # all alike
    assert clustered_wilson(np.zeros(9, int), np.arange(9) < 3) == pytest.approx(wilson(100 / 3, 1))  # of one


def test_95_percent_of_intervals_hold_the_truth_where_demonstrations_differ():
    """1,000 episodes of 200 demonstrations, each with a chance of success of its own, on average 2/3."""
    rng, truth, held, naive = np.random.default_rng(1), 100 * 2 / 3, 0, 0
    for _ in range(400):
        demonstration = rng.integers(200, size=1000)
        success = rng.random(1000) < rng.beta(1.5, 0.75, 200)[demonstration]
        _, low, high = clustered_wilson(demonstration, success)
        held += low <= truth <= high
        _, low, high = wilson(100 * success.mean(), 1000)
        naive += low <= truth <= high
    assert held >= 0.92 * 400 and naive < 0.85 * 400


def test_95_percent_hold_the_truth_where_demonstrations_are_few_too():
    """Five demonstrations of 40 episodes each, such as the held-out ones of 50, for a rate and for a difference."""
    rng, held, held_difference, times = np.random.default_rng(4), 0, 0, 300
    of_few = np.repeat(np.arange(5), 40)
    nothing = {1: result([0] * 200, of_few)}
    for _ in range(times):
        success = rng.random(200) < rng.beta(6, 4, 5)[of_few]
        _, low, high = clustered_wilson(of_few, success)
        held += low <= 60 <= high
        d = paired({1: result(success, of_few)}, nothing)
        held_difference += d.low <= 60 <= d.high
    assert held >= 0.91 * times and held_difference >= 0.91 * times


def test_demonstrations_that_agree_are_surer_than_ones_that_almost_do():
    of_four = np.repeat(np.arange(4), 100)
    widths = []
    for last in (80, 85, 95):
        successes = np.concatenate([np.arange(100) < n for n in (80, 80, 80, last)])
        _, low, high = clustered_wilson(of_four, successes)
        widths.append(high - low)
    assert widths == sorted(widths)


def test_no_interval_of_a_difference_leaves_what_is_possible():
    first = {1: result([1] * 7 + [0] * 3), 2: result([1] * 9 + [0])}
    d = paired(first, dict.fromkeys((1, 2), result([0] * 10)))
    assert -100 <= d.seeds_low < d.points < d.seeds_high <= 100
