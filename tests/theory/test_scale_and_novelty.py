"""Normalised distances and k-NN novelty: equal to brute force, and to the loss inside a batch."""

import numpy as np
import pytest
import torch
from scipy.spatial import cKDTree
from scipy.stats import percentileofscore

from atlas_wm.diagnose.stability import relational_distortion
from atlas_wm.losses import normalized_distances, relational
from atlas_wm.losses.relational import EPSILON_0
from atlas_wm.models import geometry
from atlas_wm.models.geometry import Scale, knn_novelty, percentile
from atlas_wm.rng import make_rng
from atlas_wm.theory import uniform_distortion_bound


def cloud(*shape, seed=0):
    return torch.randn(*shape, generator=make_rng(seed), dtype=torch.float64)


def uneven(*shape, seed=0):
    """Coordinates of different spread and place, far from 0."""
    return cloud(*shape, seed=seed) * torch.logspace(-2, 2, shape[-1], dtype=torch.float64) + 1e4


@pytest.mark.parametrize(("n", "m"), [(2, 1), (3, 5), (64, 7)])
def test_inside_a_batch_distances_are_those_of_the_loss_to_the_last_bit(n, m):
    x = 3 * cloud(n, m) + 1
    assert torch.equal(Scale.fit(x).distances(x, x), normalized_distances(x))
    torch.testing.assert_close(
        Scale.fit(x.float()).distances(x.float(), x.float()).float(), normalized_distances(x.float())
    )


def test_a_collapsed_batch_has_distances_of_zero():
    x = torch.full((5, 2), 0.25, dtype=torch.float64)
    assert torch.equal(Scale.fit(x).distances(x, x), normalized_distances(x))


def test_a_reference_bank_measures_points_outside_it():
    bank, a, b = uneven(40, 3), uneven(5, 3, seed=1), uneven(6, 3, seed=2)
    scale = Scale.fit(bank)
    deviations = bank.numpy().std(axis=0) + EPSILON_0
    pairs = [np.linalg.norm((x - y) / deviations) for x in bank.numpy() for y in bank.numpy()]
    expected = [[np.linalg.norm((x - y) / deviations) / np.mean(pairs) for y in b.numpy()] for x in a.numpy()]
    np.testing.assert_allclose(scale.distances(a, b), expected, rtol=1e-10)
    batched = scale.distances(torch.stack([a, a + 1]), torch.stack([b, b]))
    torch.testing.assert_close(batched[1], scale.distances(a + 1, b))


@pytest.mark.parametrize("repeated", [False, True])
def test_a_large_bank_is_measured_in_pieces(monkeypatch, repeated):
    bank = uneven(300, 5)
    bank = bank[torch.arange(300) % 20] if repeated else bank
    whole = Scale.fit(bank)
    monkeypatch.setattr(geometry, "ALL_PAIRS_AT_ONCE", 10)
    monkeypatch.setattr(geometry, "CHUNK", 7 * 300)
    assert Scale.fit(bank).mean_distance == pytest.approx(whole.mean_distance, rel=1e-7)


def test_mismatch_and_length_of_known_deviations():
    bank = torch.tensor([[-1.0, -2.0], [1.0, 2.0]]).double()  # deviations 1 and 2
    scale = Scale.fit(bank, epsilon=0.5)
    assert scale.mismatch == pytest.approx(1 / 1.5)
    distance = np.hypot(2 / 1.5, 4 / 2.5)  # half of the four pairs, the others 0
    assert scale.mean_distance == pytest.approx(distance / 2)
    assert scale.length == pytest.approx(1.5 * distance / 2)


