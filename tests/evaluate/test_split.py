"""The ID/OOD split: distance from the training states along the expert path, and nothing else."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_wm.data.dataset import EpisodeData
from atlas_wm.errors import UserError
from atlas_wm.evaluate.protocol import Protocol, draw_starts
from atlas_wm.evaluate.split import ood_labels, path_scores, state_bank


def brute_force(training, states, rows, offset, k):
    """The definition, written out."""
    mean, std = training.mean(axis=0), training.std(axis=0)
    scores = []
    for row in rows:
        distances = []
        for state in states[row : row + offset + 1]:
            to_all = np.sqrt((((state - mean) / std - (training - mean) / std) ** 2).sum(axis=1))
            distances.append(np.sort(to_all)[:k].mean())
        scores.append(np.mean(distances))
    return np.array(scores)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    coordinates=st.integers(1, 8),
    offset=st.integers(0, 12),
    k=st.integers(1, 30),
    grid=st.booleans(),
)
def test_scores_are_the_definition(seed, coordinates, offset, k, grid):
    rng = np.random.default_rng(seed)
    training, states = rng.normal(3, 5, (60, coordinates)), rng.normal(3, 9, (40, coordinates))
    if grid:  # many equal states and equal distances
        training, states = training.round(-1), states.round(-1)
        training[0] += 10
    rows = rng.integers(0, 40 - offset, 9)
    scores = path_scores(states, rows, offset, state_bank(training), k)
    np.testing.assert_allclose(scores, brute_force(training, states, rows, offset, k), rtol=1e-9, atol=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.5, 0.5000001, 2.0, 7.0]), max_size=31))
def test_exactly_half_the_episodes_are_ood_whatever_ties(scores):
    labels = ood_labels(np.array(scores))
    assert labels.dtype == bool and labels.sum() == len(scores) // 2
    if labels.any():
        assert np.array(scores)[labels].min() >= np.array(scores)[~labels].max()
    assert np.array_equal(labels, ood_labels(np.array(scores)))


def test_ood_is_above_the_median():
    scores = np.random.default_rng(0).normal(size=200)
    assert np.array_equal(ood_labels(scores), scores > np.median(scores))
    odd = scores[:199]
    assert np.array_equal(ood_labels(odd), odd > np.median(odd))


def test_of_tied_episodes_the_later_ones_are_ood():
    assert ood_labels(np.ones(6)).tolist() == [False] * 3 + [True] * 3
    assert ood_labels(np.array([1.0, 2.0, 1.0, 1.0])).tolist() == [False, True, False, True]


def test_units_do_not_matter():
    rng = np.random.default_rng(1)
    training, states, rows = rng.normal(size=(500, 3)), rng.normal(size=(200, 3)), np.arange(0, 150, 10)
    scale, shift = np.array([1000.0, 1e-3, -7.0]), np.array([-5.0, 1e3, 0.1])
    plain = path_scores(states, rows, 20, state_bank(training), 10)
    other = path_scores(states * scale + shift, rows, 20, state_bank(training * scale + shift), 10)
    np.testing.assert_allclose(plain, other, rtol=1e-8)
    assert np.array_equal(ood_labels(plain), ood_labels(other))


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6 + 0.1])  # 0.1: its mean is rounded, its deviation not 0
def test_a_constant_coordinate_keeps_scale_one_and_says_nothing(value):
    rng = np.random.default_rng(2)
    training, states, rows = rng.normal(size=(300, 2)), rng.normal(size=(60, 2)), np.arange(8)
    bank = state_bank(np.c_[training, np.full(300, value)])
    assert bank.std[2] == 1.0
    np.testing.assert_allclose(
        path_scores(np.c_[states, np.full(60, value)], rows, 50, bank, 5),
        path_scores(states, rows, 50, state_bank(training), 5),
        rtol=1e-6,
    )


def test_an_episode_far_outside_the_bank_is_ood():
    rng = np.random.default_rng(3)
    training, states = rng.normal(size=(1000, 4)), rng.normal(size=(110, 4))
    states[50:61] += 20  # rows 50 to 60: the path from row 50 with offset 10
    rows = np.arange(0, 100, 10)
    scores = path_scores(states, rows, 10, state_bank(training), 50)
    assert scores.argmax() == 5 and ood_labels(scores)[5]
    assert scores[5] > 5 * np.median(scores)


def test_the_path_runs_from_the_start_through_the_goal():
    states = np.zeros((8, 1))
    states[[2, 5]] = 100.0
    bank = state_bank(np.array([[-1.0], [1.0]] * 10))  # deviation 1; every zero is 1 away
    assert path_scores(states, np.array([3]), 1, bank, 1).tolist() == [1.0]  # rows 3 and 4
    assert path_scores(states, np.array([2, 3]), 2, bank, 1).tolist() == [(99 + 1 + 1) / 3, (1 + 1 + 99) / 3]


def test_the_bank_is_reproducible_and_drawn_without_replacement():
    states = np.arange(3000.0).reshape(1000, 3)
    bank = state_bank(states, size=200)
    drawn = bank.states * bank.std + bank.mean
    expected = states[np.random.default_rng(0).choice(1000, 200, replace=False)]
    np.testing.assert_allclose(drawn, expected, rtol=1e-9, atol=1e-9)
    assert len(np.unique(drawn[:, 0].round())) == 200
    assert np.array_equal(bank.states, state_bank(states, size=200, seed=0).states)
    assert not np.array_equal(bank.states, state_bank(states, size=200, seed=1).states)
    np.testing.assert_allclose(bank.states.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(bank.states.std(axis=0), 1)


def test_fewer_states_than_the_bank_holds_are_all_taken():
    states = np.random.default_rng(0).normal(size=(30, 2))
    bank = state_bank(states, size=30)
    np.testing.assert_allclose(bank.states * bank.std + bank.mean, states)
    assert np.array_equal(bank.states, state_bank(states).states)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_state_that_is_not_finite_is_named(value):
    states = np.random.default_rng(0).normal(size=(60, 2))
    bank = state_bank(states)
    states[37, 1] = value
    with pytest.raises(UserError, match=rf"row 37 .*coordinate 1 is {value}"):
        state_bank(states)
    with pytest.raises(UserError, match=rf"row 37 .*coordinate 1 is {value}"):
        path_scores(states, np.array([0, 30]), 10, bank)
    assert np.isfinite(path_scores(states, np.array([0, 20]), 10, bank)).all()  # elsewhere it does no harm


def test_what_cannot_be_scored_is_refused():
    states = np.random.default_rng(0).normal(size=(60, 2))
    bank = state_bank(states)
    for message, call in {
        "k must lie between 1 and the 60 states": lambda: path_scores(states, np.array([0]), 5, bank, 61),
        "the bank has 2 coordinates": lambda: path_scores(states[:, :1], np.array([0]), 5, bank),
        "to row 60 of 60": lambda: path_scores(states, np.array([55]), 5, bank),
        "from row -1": lambda: path_scores(states, np.array([-1]), 5, bank),
        "must have shape": lambda: state_bank(states[:, 0]),
        "score of episode 1 ": lambda: ood_labels(np.array([0.0, np.nan])),
    }.items():
        with pytest.raises(UserError, match=message):
            call()


def test_two_hundred_episodes_against_fifty_thousand_states_take_seconds():
    rng = np.random.default_rng(0)
    states = rng.normal(size=(60_000, 4))
    started = time.perf_counter()
    scores = path_scores(states, rng.choice(59_000, 200, replace=False), 50, state_bank(states))
    assert scores.shape == (200,) and time.perf_counter() - started < 10


def test_a_collected_dataset_is_split_in_halves(dataset_path, task):
    data = EpisodeData(dataset_path, task, 32, 5)
    states = data.columns(task.novelty_columns)
    rows = draw_starts(data, Protocol(25, episodes=40), 42)
    scores = path_scores(states, rows, 25, state_bank(states))
    labels = ood_labels(scores)
    assert states.shape[1] == 4 and (scores > 0).all()
    assert labels.sum() == 20 and scores[labels].min() > scores[~labels].max()
