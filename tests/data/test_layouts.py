"""The columns of the published files, compressed as they are, also by name below $STABLEWM_HOME."""

import h5py
import hdf5plugin
import numpy as np
import pytest
import torch
from synthetic import columns, write_h5

from atlas_wm.data.clips import clip_index, fit_normalizer
from atlas_wm.data.dataset import EpisodeData, find_dataset
from atlas_wm.errors import UserError
from atlas_wm.recipes import demo
from atlas_wm.tasks import get_task

CUBE = {"observation": 28, "qpos": 21, "qvel": 20, "privileged_block_0_pos": 3, "privileged_block_0_quat": 4}
LAYOUTS = [  # task, action size, columns, where the state is, where novelty is measured
    ("tworoom", 2, {"pos_agent": 2, "pos_target": 2, "proprio": 2}, ["pos_agent"], ["pos_agent", "pos_target"]),
    ("tworoom", 2, {"state": 2, "goal_state": 2}, ["state"], ["state", "goal_state"]),
    ("pusht", 2, {"state": 7, "proprio": 4}, ["state"], ["state"]),
    ("cube", 5, CUBE, ["qpos", "qvel"], ["observation"]),
]


COMPRESSIONS = {
    "plain": {},
    "blosc": dict(hdf5plugin.Blosc(cname="zstd")),
    "gzip": {"compression": "gzip"},  # HDF5 leaves these chunks as they are, because noise does not get smaller
    "shuffled": {"compression": "gzip", "shuffle": True, "fletcher32": True},
}


@pytest.mark.parametrize("compression", COMPRESSIONS.values(), ids=COMPRESSIONS)
@pytest.mark.parametrize(("name", "action_size", "widths", "state", "novelty"), LAYOUTS)
def test_published_columns_are_found(name, action_size, widths, state, novelty, compression, tmp_path):
    stored, task = columns(50, action_size, **widths), get_task(name)
    stored["action"][[29, 49]] = np.nan  # published files have no action in the last row of an episode
    data = EpisodeData(write_h5(tmp_path / "x.h5", [30, 20], stored, **compression), task, 32, 5)
    assert np.array_equal(data.states, np.concatenate([stored[c] for c in state], axis=1))
    assert np.array_equal(data.columns(task.novelty_columns), np.concatenate([stored[c] for c in novelty], axis=1))
    assert np.array_equal(data.actions, stored["action"], equal_nan=True)
    frames = data.frames(np.array([1, 0]), np.array([4, 14]), 4)
    expected = torch.from_numpy(stored["pixels"][[34, 39, 44, 49, 14, 19, 24, 29]]).permute(0, 3, 1, 2)
    assert torch.equal(frames.flatten(0, 1), expected)
    normalizer = fit_normalizer(data, clip_index(data.lengths, 16), demo("atlas").model)
    assert np.allclose(normalizer.mean, np.delete(stored["action"], [29, 49], axis=0).mean(axis=0), atol=1e-6)


@pytest.mark.parametrize(
    ("asked", "place"),
    [
        *(("x.h5", "x.h5"), ("x", "x.h5"), ("x.h5", "datasets/x.h5"), ("x", "datasets/x.h5")),
        ("x", "datasets/x/any.h5"),  # as stable-worldmodel downloads them
    ],
)
def test_files_are_found_by_name_below_the_harness_home(asked, place, task, tmp_path, monkeypatch):
    monkeypatch.setenv("STABLEWM_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "home" / place
    path.parent.mkdir(parents=True)
    write_h5(path, [20], columns(20, pos_agent=2))
    data = EpisodeData(asked, task, 32, 5)
    assert data.lengths.tolist() == [20] and data.frame(3).shape == (1, 3, 32, 32)


def test_a_dataset_that_is_nowhere_names_the_places(task, tmp_path, monkeypatch):
    monkeypatch.setenv("STABLEWM_HOME", str(tmp_path))
    with pytest.raises(
        UserError, match=f"no dataset x.*{tmp_path}/x, {tmp_path}/datasets/x.*atlas collect tworoom"
    ):
        find_dataset("x", task)


def test_rows_between_episodes_are_not_used(task, tmp_path):
    """An interrupted writer leaves rows behind the last episode; a file may also have left episodes out."""
    stored = columns(60, state=2)
    path = write_h5(tmp_path / "x.h5", [20, 20], stored)
    with h5py.File(path, "a") as file:
        file["ep_offset"][:] = [5, 35]
    data = EpisodeData(path, task, 32, 5)
    rows = np.r_[5:25, 35:55]
    assert np.array_equal(data.actions, stored["action"][rows]) and np.array_equal(
        data.states, stored["state"][rows]
    )
    assert data.offsets.tolist() == [0, 20]
    for row in (0, 19, 20, 39):
        assert np.array_equal(data.frame(row)[0].permute(1, 2, 0), stored["pixels"][rows[row]])
