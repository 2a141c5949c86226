"""Novelty on the device is that of the CPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from on_device import DEVICE, FLOAT32, config_of, images, random_model
from scipy.spatial import cKDTree

from atlas_wm.losses.relational import EPSILON_0
from atlas_wm.models import geometry
from atlas_wm.models.bank import LatentBank
from atlas_wm.models.demonstrations import Demonstrations
from atlas_wm.models.geometry import knn_novelty
from atlas_wm.models.image_bank import SIDE, ImageBank, footprints
from atlas_wm.plan.planner import Planner
from atlas_wm.rng import make_rng


def uneven(count, size, seed):
    """Coordinates of different spread, far from 0."""
    cloud = torch.randn(count, size, generator=make_rng(seed), dtype=torch.float64)
    return cloud * torch.logspace(-2, 2, size, dtype=torch.float64) + 1e4


@pytest.mark.parametrize("size", [1, 3, 50, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_that_of_a_tree_search_and_of_the_cpu(monkeypatch, size, dtype):
    monkeypatch.setattr(geometry, "CHUNK", 70 * 500)  # several pieces, the last one short
    bank, queries = uneven(500, size, 0).to(dtype), uneven(151, size, 1).to(dtype)
    queries[:10] = bank[:10]
    deviations = bank.double().numpy().std(axis=0) + EPSILON_0
    tree = cKDTree(bank.double().numpy() / deviations)
    expected = tree.query(queries.double().numpy() / deviations, k=range(1, 8))[0].mean(axis=1)
    found = knn_novelty(queries.to(DEVICE), bank.to(DEVICE), 7)
    assert found.device.type == DEVICE.type
    np.testing.assert_allclose(found.cpu(), expected, rtol=1e-6)
    np.testing.assert_allclose(found.cpu(), knn_novelty(queries, bank, 7), rtol=1e-6)


def test_percentiles_are_those_of_the_cpu():
    bank = LatentBank.of([torch.randn(1500, 32, generator=make_rng(0))])
    latents = torch.randn(200, 32, generator=make_rng(1)) * torch.linspace(0.5, 2, 200)[:, None]
    found, expected = bank.percentiles(latents.to(DEVICE)).cpu(), bank.percentiles(latents)
    assert expected.min() < 5 and expected.max() == 100
    torch.testing.assert_close(found, expected, rtol=0, atol=0.1)  # one of 1,500 places


def test_a_plan_on_the_device_says_how_novel_its_frames_are():
    config = config_of(FLOAT32)
    model = random_model(config).eval()
    size = model.config.encoder.image_size
    model.build_bank(images(300, size, seed=s) for s in (3, 4))
    frames, goals = images(4, size, seed=1), images(4, size, seed=2)
    plans = Planner(model, config.plan).plan_batch(frames, goals, [make_rng(e) for e in range(4)])
    with torch.inference_mode():
        for name, some in (("frame", frames), ("goal", goals)):
            expected = model.bank.percentiles(model.encode(some).cpu())
            assert [getattr(p.novelty, name) for p in plans] == pytest.approx(expected.tolist(), abs=1.0)


def test_what_a_path_crosses_and_how_far_it_strays_are_those_of_the_cpu():
    known, frames = images(200, SIDE, seed=0), images(20, SIDE, seed=5)
    known = 255 * (known > 240).to(torch.uint8)  # sparse, so that there are footprints and other colours
    points, paths = torch.randn(200, 16, generator=make_rng(0)), torch.randn(20, 6, 16, generator=make_rng(1))
    bank = replace(LatentBank.of([points]), images=ImageBank.of([known], [known]), footprints=footprints([known]))
    expected = bank.crossed(frames, paths)
    assert expected is not None and expected.max() > 0
    assert torch.equal(bank.crossed(frames.to(DEVICE), paths.to(DEVICE)), expected)
    known = Demonstrations(points.half(), torch.empty(0), torch.arange(200), torch.full((5,), 0.1))
    strays = known.strayed(paths)
    assert strays is not None and 0 < strays.mean() < 1
    torch.testing.assert_close(known.strayed(paths.to(DEVICE)), strays, atol=1e-4, rtol=0)
