"""Geometry: principal components as scikit-learn's, novelty of true states as counted."""

import numpy as np
import pytest
from known import collapsed, skewed
from scipy.stats import spearmanr
from sklearn.decomposition import PCA

from atlas_wm.diagnose.diagnose import finite
from atlas_wm.diagnose.geometry import geometry


@pytest.fixture(scope="module")
def run():
    return skewed()


@pytest.fixture(scope="module")
def result(run):
    return geometry(run, seed=0)


@pytest.fixture(scope="module")
def rows(run):
    """All of them, there being few, in an order that the seed gives."""
    return np.random.default_rng([0, 2]).choice(90, 90, replace=False)


def test_points_are_the_principal_components_up_to_sign(run, result, rows):
    z = run.data.states[rows] @ run.model.matrix.numpy()
    theirs = PCA(2).fit(z.astype(np.float64))
    points, expected = np.array(result["points"]), theirs.transform(z)
    for axis in (0, 1):
        sign = np.sign(points[:, axis] @ expected[:, axis])
        np.testing.assert_allclose(points[:, axis], sign * expected[:, axis], atol=1e-4)
    assert result["explained"] == pytest.approx(theirs.explained_variance_ratio_.tolist(), rel=1e-5)


def test_novelty_is_the_rank_of_the_true_state_among_the_banks(run, result, rows):
    states = run.data.states.astype(np.float64)
    bank = states[run.bank_rows] / (states[run.bank_rows].std(axis=0) + 1e-6)
    scaled, k = states[rows] / (states[run.bank_rows].std(axis=0) + 1e-6), 29
    novelty = [np.sort(np.linalg.norm(x - bank, axis=1))[:k].mean() for x in scaled]
    usual = [
        np.sort(np.linalg.norm(bank[i] - np.delete(bank, i, axis=0), axis=1))[:k].mean() for i in range(len(bank))
    ]
    expected = [100 * np.mean([(u < n) + 0.5 * (u == n) for u in usual]) for n in novelty]
    np.testing.assert_allclose(result["novelty_percentile"], expected, atol=1e-4)
    z = states[rows] @ run.model.matrix.double().numpy()
    away = np.linalg.norm(z - z.mean(axis=0), axis=1)
    assert result["rank_correlation"] == pytest.approx(spearmanr(away, novelty).statistic, abs=1e-3)


def test_the_map_is_a_function_of_the_seed(run, result):
    assert geometry(run, seed=0) == result != geometry(run, seed=1)


@pytest.mark.filterwarnings("error")
def test_a_constant_latent_is_one_point_without_a_rank_correlation():
    result = finite(geometry(collapsed(), seed=0))
    np.testing.assert_allclose(result["points"], 0, atol=1e-6)
    assert result["rank_correlation"] is None
    assert all(np.isfinite(result["explained"])) and all(np.isfinite(result["novelty_percentile"]))
