"""Collected frames are compressed where they are rendered, and lose nothing on their way through HDF5."""

import h5py
import numpy as np
import pytest
import torch
from test_collect_killed import Here

from atlas_wm.data import collect as collect_module
from atlas_wm.data.collect import collect, record_episode
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.data.encoding import EncodedFrames, encode_images, gzip_frame, jpeg_frame
from atlas_wm.data.partial import HDF5Partial, partial_of
from atlas_wm.data.pixels import HDF5Pixels
from atlas_wm.data.writers import write_hdf5
from atlas_wm.errors import UserError
from atlas_wm.tasks.tworoom import TwoRoom


class Single(TwoRoom):
    """Recorded one episode at a time."""

    episodes_per_job = 1


@pytest.fixture(scope="module")
def episodes() -> list[dict[str, np.ndarray]]:
    """Of 31, 10 and 99 rows."""
    env = TwoRoom().make_env()
    return [record_episode(TwoRoom(), env, seed=0, number=n, pixels=True) for n in range(3)]


@pytest.fixture
def in_this_process(monkeypatch):
    monkeypatch.setattr(collect_module, "WorkerPool", Here)


def written(path, frames: np.ndarray):
    """A dataset of one episode that has these frames."""
    numbers = {"state": np.zeros((len(frames), 2)), "action": np.zeros((len(frames), 2), np.float32)}
    write_hdf5(path, [len(frames)], [encode_images({"pixels": frames, **numbers}, gzip_frame)])
    return path


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """The same episodes, by two workers."""
    path = tmp_path_factory.mktemp("collected") / "x.h5"
    collect(Single(), path, 3, workers=2)
    return path


def test_two_workers_store_the_rendered_frames_and_the_harness_reads_them(collected, episodes):
    from stable_worldmodel.data import load_dataset

    assert collected.stat().st_size < sum(e["pixels"].nbytes for e in episodes) / 10
    harness = load_dataset(str(collected))
    assert harness.lengths.tolist() == [31, 10, 99] and set(harness.column_names) == set(episodes[0])
    for name in episodes[0]:
        stored, rendered = harness.get_col_data(name), np.concatenate([e[name] for e in episodes])
        assert stored.dtype == rendered.dtype and np.array_equal(stored, rendered)
    clips = load_dataset(str(collected), frameskip=5, num_steps=4)
    episode, start = clips.clip_indices[-1]
    expected = torch.from_numpy(episodes[episode]["pixels"][start : start + 16 : 5]).movedim(-1, 1)
    assert torch.equal(clips[len(clips) - 1]["pixels"], expected)
    ours = EpisodeData(collected, Single(), 224, 5).frames(np.array([episode]), np.array([start]), 4)
    assert torch.equal(ours[0], expected)


def test_stored_frames_and_drawn_frames_are_the_same_training_data(collected, episodes, task, tmp_path):
    without = [{name: e[name] for name in e if name != "pixels"} for e in episodes]
    write_hdf5(tmp_path / "drawn.h5", [31, 10, 99], without)
    stored, drawn = (EpisodeData(path, task, 32, 5) for path in (collected, tmp_path / "drawn.h5"))
    assert stored.has_pixels and not drawn.has_pixels
    which, starts = np.array([0, 2]), np.array([0, 99 - 16])
    frames = stored.frames(which, starts, 4)
    assert frames.shape == (2, 4, 3, 32, 32)
    assert torch.equal(frames, drawn.frames(which, starts, 4))


@pytest.mark.parametrize("shape", [(224, 224, 3), (5, 7, 3), (8, 8, 1)])
@pytest.mark.parametrize("levels", [1, 2, 256], ids=["black", "two levels", "noise"])
def test_any_frame_comes_back_bit_by_bit_also_with_threads(shape, levels, tmp_path):
    frames = np.random.default_rng(0).integers(0, levels, (40, *shape), dtype=np.uint8)
    path = written(tmp_path / "x.h5", frames)
    with h5py.File(path) as file:
        assert np.array_equal(file["pixels"], frames)
    order, threads = np.random.default_rng(1).permutation(40), torch.get_num_threads()
    reader = HDF5Pixels(path, np.zeros(1, np.int64))
    for count in (1, 3):
        torch.set_num_threads(count)
        read = reader.read(np.zeros(40, np.int64), order, 1, 1)
        assert np.array_equal(read.movedim(1, -1), frames[order])
    torch.set_num_threads(threads)