@pytest.mark.parametrize("m", [1, 3, 50, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_novelty_equals_a_tree_search_over_the_standardised_bank(monkeypatch, m, dtype):
    monkeypatch.setattr(geometry, "CHUNK", 70 * 500)  # several pieces, the last one short
    bank, queries = uneven(500, m).to(dtype), uneven(151, m, seed=1).to(dtype)
    queries[:10] = bank[:10]
    deviations = bank.double().numpy().std(axis=0) + EPSILON_0
    tree = cKDTree(bank.double().numpy() / deviations)
    expected = tree.query(queries.double().numpy() / deviations, k=range(1, 8))[0].mean(axis=1)
    novelty = knn_novelty(queries, bank, 7)
    np.testing.assert_allclose(novelty, expected, rtol=1e-6)


def test_novelty_with_a_scale_is_the_mean_of_the_smallest_normalised_distances():
    bank, queries = uneven(30, 4), uneven(9, 4, seed=1)
    scale = Scale.fit(uneven(50, 4, seed=2))
    smallest = scale.distances(queries, bank).sort(dim=-1).values[:, :5].mean(dim=-1)
    torch.testing.assert_close(knn_novelty(queries, bank, 5, scale), smallest, rtol=1e-9, atol=0)
    assert knn_novelty(queries[:0], bank, 5).shape == (0,)


def test_left_out_a_point_is_not_its_own_neighbour(monkeypatch):
    monkeypatch.setattr(geometry, "CHUNK", 12 * 40)
    bank = uneven(40, 3)
    bank[7] = bank[5]  # another point at the same place does count
    scale = Scale.standardising(bank)
    novelty = knn_novelty(bank, bank, 4, scale, leave_one_out=True)
    others = [torch.cat([bank[:i], bank[i + 1 :]]) for i in range(40)]
    expected = torch.cat([knn_novelty(bank[i : i + 1], others[i], 4, scale) for i in range(40)])
    torch.testing.assert_close(novelty, expected, rtol=1e-9, atol=0)
    assert knn_novelty(bank, bank, 1, scale, leave_one_out=True)[5] == 0
    assert (novelty > knn_novelty(bank, bank, 4, scale)).all()


@pytest.mark.parametrize(("k", "left_out"), [(0, False), (6, False), (5, True)])
def test_more_neighbours_than_points_are_refused(k, left_out):
    with pytest.raises(ValueError, match="k must lie between 1 and"):
        knn_novelty(cloud(5, 2), cloud(5, 2), k, leave_one_out=left_out)


def test_percentile_ranks_among_the_bank_with_ties_halved():
    reference = torch.tensor([1.0, 2.0, 2.0, 3.0, 7.0]).double()
    values = torch.tensor([[0.0, 1.0], [2.0, 2.5], [7.0, 9.0]]).double()
    expected = [[percentileofscore(reference.numpy(), v, "mean") for v in row] for row in values.tolist()]
    assert percentile(values, reference).tolist() == expected


def test_a_bank_is_uniform_in_its_own_percentiles():
    novelty = knn_novelty(cloud(200, 3), cloud(200, 3), 5, leave_one_out=True)
    ranks = percentile(novelty, novelty)
    np.testing.assert_allclose(ranks.sort().values, (np.arange(200) + 0.5) / 2)


def test_distortion_is_that_of_all_pairs():
    z, p = cloud(20, 4), cloud(20, 3, seed=1)
    error = (normalized_distances(z) - normalized_distances(p)).abs().numpy()
    found = relational_distortion(normalized_distances(z), normalized_distances(p))
    assert found.rmse.square().item() == pytest.approx(relational(z, p).item(), rel=1e-12)
    assert found.percentile_95.item() == pytest.approx(np.percentile(error, 95), rel=1e-12)
    assert found.maximum == error.max()


def test_distortion_of_several_pools_at_once():
    d_z, d_p = cloud(3, 6, 6).abs(), cloud(3, 6, 6, seed=1).abs()
    together = relational_distortion(d_z, d_p)
    for i in range(3):
        for all_pools, one in zip(together, relational_distortion(d_z[i], d_p[i]), strict=True):
            torch.testing.assert_close(all_pools[i], one)


@pytest.mark.parametrize("n", [2, 3, 12])
def test_the_largest_distortion_is_at_most_n_times_the_rmse(n):
    for seed in range(20):
        d_z, d_p = normalized_distances(cloud(n, 3, seed=seed)), normalized_distances(cloud(n, 3, seed=seed + 100))
        found = relational_distortion(d_z, d_p)
        assert found.maximum <= uniform_distortion_bound(found.rmse, n) / 2**0.5 + 1e-12  # the sharper form
    one_pair = d_p.clone()
    one_pair[0, 1] = one_pair[1, 0] = d_p[0, 1] + 0.5
    found = relational_distortion(one_pair, d_p)  # attains it: no smaller factor would do
    assert found.maximum.item() == pytest.approx((uniform_distortion_bound(found.rmse, n) / 2**0.5).item())
