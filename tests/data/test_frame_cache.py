import numpy as np
import pytest
import torch

from atlas_wm.data import frame_cache
from atlas_wm.data.clips import ClipDataset, clip_index, fit_normalizer
from atlas_wm.data.collect import collect
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.data.frame_cache import cache_on_device, tiled, untiled
from atlas_wm.rng import make_rng


@pytest.fixture(scope="module")
def tworoom_frames(task, tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "few.h5"
    collect(task, path, 12, seed=5, pixels=False, workers=1)
    return EpisodeData(path, task, image_size=56, frameskip=5)


@pytest.fixture(scope="module")
def kept(tworoom_frames):
    return cache_on_device(tworoom_frames, torch.device("cpu"), workers=1)


@pytest.mark.parametrize("tile", [1, 4, 7])
def test_tiles_put_together_are_the_frame(tile):
    frames = torch.randint(0, 256, (3, 3, 28, 28), dtype=torch.uint8, generator=make_rng(0))
    parts = tiled(frames, tile)
    assert parts.shape == (3, (28 // tile) ** 2, 3 * tile**2)
    assert torch.equal(untiled(parts, tile), frames)


def test_kept_frames_are_the_frames_bit_for_bit_in_any_order(tworoom_frames, kept):
    data = tworoom_frames
    assert kept is not None
    rows = np.random.default_rng(0).integers(0, len(data.actions), (5, 4))
    expected = data.frames_of(rows.reshape(-1)).unflatten(0, (5, 4))
    assert torch.equal(kept.read(rows), expected)
    assert kept.bytes < 0.5 * len(data.actions) * expected[0, 0].numel()


class Noise:
    """A few frames with something new in every tile, the last included."""

    def __init__(self, image_size, rows=5):
        self.image_size, self.actions = image_size, np.zeros((rows, 2))
        shape = (rows, 3, image_size, image_size)
        self.frames = torch.randint(0, 256, shape, dtype=torch.uint8, generator=make_rng(image_size))

    def frames_of(self, rows):
        return self.frames[rows]


@pytest.mark.parametrize("size", [225, 195, 187, 223, 181, 1, 32, 96, 224, 256])
def test_every_image_size_comes_back_as_it_was(size):
    """Also where no tile fits, as in the prime 223, and a frame has more tiles than 16 bits can number."""
    data = Noise(size)
    kept = cache_on_device(data, torch.device("cpu"), workers=1)
    assert torch.equal(kept.read(np.array([[4, 0], [2, 2]])), data.frames[[4, 0, 2, 2]].unflatten(0, (2, 2)))


def test_what_does_not_fit_stays_on_disk_unless_it_has_to(tworoom_frames, monkeypatch, caplog):
    monkeypatch.setattr(frame_cache, "free_memory", lambda device: 1000)
    with caplog.at_level("INFO", "atlas_wm"):
        assert cache_on_device(tworoom_frames, torch.device("cpu"), workers=1) is None
    assert "frames stay on disk" in caplog.text
    assert cache_on_device(tworoom_frames, torch.device("cpu"), workers=1, always=True) is not None


def test_as_many_frames_as_fit_are_cached(tworoom_frames, kept, monkeypatch, caplog):
    rows = len(tworoom_frames.actions)
    monkeypatch.setattr(frame_cache, "free_memory", lambda device: int(0.6 * kept.bytes / frame_cache.SHARE))
    with caplog.at_level("INFO", "atlas_wm"):
        part = cache_on_device(tworoom_frames, torch.device("cpu"), workers=1)
    assert 0.4 * rows < part.rows < 0.7 * rows and part.bytes <= 0.6 * kept.bytes
    assert f"{part.rows} of {rows} frames in memory" in caplog.text
    assert torch.equal(part.read(np.arange(part.rows)), tworoom_frames.frames_of(np.arange(part.rows)))


def test_batches_from_kept_frames_are_those_from_disk(tworoom_frames, kept, tiny_config):
    data, config = tworoom_frames, tiny_config.model
    clips = clip_index(data.lengths, config.clip_rows)
    normalizer = fit_normalizer(data, clips, config)
    which = [3, 0, len(clips) - 1]
    expected = ClipDataset(data, clips, normalizer, config).__getitems__(which)
    got = ClipDataset(data, clips, normalizer, config, kept).__getitems__(which)
    assert torch.equal(got.frames, expected.frames) and torch.equal(got.actions, expected.actions)


def test_the_memory_is_told_in_a_unit_that_fits(tworoom_frames, caplog):
    with caplog.at_level("INFO", "atlas_wm"):
        cache_on_device(Noise(32, rows=600), torch.device("cpu"))
        small = cache_on_device(tworoom_frames, torch.device("cpu"))
    noise, frames = caplog.messages
    assert noise == "fast path: 600 of 600 frames in memory, 2 MB"  # no tile is like another
    assert frames.endswith(
        f"{small.bytes / 1e6:.0f} MB ({small.bytes / small.rows / 1e3:.0f} kB each instead of 9)"
    )
