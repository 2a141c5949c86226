"""The same episodes in every stable-worldmodel format are the same data, and train."""

import numpy as np
import pytest
import torch

from atlas_wm.cli.app import main
from atlas_wm.data.clips import ClipDataset, clip_index
from atlas_wm.data.collect import record_episode
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.normalizer import Normalizer

FORMATS = {"hdf5": "x.h5", "lance": "x.lance", "folder": "images", "video": "videos"}
# Mean and largest difference of a 224×224 frame from what was rendered, in levels of 255. H.264 has half the
# colour resolution, and PIL's default JPEG quality is 75, so that edges of the dot differ a good deal.
LOSS = {"hdf5": (0.0, 0), "lance": (0.1, 20), "folder": (0.4, 60), "video": (0.8, 110)}


@pytest.fixture(scope="module")
def episodes(task):
    """Of 31, 10 and 99 rows: the second is shorter than a clip."""
    env = task.make_env()
    return [record_episode(task, env, seed=0, number=n, pixels=True) for n in range(3)]


@pytest.fixture(scope="module")
def paths(episodes, tmp_path_factory):
    """Written as HDF5, and from there by stable-worldmodel's own converter."""
    from stable_worldmodel.data import convert, get_format

    folder = tmp_path_factory.mktemp("formats")
    paths = {name: folder / path for name, path in FORMATS.items()}
    with get_format("hdf5").open_writer(paths["hdf5"]) as writer:
        writer.write_episodes([{c: list(values) for c, values in e.items()} for e in episodes])
    for name in ("lance", "folder", "video"):
        convert(paths["hdf5"], paths[name], dest_format=name, cache_dir=folder / "cache", progress=False)
    return paths


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_the_same_in_every_format(name, episodes, paths, task):
    data = EpisodeData(paths[name], task, 224, 5)
    assert data.lengths.tolist() == [31, 10, 99] and data.offsets.tolist() == [0, 31, 41]
    for values, column in ((data.actions, "action"), (data.states, "state")):
        assert np.array_equal(values, np.concatenate([e[column] for e in episodes]))
    assert data.content_hash() == EpisodeData(paths["hdf5"], task, 32, 5).content_hash()


def test_lance_columns_are_read_as_arrays(paths, task, monkeypatch):
    """stable-worldmodel's reader makes a Python object of every number: a minute for ten million rows."""
    from stable_worldmodel.data import LanceDataset

    expected = LanceDataset(paths["lance"]).get_col_data("state")
    monkeypatch.setattr(LanceDataset, "get_col_data", lambda self, name: pytest.fail(f"{name} was read slowly"))
    states = EpisodeData(paths["lance"], task, 32, 5).states
    assert np.array_equal(states, expected) and states.dtype == expected.dtype and states.flags.writeable


@pytest.mark.parametrize("name", FORMATS)
def test_frames_are_those_of_their_rows_in_any_order(name, episodes, paths, task):
    data = EpisodeData(paths[name], task, 224, 5)
    which = np.array([2, 0, 2, 0, 2, 2])
    starts = np.array([83, 15, 40, 0, 83, 1])  # with the last clips of both episodes; one comes twice
    frames = data.frames(which, starts, 4)
    assert frames.shape == (6, 4, 3, 224, 224) and frames.dtype == torch.uint8
    mean, largest = LOSS[name]
    for clip, episode, start in zip(frames, which, starts, strict=True):
        rendered = torch.from_numpy(episodes[episode]["pixels"][start : start + 16 : 5]).permute(0, 3, 1, 2)
        difference = (clip.int() - rendered.int()).abs()
        assert difference.float().mean() <= mean and difference.max() <= largest
    assert torch.equal(frames[0], frames[4])


@pytest.mark.parametrize("name", FORMATS)
def test_every_frame_is_the_one_of_its_row_and_not_a_neighbour(name, episodes, paths, task):
    data, episode = EpisodeData(paths[name], task, 224, 5), episodes[2]
    order = np.random.default_rng(0).permutation(99)
    one_by_one = torch.cat([data.frame(int(data.offsets[2]) + row) for row in order.tolist()])
    # The dot moves between rows, so that a frame is nearer to its own row than to any other, but for the codec.
    rendered = torch.from_numpy(episode["pixels"]).permute(0, 3, 1, 2).flatten(1).float()
    distance = torch.cdist(one_by_one.flatten(1).float(), rendered)
    own = distance[torch.arange(99), torch.from_numpy(order)]
    assert (own <= distance.min(dim=1).values * 1.05).all()


@pytest.mark.parametrize("name", FORMATS)
def test_a_batch_comes_from_every_format(name, paths, task, tiny_config):
    data = EpisodeData(paths[name], task, 32, 5)
    clips = clip_index(data.lengths, 16)
    assert set(clips.episode.tolist()) == {0, 2}
    dataset = ClipDataset(data, clips, Normalizer((0.0, 0.0), (1.0, 1.0)), tiny_config.model)
    batch = dataset.__getitems__([len(clips) - 1, 0])
    drawn = task.draw(data.states[[124, 129, 134, 139]], 32)
    assert batch.frames.shape == (2, 4, 3, 32, 32) and batch.actions.shape == (2, 3, 10)
    assert (batch.frames[0].int() - drawn.int()).abs().float().mean() <= LOSS[name][0]


@pytest.mark.slow
@pytest.mark.usefixtures("render_in_this_process", "few_frames_in_banks")
@pytest.mark.parametrize("name", FORMATS)
def test_a_step_of_training_with_a_loader_process(name, paths, tmp_path, request):
    if name == "lance":  # where stable-worldmodel asks for it
        request.getfixturevalue("spawned_loaders")
    main(
        [
            *("train", "tworoom", "--recipe", "demo", "--device", "cpu"),
            *("--data", str(paths[name]), "--out", str(tmp_path / "run")),
            *("--train.steps", "1", "--train.batch", "8", "--train.split", "clips", "--train.workers", "1"),
        ]
    )
    assert (tmp_path / "run" / "model.safetensors").exists()
