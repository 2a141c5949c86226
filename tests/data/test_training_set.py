"""The training set owns its caches and hands out batches: the same ones from any start and with any cache."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from atlas_wm.data import frame_cache
from atlas_wm.data import stream as stream_module
from atlas_wm.data import training_set as module
from atlas_wm.data.frame_cache import FrameCache, cache_on_device
from atlas_wm.data.stream import BATCHNORM, HELD_OUT
from atlas_wm.data.training_set import open_training_set
from atlas_wm.errors import UserError

CPU = torch.device("cpu")


@pytest.fixture
def opened(dataset_path, task, tiny_config):
    def open_with(**changes):
        config = replace(tiny_config, train=replace(tiny_config.train, **changes))
        return open_training_set(dataset_path, task, config)

    return open_with


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_batches_after_a_step_are_the_rest_of_all_batches(opened):
    training_set = opened(steps=5)
    whole, rest = (list(training_set.batches(start, CPU)) for start in (0, 3))
    assert len(whole) == 5 and len(rest) == 2
    assert all(same(a, b) for a, b in zip(whole[3:], rest, strict=True))
    assert not same(whole[0], whole[1])
    assert whole[0].frames.shape == (16, 4, 3, 32, 32) and whole[0].actions.shape == (16, 3, 10)


def test_steps_follow_from_epochs_unless_they_are_given(opened):
    given, epochs = opened(steps=5), opened(steps=None, epochs=3)
    assert given.steps == 5 and epochs.steps == 3 * (len(epochs.training) // 16) == 3 * epochs.steps_per_epoch


def test_a_batch_that_cannot_be_filled_is_refused_at_once(opened):
    with pytest.raises(UserError, match="do not fill one batch of 100000"):
        opened(batch=100_000, steps=1).batches(0, CPU)
    with pytest.raises(UserError, match=r"lower --train\.batch or --train\.holdout"):  # before frames are read
        opened(batch=100_000, steps=1, cache_frames="always").build_cache(CPU, Path(), on_read=pytest.fail)


def sampled(training_set, clips, count):
    return [training_set._dataset(clips).__getitems__(which) for which in training_set._sampled(clips, count)]


def test_sampled_batches_are_always_the_same_and_end_with_the_whole_ones(opened):
    """Means over batches count each alike, so a small one would count for too much."""
    training_set = opened()
    clips = training_set.validation.take(np.arange(35))
    first, again = (sampled(training_set, clips, 10) for _ in range(2))
    assert [len(batch.actions) for batch in first] == [16, 16]
    assert all(same(a, b) for a, b in zip(first, again, strict=True))
    assert len(sampled(training_set, clips, 1)) == 1
    for few, sizes in ((17, [16]), (3, [3]), (1, [])):
        part = sampled(training_set, training_set.validation.take(np.arange(few)), 10)
        assert [len(batch.actions) for batch in part] == sizes


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_one_loader_delivers_steps_and_validations_in_any_number_of_processes(opened, workers):
    """Bit for bit what plain reading gives, also where a sample is not used or its use ends early."""
    training_set = opened(steps=6, log_every=2, validate_every=4, batchnorm_batches=3, workers=workers)
    clips = training_set._dataset(training_set.training)
    stream = training_set.batches(1, CPU)  # as after a checkpoint
    validated = []
    for step, batch in enumerate(stream, start=2):
        assert same(batch, clips.__getitems__(training_set._order().of_step(step)))
        if not training_set.validates_after(step):
            continue
        validated.append(step)
        if step == 4:  # a model without BatchNorm does not read its samples
            got = list(stream.samples(HELD_OUT))
            expected = sampled(training_set, training_set.validation, module.VALIDATION_BATCHES)
        else:
            got = [next(stream.samples(BATCHNORM))]
            expected = sampled(training_set, training_set.training, 1)
        assert len(got) == len(expected) and all(same(a, b) for a, b in zip(got, expected, strict=True))
    assert step == 6 and validated == [4, 6]


@pytest.mark.parametrize(
    ("wanted", "cores", "free", "workers"),
    [
        (None, 16, 2**40, 15),
        (None, 64, 2**40, 16),
        (None, 1, 2**40, 0),
        (None, 16, 10_000, 3),
        (None, 16, 0, 0),
        (0, 16, 2**40, 0),
        (20, 16, 2**40, 20),
        (20, 16, 10_000, 3),
    ],
)
def test_loader_processes_follow_cores_and_shared_memory(
    monkeypatch, caplog, tmp_path, wanted, cores, free, workers
):
    monkeypatch.setattr(stream_module, "own_cores", lambda: cores)
    monkeypatch.setattr(stream_module, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(stream_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert stream_module.loader_processes(wanted, batch_bytes=1000) == workers
    assert ("--shm-size" in caplog.text) == (free < 2**40)


def test_loader_processes_start_by_default_only_where_a_gpu_streams_frames(opened, monkeypatch):
    monkeypatch.setattr(module, "loader_processes", lambda wanted, batch_bytes: wanted or batch_bytes)
    training_set = opened(steps=2)
    assert training_set._workers(CPU) == 0
    assert training_set._workers(torch.device("cuda")) == 16 * 4 * 3 * 32 * 32
    assert opened(workers=5)._workers(torch.device("cuda")) == 5


@pytest.mark.parametrize(("share", "workers"), [(0.1, 0), pytest.param(0.97, 2, marks=pytest.mark.slow)])
def test_a_part_of_the_frames_on_the_device_gives_the_same_batches(opened, tmp_path, monkeypatch, share, workers):
    settings = {"steps": 4, "log_every": 1, "validate_every": 4, "batchnorm_batches": 2}
    plain = opened(**settings, workers=0).batches(0, CPU)
    training_set = opened(**settings, workers=workers)
    expected = [*islice(plain, 4), *plain.samples(BATCHNORM), *plain.samples(HELD_OUT)]
    whole = cache_on_device(training_set.data, CPU, 1)
    free = int(share * whole.bytes / frame_cache.SHARE)
    monkeypatch.setattr(frame_cache, "free_memory", lambda device: free)
    monkeypatch.setattr(training_set, "_cache_frames", lambda *_: cache_on_device(training_set.data, CPU, 1))
    training_set.build_cache(CPU, tmp_path)
    assert training_set.cache is None and 0 < training_set.part.rows < training_set.info.rows
    stream = training_set.batches(0, CPU)
    got = [*islice(stream, 4), *stream.samples(BATCHNORM), *stream.samples(HELD_OUT)]
    assert len(got) == 4 + 2 + 4 and all(same(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(("workers", "expected"), [(0, 0), (5, 5), (None, 3)])
def test_frames_are_read_by_as_many_processes_as_training_would_use(
    opened, tmp_path, monkeypatch, workers, expected
):
    """Also where there are many frames: --train.workers 0 means none, and shared memory limits the others."""
    monkeypatch.setattr(stream_module, "own_cores", lambda: 8)
    monkeypatch.setattr(stream_module, "SHARED_MEMORY", tmp_path)
    free = 9 * frame_cache.AT_ONCE * 3 * 32 * 32 if workers is None else 2**40
    monkeypatch.setattr(stream_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    started = []

    def recorded(dataset, requests, workers, **_):
        started.append(workers)
        return map(dataset.__getitems__, requests)

    monkeypatch.setattr(frame_cache, "make_loader", recorded)
    monkeypatch.setattr(frame_cache, "AT_ONCE", 64)  # more pieces
    opened(workers=workers, cache_frames="always").build_cache(CPU, tmp_path)
    assert started == [expected]


def test_weights_do_not_depend_on_how_frames_are_read(opened, tmp_path):
    """Dropout draws from torch's generator, so reading must leave it in the same state."""
    drawn = []
    for choice in ("never", "auto", "always"):
        for steps in (1, 1000):
            torch.manual_seed(0)
            opened(cache_frames=choice, steps=steps).build_cache(CPU, tmp_path)
            drawn.append((steps, torch.rand(1).item()))
    assert len(set(drawn)) == 2


