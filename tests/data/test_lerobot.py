"""Datasets in LeRobot's layout give the rows and frames that were written."""

import json

import numpy as np
import pytest
import torch
from lerobot_layout import make_episodes, write_lerobot

from atlas_wm.data.dataset import EpisodeData
from atlas_wm.errors import UserError
from atlas_wm.tasks import OfflineTask

LENGTHS = [31, 20, 45]
LAYOUTS = {
    "v2.1": {"version": "v2.1"},
    "v3.0": {"version": "v3.0"},
    "v2.1 av1": {"version": "v2.1", "codec": "av1"},
    "v3.0 av1": {"version": "v3.0", "codec": "av1"},
    "v2.1 images": {"version": "v2.1", "stored": "image"},
    "v3.0 images": {"version": "v3.0", "stored": "image"},
}


@pytest.fixture(scope="module")
def episodes():
    return make_episodes(LENGTHS)


@pytest.fixture(scope="module", params=LAYOUTS)
def path(request, episodes, tmp_path_factory):
    return write_lerobot(tmp_path_factory.mktemp("lerobot") / "robot", episodes, **LAYOUTS[request.param])


def test_rows_are_those_that_were_written(path, episodes):
    data = EpisodeData(path, OfflineTask(), 32, 5)
    assert data.lengths.tolist() == LENGTHS and data.offsets.tolist() == [0, 31, 51]
    assert np.array_equal(data.actions, np.concatenate([e["action"] for e in episodes]))
    assert np.array_equal(data.states, np.concatenate([e["observation.state"] for e in episodes]))
    assert data.frame_size == (48, 64)


def test_every_frame_is_the_one_of_its_row(path, episodes):
    data = EpisodeData(path, OfflineTask(), 48, 5)
    order = np.random.default_rng(0).permutation(sum(LENGTHS))
    frames = data._stored(*data.locate(order), 1).flatten(1).float()
    for episode, written in enumerate(e["observation.images.top"] for e in episodes):
        which, steps = data.locate(order)
        mine = which == episode
        distance = torch.cdist(frames[mine], torch.from_numpy(written).permute(0, 3, 1, 2).flatten(1).float())
        assert distance.argmin(dim=1).tolist() == steps[mine].tolist()
        assert (
            distance.min(dim=1).values.max() / frames.shape[1] ** 0.5 < 10
        )  # levels of 255: what a codec loses at edges


def test_clips_are_strided_and_repeated_as_asked(path, episodes):
    data = EpisodeData(path, OfflineTask(), 48, 5)
    which, starts = np.array([2, 0, 2]), np.array([29, 0, 29])
    clips = data.frames(which, starts, 4)
    assert torch.equal(clips[0], clips[2])
    for clip, episode, start in zip(clips, which, starts, strict=True):
        one_by_one = torch.cat([data.frame(int(data.offsets[episode]) + int(start) + 5 * k) for k in range(4)])
        assert torch.equal(clip, one_by_one)


class Right(OfflineTask):
    image_column = "observation.images.right"


def test_one_of_several_cameras_is_named_by_the_task(tmp_path):
    cameras = ("observation.images.left", "observation.images.right")
    write_lerobot(tmp_path / "x", make_episodes([20], cameras))
    assert EpisodeData(tmp_path / "x", Right(), 32, 5).frame(0)[0, :, 16, -1].float().mean() == pytest.approx(
        140, abs=6
    )
    with pytest.raises(UserError, match=r"no column 'pixels' \(it has: .*observation.images.left"):
        EpisodeData(tmp_path / "x", OfflineTask(), 32, 5)


def test_data_without_a_state(tmp_path):
    episode = make_episodes([20])[0]
    del episode["observation.state"]
    assert EpisodeData(write_lerobot(tmp_path / "x", [episode]), OfflineTask(), 32, 5).states.shape == (20, 0)


class Hidden(OfflineTask):
    hidden_columns = ("observation.effort", "observation.load")


def test_hidden_columns_are_appended_to_the_state(tmp_path):
    episodes = make_episodes([20, 20])
    for number, episode in enumerate(episodes):
        episode["observation.effort"] = np.arange(40, dtype=np.float32).reshape(20, 2) + 100 * number
        episode["observation.load"] = np.full((20, 1), number, np.float32)
    data = EpisodeData(write_lerobot(tmp_path / "x", episodes), Hidden(), 32, 5)
    rows = np.array([21, 3])
    assert np.array_equal(data.start_states(rows), np.c_[data.states[rows], [[102, 103, 1], [6, 7, 0]]])


def version_1(path):
    info = json.loads((path / "meta/info.json").read_text())
    (path / "meta/info.json").write_text(json.dumps({**info, "codebase_version": "v1.6"}))


def no_features(path):
    (path / "meta/info.json").write_text(json.dumps({"codebase_version": "v2.1", "fps": 10}))


def camera_elsewhere(path):
    info = json.loads((path / "meta/info.json").read_text())
    info["features"]["../../observation"] = {"dtype": "video"}
    (path / "meta/info.json").write_text(json.dumps(info))


def cut_parquet(path):
    file = path / "data/chunk-000/episode_000000.parquet"
    file.write_bytes(file.read_bytes()[:-50])


def no_parquet(path):
    (path / "data/chunk-000/episode_000000.parquet").unlink()


def no_video(path):
    (path / "videos/chunk-000/observation.images.top/episode_000000.mp4").unlink()


def no_such_episode(path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = path / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(file)
    pq.write_table(table.set_column(0, "episode_index", pa.array([7])), file)


def cut_video(path):
    (path / "videos/chunk-000/observation.images.top/episode_000000.mp4").write_bytes(b"x" * 100)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (version_1, "version 'v1.6': convert it"),
        (no_features, "does not describe a LeRobot dataset"),
        (camera_elsewhere, "not a folder name"),
        (cut_parquet, "cannot be read as a dataset"),
        (no_parquet, "download the whole dataset"),
        (no_video, "episode_000000.mp4 is missing: download the videos"),
        (no_such_episode, "the videos of 'pixels' cannot be located"),
        (cut_video, "column 'pixels' cannot be read"),
    ],
)
def test_damage_is_named(tmp_path, damage, said):
    path = write_lerobot(tmp_path / "x", make_episodes([20]), "v3.0" if damage is no_such_episode else "v2.1")
    damage(path)
    with pytest.raises(UserError, match=said):
        EpisodeData(path, OfflineTask(), 32, 5).frame(0)


def test_only_the_row_groups_with_the_images_are_read(episodes, tmp_path, monkeypatch):
    import pyarrow.parquet as pq

    path = write_lerobot(tmp_path / "robot", episodes, version="v3.0", stored="image")
    expected = EpisodeData(path, OfflineTask(), 48, 5).frames_of(np.arange(sum(LENGTHS)))
    for file in path.glob("data/*/*.parquet"):
        pq.write_table(pq.read_table(file), file, row_group_size=7)
    data, read = EpisodeData(path, OfflineTask(), 48, 5), []
    whole = pq.ParquetFile.read_row_groups
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_groups", lambda file, groups, **_: read.extend(groups) or whole(file, groups, **_)
    )
    rows = np.array([60, 3, 8, 60])  # the second file begins at row 51
    assert torch.equal(data.frames_of(rows), expected[rows])
    assert read == [0, 1, 1]