def test_lance_gets_what_the_writer_of_the_harness_would_write(episodes, tmp_path):
    import lance
    from stable_worldmodel.data import get_format

    with get_format("lance").open_writer(tmp_path / "theirs.lance") as writer:
        writer.write_episodes([{c: list(values) for c, values in e.items()} for e in episodes])
    ours = partial_of(tmp_path / "x.lance")
    for some in (episodes[:2], episodes[2:]):
        ours.append([encode_images(e, jpeg_frame) for e in some])
    assert lance.dataset(str(ours.data)).to_table() == lance.dataset(str(tmp_path / "theirs.lance")).to_table()


def test_interrupted_between_two_parts_it_resumes_to_the_same_frames(episodes, tmp_path, in_this_process):
    def stop(done: int, rows: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    path, heard = tmp_path / "x.h5", []
    with pytest.raises(KeyboardInterrupt):
        collect(Single(), path, 3, on_episodes=stop)
    parts = sorted((tmp_path / "x.h5.partial").glob("*.npz"))
    assert len(parts) == 2 and parts[0].stat().st_size < episodes[0]["pixels"].nbytes / 10
    collect(Single(), path, 3, say=heard.append)
    assert heard == ["resuming after 2 complete episodes of an interrupted call"]
    with h5py.File(path) as file:
        assert np.array_equal(file["pixels"], np.concatenate([e["pixels"] for e in episodes]))


def test_a_part_with_damaged_frames_is_named(episodes, tmp_path):
    partial = HDF5Partial(tmp_path / "x.h5")
    partial.append([encode_images(episodes[0], gzip_frame)])
    stored = bytearray(partial.parts[0].read_bytes())
    frames = stored.index(encode_images(episodes[0], gzip_frame)["pixels"].frames[7])
    stored[frames + 100] ^= 1
    partial.parts[0].write_bytes(stored)
    with pytest.raises(UserError, match=r"000000\.npz is damaged .*delete it and run the same command again"):
        partial.assemble()


def test_parts_with_raw_frames_of_an_older_version_are_assembled(episodes, tmp_path):
    partial = HDF5Partial(tmp_path / "x.h5")
    partial.folder.mkdir()
    np.savez(partial.folder / "000000.npz", **episodes[0], ep_len=[31])
    assert partial.recover() == [31]
    partial.append([encode_images(episodes[1], gzip_frame)])
    partial.assemble()
    with h5py.File(partial.data) as file:
        assert np.array_equal(file["pixels"], np.concatenate([e["pixels"] for e in episodes[:2]]))


def test_frames_of_two_sizes_are_refused_within_a_part_and_between_parts(episodes, tmp_path):
    whole = encode_images(episodes[1], gzip_frame)
    small = whole | {"pixels": EncodedFrames(whole["pixels"].frames, (112, 112, 3))}
    partial = HDF5Partial(tmp_path / "x.h5")
    with pytest.raises(UserError, match=r"'pixels' has frames of \(224, 224, 3\) and of \(112, 112, 3\)"):
        partial.append([whole, small])
    partial.append([whole])
    partial.append([small])
    with pytest.raises(UserError, match=r"'pixels' has frames of \(224, 224, 3\) and of \(112, 112, 3\)"):
        partial.assemble()


@pytest.mark.parametrize("damage", ["flipped", "cut", "long", "missing"])
def test_a_damaged_chunk_names_the_file_and_the_remedy(damage, task, tmp_path):
    frames = np.random.default_rng(0).integers(0, 2, (6, 32, 32, 3), dtype=np.uint8)
    path = written(tmp_path / "x.h5", frames)
    chunk = bytearray(gzip_frame(frames[3]))
    chunk[len(chunk) // 2] ^= 1
    bad = {"flipped": chunk, "cut": gzip_frame(frames[3])[:-2], "long": gzip_frame(frames[3:5])}
    with h5py.File(path, "a", libver="latest") as file:
        if damage == "missing":
            file["pixels"].resize(8, axis=0)
            file["state"].resize(8, axis=0)
            file["action"].resize(8, axis=0)
            file["ep_len"][0] = 8
        else:
            file["pixels"].id.write_direct_chunk((3, 0, 0, 0), bytes(bad[damage]))
    data = EpisodeData(path, task, 32, 1)
    assert torch.equal(data.frame(2)[0].movedim(0, -1), torch.from_numpy(frames[2]))
    with pytest.raises(UserError, match=r"x\.h5: column 'pixels' cannot be read.*collect it again"):
        data.frame(7 if damage == "missing" else 3)