def test_the_clips_of_a_step_are_those_of_its_batch(opened):
    training_set = opened(steps=5)
    clips = training_set.clips_of_step(2)
    batch = list(islice(training_set.batches(0, CPU), 2))[1]
    rows = np.array([clip["row"] for clip in clips])
    assert torch.equal(batch.frames[:, 0], training_set.data.frames_of(rows))
    assert all(clip["finite"] for clip in clips)
    offsets = training_set.data.offsets
    assert all(clip["row"] == offsets[clip["episode"]] + clip["step"] for clip in clips)


def tokens_of(frames):
    return torch.nn.functional.adaptive_avg_pool2d(frames.float(), 2).flatten(2).mT / 255


@pytest.fixture
def frozen(opened, monkeypatch):
    """A training set with 4 tokens of 3 numbers for each frame."""

    def open_with(**changes):
        training_set = opened(**changes)
        monkeypatch.setattr(type(training_set.config.model), "latent_shape", property(lambda self: (4, 3)))
        return training_set

    return open_with


def test_cached_tokens_take_the_place_of_frames(frozen, tmp_path):
    training_set = frozen(cache_tokens="always", steps=2)
    plain = next(training_set.batches(0, CPU))
    seen = []
    training_set.build_cache(
        CPU, tmp_path, encode=tokens_of, on_read=lambda done, total: seen.append((done, total))
    )
    cached = next(training_set.batches(0, CPU))
    assert training_set.caches_tokens and seen[-1] == (training_set.info.rows,) * 2
    expected = tokens_of(plain.frames.flatten(0, 1)).unflatten(0, (16, 4)).half()
    assert torch.equal(cached.frames, expected) and torch.equal(cached.actions, plain.actions)
    stream = training_set.batches(1, CPU)
    next(stream)  # of the last step
    assert next(stream.samples(HELD_OUT)).frames.shape == (16, 4, 4, 3)
    training_set.remove_cache()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("choice", "steps", "decided", "cached"),
    [
        ("never", 1000, None, False),
        ("auto", 1000, None, True),
        ("auto", 1, None, False),  # most frames are read once at most
        ("auto", 1, True, True),  # as the interrupted run did
        ("always", 1, False, False),
    ],
)
def test_tokens_are_cached_where_it_pays(frozen, tmp_path, choice, steps, decided, cached):
    training_set = frozen(cache_tokens=choice, steps=steps)
    training_set.build_cache(CPU, tmp_path, encode=tokens_of, tokens=decided)
    assert training_set.caches_tokens == cached


