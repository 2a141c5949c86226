"""Probes find what is there, and nothing where there is nothing."""

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from atlas_wm.models import probes
from atlas_wm.rng import make_rng


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(probes, "STEPS", 250)


def cloud(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, d, generator=make_rng(seed), dtype=torch.float64)


def test_ridge_is_the_librarys():
    x, queries, y = cloud(200, 6) * 3 + 5, cloud(40, 6, 1), cloud(200, 2, 2)
    mean, std = x.mean(0), x.std(0, correction=0)
    theirs = Ridge(alpha=probes.PENALTY * len(x)).fit((x - mean) / std, y)
    ours = probes.ridge_probe(x, y, queries)
    np.testing.assert_allclose(ours, theirs.predict((queries - mean) / std), rtol=1e-9)


def test_a_linear_coordinate_is_read_by_both_and_a_bent_one_by_the_mlp_alone():
    x, queries = cloud(3000, 8), cloud(500, 8, 1)
    straight, bent = (
        (lambda t: t[:, :2] @ torch.tensor([[1.0, 2.0], [-1.0, 1.0]]).double()),
        lambda t: t[:, :1] ** 2,
    )
    for probe, of_straight, of_bent in ((probes.ridge_probe, 0.999, None), (probes.mlp_probe, 0.95, 0.8)):
        found = probes.explained(probe(x, straight(x), queries), straight(queries))
        assert found > of_straight
        found = probes.explained(probe(x, bent(x), queries), bent(queries))
        assert found > of_bent if of_bent else abs(found) < 0.1


@pytest.mark.parametrize("probe", [probes.ridge_probe, probes.mlp_probe])
def test_nothing_is_read_from_noise_or_from_a_constant(probe):
    y, queries = cloud(3000, 2, 5), cloud(500, 2, 6)
    assert probes.explained(probe(torch.full((3000, 4), 7.0), y, torch.full((500, 4), 7.0)), queries) < 0.02
    assert probes.explained(probe(cloud(3000, 4), y, cloud(500, 4, 1)), queries) < 0.1


def test_an_affine_change_of_the_representation_changes_nothing_for_a_linear_probe_without_penalty(monkeypatch):
    monkeypatch.setattr(probes, "PENALTY", 0.0)
    x, queries, y, mix = cloud(300, 5), cloud(50, 5, 1), cloud(300, 2, 2), cloud(5, 5, 3)
    torch.testing.assert_close(
        probes.ridge_probe(x, y, queries),
        probes.ridge_probe(x @ mix + 4, y, queries @ mix + 4),
        rtol=1e-8,
        atol=1e-8,
    )


def test_errors_have_the_unit_of_the_coordinate_and_angles_turn_the_short_way():
    y = torch.zeros(4, 2)
    assert probes.error(torch.tensor([[3.0, 4.0]]).repeat(4, 1), y) == pytest.approx(5)
    angles = torch.tensor([0.1, 3.1]).double()
    turned = torch.tensor([2 * math.pi - 0.1, -3.1]).double()
    waves = [torch.stack([a.cos(), a.sin()], 1) for a in (angles, turned)]
    expected = math.degrees((0.2 + (2 * math.pi - 6.2)) / 2)
    assert probes.error(waves[1], waves[0], angle=True) == pytest.approx(expected, rel=1e-5)
    assert math.isnan(probes.explained(y, torch.ones(4, 2)))


def test_the_same_seed_gives_the_same_probe_and_the_global_random_state_stays():
    x, y = cloud(100, 3), cloud(100, 1, 1)
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = probes.mlp_probe(x, y, x)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first, probes.mlp_probe(x, y, x))
