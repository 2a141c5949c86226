"""Variants of one demonstration are found, and none is on both sides of a split by groups."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from synthetic import write_h5

from atlas_wm.config import DataInfo, RunInfo, TrainConfig
from atlas_wm.data import groups, training_set
from atlas_wm.data.clips import held_out_episodes, held_out_of
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.data.groups import episode_groups, with_variants
from atlas_wm.data.states import training_rows
from atlas_wm.data.training_set import open_training_set
from atlas_wm.errors import SettingError, UserError
from atlas_wm.evaluate.own_demonstrations import demonstration_groups, leave_out_own
from atlas_wm.evaluate.protocol import Protocol, draw_starts
from atlas_wm.plan.retrieval import NONE

SOURCES, VARIANTS = 6, 5
LENGTHS = (40, 40, 40, 31, 50, 62)  # of the sources: three are equal


def made(noise: float, variants: int = VARIANTS, same_start: bool = True) -> tuple[np.ndarray, list, dict]:
    """The source of each episode in a mixed order, the lengths, and the columns. noise: a share of the actions."""
    rng = np.random.default_rng(0)
    demonstrations = [np.repeat(rng.uniform(-0.5, 0.5, (n // 5 + 1, 2)), 5, axis=0)[:n] for n in LENGTHS]
    source = rng.permutation(np.repeat(np.arange(SOURCES), variants))
    start = rng.uniform(40, 160, (SOURCES, 2))
    actions, states = [], []
    for s in source:
        action = demonstrations[s] + noise * rng.uniform(-0.5, 0.5, demonstrations[s].shape)
        begin = start[s] if same_start else rng.uniform(40, 160, 2)
        states.append(begin + np.cumsum(action, axis=0) - action)
        action[-1] = np.nan  # as in published files
        actions.append(action)
    columns = {"action": np.concatenate(actions).astype(np.float32), "pos_agent": np.concatenate(states)}
    return source, [LENGTHS[s] for s in source], columns


def same_partition(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(one[:, None] == one[None], other[:, None] == other[None])


@pytest.fixture
def published(tmp_path, task):
    """A file like the published PushT: replays of demonstrations with noise, and no column that says so."""
    source, lengths, columns = made(noise=0.4)
    return source, EpisodeData(write_h5(tmp_path / "x.h5", lengths, columns), task, 32, 5)


@pytest.fixture
def opened(tiny_config, task):
    def open_with(path, **changes):
        return open_training_set(path, task, replace(tiny_config, train=replace(tiny_config.train, **changes)))

    return open_with


@pytest.mark.parametrize(("noise", "same_start"), [(0.0, True), (0.4, True), (0.0, False), (0.05, False)])
def test_variants_are_found_without_a_column(noise, same_start, tmp_path, task):
    source, lengths, columns = made(noise, same_start=same_start)
    found = episode_groups(EpisodeData(write_h5(tmp_path / "x.h5", lengths, columns), task, 32, 5))
    assert same_partition(found, source) and with_variants(found).all()


def test_an_evaluated_episode_leaves_out_all_variants_of_its_demonstration(published):
    source, data = published
    run, told = SimpleNamespace(data=SimpleNamespace(hash=data.content_hash())), []
    planner = SimpleNamespace(retrieval=SimpleNamespace(group_by=told.append))
    left_out = leave_out_own(planner, data, demonstration_groups(data, run))
    mine = np.array([left_out(row) for row in data.offsets + data.lengths - 1])
    assert same_partition(mine, source) and np.array_equal(told[0], mine)
    other = SimpleNamespace(data=SimpleNamespace(hash="of other data"))
    assert leave_out_own(planner, data, demonstration_groups(data, other))(0) == NONE
    assert leave_out_own(SimpleNamespace(retrieval=None), data, mine)(0) == NONE


def test_only_the_asked_episodes_are_compared(published):
    """The variants of an asked episode are in its group; of others nothing is said."""
    source, data = published
    found = episode_groups(data, np.array([3, 7]))
    linked = np.isin(source, source[[3, 7]])
    assert same_partition(found[linked], source[linked])
    assert len(set(found[~linked])) == (~linked).sum()


def test_a_split_by_episodes_compares_a_sample(published, opened, monkeypatch, caplog):
    """All pairs of 100,000 episodes of equal length would take minutes."""
    monkeypatch.setattr(training_set, "MOST_COMPARED", 2)
    opened(published[1].path, split="episodes", holdout=0.2)
    assert "2 of 2 held-out episodes have variants" in caplog.text


def connected(data) -> np.ndarray:
    """The groups by the definition: every pair of episodes is looked at."""
    taken = np.concatenate([np.arange(o, o + n - 1) for o, n in zip(data.offsets, data.lengths, strict=True)])
    std = data.actions[taken].std(axis=0)
    actions = (data.actions - data.actions[taken].mean(axis=0)) / np.where(std > 0, std, 1)
    found = np.arange(len(data.lengths))
    for i, j in np.ndindex(len(found), len(found)):
        if data.lengths[i] != data.lengths[j]:
            continue
        one, other = (actions[data.offsets[k] : data.offsets[k] + data.lengths[k] - 1].ravel() for k in (i, j))
        similarity = one @ other / max(np.linalg.norm(one) * np.linalg.norm(other), 1e-9)
        starts = np.abs(data.states[data.offsets[i]] - data.states[data.offsets[j]])
        same_start = data.states.shape[1] and (starts <= 0.01 * data.states.std(axis=0)).all()
        if similarity >= 0.98 or (same_start and similarity >= 0.5):
            found[found == found[j]] = found[i]
    return found


def drawn(seed: int, episodes: int = 60, rows: int = 20) -> SimpleNamespace:
    """Variants of a few demonstrations at all distances, some from the same start, some that stand still."""
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 12, episodes)
    actions = rng.normal(size=(12, rows, 2))[source]
    actions += rng.choice([0.05, 0.2, 0.3, 1.0], episodes)[:, None, None] * rng.normal(size=actions.shape)
    if seed % 3 == 0:
        actions[rng.random(episodes) < 0.2] = 0
    states = rng.normal(size=(episodes, rows, seed % 4))
    near = rng.random(episodes) < 0.6
    starts = rng.normal(size=(12, seed % 4))[source] + 0.006 * rng.normal(size=(episodes, seed % 4))
    states[near, 0] = starts[near]
    states[..., 1:2] = 3.0  # a constant
    lengths = np.full(episodes, rows)
    return SimpleNamespace(
        lengths=lengths,
        offsets=np.arange(episodes) * rows,
        actions=actions.reshape(-1, 2).astype(np.float32),
        states=states.reshape(episodes * rows, -1).astype(np.float32),
    )


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_groups_are_those_of_all_pairs(seed, hashed, monkeypatch):
    if hashed:
        monkeypatch.setattr(groups, "MOST_PLAIN", 0)
        monkeypatch.setattr(groups, "PAIR_COST", 0)  # or so few would be compared in all pairs after all
        monkeypatch.setattr(groups, "ROWS_AT_ONCE", 2)
    data = drawn(seed)
    expected = connected(data)
    assert 1 < len(set(expected)) < 60
    assert same_partition(episode_groups(data), expected)


def pairs(episodes: int, alike: float) -> tuple[np.ndarray, SimpleNamespace]:
    """The source of each episode, two of each, and the dataset. alike: size of what all actions have in common."""
    rows, rng = 40, np.random.default_rng(0)
    source = rng.permutation(np.arange(episodes) // 2)
    actions = rng.normal(size=(episodes // 2, rows, 2)) + alike * rng.normal(size=(rows, 2))
    actions = actions[source] + 0.08 * rng.normal(size=(episodes, rows, 2))
    states = rng.normal(size=(episodes * rows, 4)).astype(np.float32)
    facts = {"lengths": np.full(episodes, rows), "offsets": np.arange(episodes) * rows}
    return source, SimpleNamespace(**facts, actions=actions.reshape(-1, 2), states=states)


@pytest.mark.parametrize("alike", [0.0, 1.5])
def test_variants_among_many_episodes_are_found(alike, monkeypatch):
    """More than are compared in all pairs, unless most are alike: then hashes tell them apart too slowly."""
    source, data = pairs(groups.MOST_PLAIN + 904, alike)
    found = []
    whole = groups._nearly_equal
    monkeypatch.setattr(groups, "_nearly_equal", lambda *given: found.append(whole(*given)) or found[0])
    assert same_partition(episode_groups(data), source)
    assert (found[0] is None) == (alike > 0)


def test_variants_among_others_with_their_hash_are_found(monkeypatch):
    source, data = pairs(400, 1.5)
    monkeypatch.setattr(groups, "MOST_PLAIN", 0)
    monkeypatch.setattr(groups, "PAIR_COST", 0)
    assert same_partition(episode_groups(data), source)


def test_independent_demonstrations_are_no_groups(dataset_path, task):
    assert not with_variants(episode_groups(EpisodeData(dataset_path, task, 32, 5))).any()


def test_actions_that_stand_still_are_no_group():
    lengths = np.full(4, 20)
    still = np.zeros((80, 2), np.float32)
    data = SimpleNamespace(lengths=lengths, offsets=np.arange(4) * 20, actions=still, states=np.zeros((80, 0)))
    assert not with_variants(episode_groups(data)).any()


@pytest.mark.parametrize("split_seed", range(5))
def test_no_source_is_on_both_sides(published, opened, split_seed):
    source, data = published
    found = opened(data.path, split="groups", holdout=0.2, split_seed=split_seed)
    training, validation = (set(source[clips.episode]) for clips in (found.training, found.validation))
    assert len(validation) == 1 and len(training) == SOURCES - 1 and not training & validation


def test_a_split_by_episodes_that_leaks_says_so(published, opened, dataset_path, caplog):
    source, data = published
    with caplog.at_level(logging.WARNING):
        leaking = opened(data.path, split="episodes", holdout=0.2)
    assert set(source[leaking.training.episode]) & set(source[leaking.validation.episode])
    (said,) = caplog.messages
    assert "6 of 6 held-out episodes have variants" in said and "--train.split groups" in said
    caplog.clear()
    opened(dataset_path, split="episodes")
    assert not caplog.messages


def test_without_groups_the_split_is_refused(dataset_path, opened):
    with pytest.raises(UserError, match=r"0 of 60 episodes are in one: use --train\.split episodes"):
        opened(dataset_path, split="groups")


def test_evaluation_keeps_to_the_recorded_split(published, opened):
    """Even if groups are found in another way later: the run says which episodes it held out."""
    source, data = published
    found = opened(data.path, split="groups", holdout=0.4)
    run = RunInfo("tworoom", "atlas", "demo", 2, found.config, found.info, "cpu")
    assert sorted(found.info.held_out) == sorted(set(found.validation.episode.tolist()))
    started = data.locate(draw_starts(data, Protocol(10, episodes=20, part="heldout"), 0, run))[0]
    assert set(started) <= set(found.info.held_out)
    trained = data.locate(training_rows(data, run))[0]
    assert not set(source[trained]) & set(source[list(found.info.held_out)])
    unrecorded = replace(run, data=replace(run.data, held_out=None))
    with pytest.raises(UserError, match="does not say which episodes"):
        held_out_of(unrecorded, len(data.lengths))


def test_the_wanted_share_is_met_as_well_as_groups_allow():
    groups = np.repeat(np.arange(20), np.arange(1, 21))  # 210 episodes
    for seed in range(20):
        held_out = held_out_episodes(210, TrainConfig(split="groups", holdout=0.3, split_seed=seed), groups)
        assert not set(groups[held_out]) & set(groups[~held_out])
        assert abs(held_out.sum() - 63) <= 10


def test_a_file_that_holds_out_episodes_it_does_not_have_is_refused():
    with pytest.raises(SettingError, match=r"data\.held_out must number episodes of 30"):
        DataInfo("x", "", 30, 900, 10, 2, held_out=(3, 30))