def test_a_whole_token_file_is_not_written_again(frozen, tmp_path):
    for encode in (tokens_of, None):
        training_set = frozen(cache_tokens="always")
        refuse = encode or (lambda frames: pytest.fail("encoded again"))
        training_set.build_cache(CPU, tmp_path, encode=refuse)
        assert training_set.caches_tokens


def test_encoding_that_was_interrupted_starts_over(frozen, tmp_path):
    """The file has its whole size from the first row on."""
    left = iter(range(2))

    def interrupted(frames):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return tokens_of(frames)

    with pytest.raises(KeyboardInterrupt):
        frozen(cache_tokens="always").build_cache(CPU, tmp_path, encode=interrupted)
    assert list(tmp_path.iterdir()) == []
    training_set, last = frozen(cache_tokens="always"), np.array([-1])
    training_set.build_cache(CPU, tmp_path, encode=tokens_of)
    assert torch.equal(
        training_set.cache.read(last), tokens_of(training_set.data.frames_of(last + training_set.info.rows)).half()
    )


@pytest.mark.parametrize(
    ("choice", "steps", "asked"),
    [("never", 1000, None), ("auto", 1000, False), ("auto", 1, None), ("always", 1, True)],
)
def test_frames_are_cached_where_it_pays(opened, tmp_path, monkeypatch, choice, steps, asked):
    calls = []
    build = module.cache_on_device

    def recorded(data, device, workers, *, always, on_progress):
        calls.append(always)
        return build(data, device, workers, always=always, on_progress=on_progress)

    monkeypatch.setattr(module, "cache_on_device", recorded)
    training_set = opened(cache_frames=choice, steps=steps)
    expected = next(training_set.batches(0, CPU))
    training_set.build_cache(torch.device("mps"), tmp_path)
    assert training_set.cache is None and calls == []
    training_set.build_cache(CPU, tmp_path)
    assert calls == ([] if asked is None else [asked])
    assert isinstance(training_set.cache, FrameCache) == (asked is not None)
    assert same(next(training_set.batches(0, CPU)), expected)
