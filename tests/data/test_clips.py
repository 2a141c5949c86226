"""Clips lie within episodes, splits do not overlap, statistics come from the training part alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_wm.config import TrainConfig
from atlas_wm.data.clips import ClipDataset, clip_index, fit_normalizer, split_clips
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.data.loader import EpochBatches, make_loader
from atlas_wm.errors import UserError
from atlas_wm.normalizer import Normalizer


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_the_index_is_every_window_within_an_episode(lengths, rows):
    expected = [(e, s) for e, n in enumerate(lengths) for s in range(n - rows + 1)]
    if not expected:
        with pytest.raises(UserError, match="no episode has"):
            clip_index(np.array(lengths), rows)
        return
    index = clip_index(np.array(lengths), rows)
    assert list(zip(index.episode.tolist(), index.start.tolist(), strict=True)) == expected


@pytest.mark.parametrize("split", ["clips", "episodes"])
def test_the_split_is_disjoint_complete_and_fixed_by_its_own_seed(split):
    index = clip_index(np.full(30, 40), 16)
    config = TrainConfig(split=split)
    training, validation = split_clips(index, 30, config)
    pairs = [set(zip(part.episode.tolist(), part.start.tolist(), strict=True)) for part in (training, validation)]
    assert not pairs[0] & pairs[1] and len(pairs[0] | pairs[1]) == len(index)
    assert len(validation) == pytest.approx(0.1 * len(index), rel=0.05)
    if split == "episodes":
        assert not set(training.episode.tolist()) & set(validation.episode.tolist())
    again = split_clips(index, 30, config)[1]
    assert np.array_equal(split_clips(index, 30, replace(config, seed=1))[1].start, validation.start)
    other = split_clips(index, 30, replace(config, split_seed=1))[1]
    assert np.array_equal(again.start, validation.start) and np.array_equal(again.episode, validation.episode)
    assert not (np.array_equal(other.start, validation.start) and np.array_equal(other.episode, validation.episode))


def test_action_statistics_come_from_training_rows_alone(dataset_path, task, tiny_config):
    data = EpisodeData(dataset_path, task, 32, 5)
    training, validation = split_clips(clip_index(data.lengths, 16), len(data.lengths), tiny_config.train)
    before = fit_normalizer(data, training, tiny_config.model)
    for episode in set(validation.episode.tolist()):
        data.actions[data.offsets[episode] :][: data.lengths[episode]] = 99.0
    assert fit_normalizer(data, training, tiny_config.model) == before
    rows = {
        int(data.offsets[e] + s + i)
        for e, s in zip(training.episode, training.start, strict=True)
        for i in range(15)
    }
    covered = data.actions[sorted(rows)].astype(np.float64)
    assert before.mean == pytest.approx(covered.mean(0).tolist())
    assert before.std == pytest.approx(covered.std(0).tolist())


def test_a_batch_is_the_frames_and_the_blocks_between_them(dataset_path, task, tiny_config):
    data = EpisodeData(dataset_path, task, 32, 5)
    clips = clip_index(data.lengths, 16)
    normalizer = Normalizer((0.5, -0.5), (2.0, 4.0))
    batch = ClipDataset(data, clips, normalizer, tiny_config.model).__getitems__([7, 0])
    assert batch.frames.shape == (2, 4, 3, 32, 32) and batch.actions.shape == (2, 3, 10)
    row = int(data.offsets[clips.episode[7]] + clips.start[7])
    assert torch.equal(batch.frames[0, 2], task.draw(data.states[row + 10 : row + 11], 32)[0])
    expected = (data.actions[row + 5 : row + 10] - [0.5, -0.5]) / [2.0, 4.0]  # from frame 1 to frame 2
    assert np.allclose(batch.actions[0, 1].numpy(), expected.reshape(-1), atol=1e-6)


def test_missing_actions_become_zero_after_standardisation():
    actions = torch.tensor([[1.0, float("nan")], [3.0, 2.0]])
    assert torch.equal(Normalizer((1.0, 1.0), (2.0, 1.0)).apply(actions), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))


def test_a_coordinate_that_never_moves_keeps_its_scale():
    actions = np.stack([np.full(7, 0.1), np.arange(7.0)], axis=1)
    assert Normalizer.fit(actions).std == (1.0, 2.0)


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=6))
@settings(max_examples=40, deadline=None)
def test_standardisation_can_be_undone(values):
    normalizer = Normalizer((0.3, -7.0), (0.01, 12.0))
    raw = torch.tensor(values, dtype=torch.float64)[: len(values) // 2 * 2].reshape(-1, 2)
    assert torch.allclose(normalizer.invert(normalizer.apply(raw)), raw, atol=1e-9)


def test_every_epoch_sees_each_clip_at_most_once_in_a_new_order():
    batches = list(EpochBatches(clips=50, batch=8, steps=12, seed=0))
    first, second = ([clip for b in batches[i : i + 6] for clip in b] for i in (0, 6))
    assert len(set(first)) == len(set(second)) == 48 and first != second
    assert list(EpochBatches(50, 8, 12, seed=0)) == batches
    assert list(EpochBatches(50, 8, 12, seed=1)) != batches


def test_too_few_clips_for_a_batch_says_so():
    with pytest.raises(UserError, match="collect more"):
        EpochBatches(clips=5, batch=8, steps=1, seed=0)


@pytest.mark.slow
def test_loader_processes_deliver_the_same_batches(dataset_path, task, tiny_config):
    data = EpisodeData(dataset_path, task, 32, 5)
    dataset = ClipDataset(data, clip_index(data.lengths, 16), Normalizer((0.0, 0.0), (1.0, 1.0)), tiny_config.model)
    order = EpochBatches(len(dataset), 4, 3, seed=0)
    alone, helped = (list(make_loader(dataset, order, workers, pin=False)) for workers in (0, 2))
    for a, b in zip(alone, helped, strict=True):
        assert torch.equal(a.frames, b.frames) and torch.equal(a.actions, b.actions)
