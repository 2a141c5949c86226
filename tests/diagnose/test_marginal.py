"""Marginal: each statistic by its definition, and Gaussian samples distinguished from others."""

import numpy as np
import pytest
import torch
from known import collapsed, identity
from scipy.integrate import quad
from scipy.stats import norm

from atlas_wm.diagnose.marginal import EPISODES, EVERY, STEPS, marginal, median_cvm, statistics
from atlas_wm.rng import make_rng
from atlas_wm.tasks import Task


def gaussian(count: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, d, generator=make_rng(9, seed), dtype=torch.float64)


def integrated_cvm(x: np.ndarray) -> float:
    """∫ (F_n − Φ)² dΦ, piece by piece between the sample's points."""
    ordered = np.sort(x)
    ends = [-10.0, *ordered, 10.0]
    pieces = [
        quad(lambda t, n=n: (n / len(x) - norm.cdf(t)) ** 2 * norm.pdf(t), ends[n], ends[n + 1])[0]
        for n in range(len(x) + 1)
    ]
    return sum(pieces)


def test_cvm_is_the_integral_it_stands_for():
    samples = [gaussian(9, 1)[:, 0], 0.3 * gaussian(9, 1, 1)[:, 0] + 1, gaussian(9, 1, 2)[:, 0] ** 3]
    integrals = [integrated_cvm(x.numpy()) for x in samples]
    for x, integral in zip(samples, integrals, strict=True):
        assert median_cvm(x[:, None]) == pytest.approx(integral, rel=1e-6)
    assert median_cvm(torch.stack(samples, dim=1)) == pytest.approx(sorted(integrals)[1], rel=1e-6)


def test_moments_by_hand():
    z = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 2.0], [4.0, 2.0]], dtype=torch.float64)
    found = statistics(z)  # mean (2, 1), covariance diag(4, 1)
    assert found["frames"] == 4
    assert found["mean_norm"] == pytest.approx(5**0.5)
    assert found["covariance_error"] == pytest.approx(3 / 2**0.5)
    shares = np.array([0.8, 0.2])
    assert found["effective_rank"] == pytest.approx(np.exp(-(shares * np.log(shares)).sum()))


def test_a_gaussian_sample_is_at_its_null_level_and_others_are_not():
    found = statistics(gaussian(1000, 16))
    for name in ("cvm", "cvm_null"):
        assert found[name] == pytest.approx(0.119 / 1000, rel=0.25)  # the median of n ∫ (F_n − Φ)² dΦ is 0.119
    assert found["cvm_whitened"] < 0.7 * found["cvm_null"]  # mean and covariance are fitted
    assert statistics(gaussian(1000, 16) + 0.3)["cvm"] > 5 * found["cvm_null"]
    assert statistics(2 * gaussian(1000, 16))["cvm"] > 20 * found["cvm_null"]


def test_whitening_takes_scale_and_place_away_but_not_shape():
    stretch = torch.linspace(0.2, 3, 4, dtype=torch.float64)
    assert (
        statistics(gaussian(1000, 4) * stretch + 5)["cvm_whitened"] < 2 * statistics(gaussian(1000, 4))["cvm_null"]
    )
    two_clouds = gaussian(1000, 4) * 0.1 + 5 * torch.sign(gaussian(1000, 4, 1))
    assert statistics(two_clouds)["cvm_whitened"] > 5 * statistics(two_clouds)["cvm_null"]


def test_a_latent_of_lower_rank_is_whitened_where_it_lives():
    flat = gaussian(1000, 3) @ gaussian(3, 8, 1)
    found = statistics(flat)
    assert found["cvm_whitened"] < 2 * found["cvm_null"] and found["effective_rank"] < 3.01


@pytest.mark.parametrize("value", [0.0, 0.1])
def test_a_constant_latent_has_covariance_error_1_and_only_finite_numbers(value):
    found = statistics(torch.full((50, 5), value, dtype=torch.float64))
    assert found["covariance_error"] == pytest.approx(1)
    assert found["mean_norm"] == pytest.approx(value * 5**0.5)
    assert found["effective_rank"] == pytest.approx(1) and np.isfinite(list(found.values())).all()


class RandomStates:
    def random_states(self, task, episodes, steps, every, seed) -> np.ndarray:
        return np.random.default_rng(seed).normal(size=(episodes * steps // every, 2)).astype(np.float32)


def test_the_frames_are_those_of_random_actions():
    identity_, collapsed_ = identity(), collapsed()
    for run in (identity_, collapsed_):
        run.simulator, run.data = RandomStates(), type("Data", (), {"task": Task})
    found = marginal(identity_, seed=4)
    states = torch.from_numpy(RandomStates().random_states(None, EPISODES, STEPS, EVERY, 4)).double()
    assert found == statistics(states) and found["frames"] == 1000
    assert marginal(collapsed_, 4)["covariance_error"] == pytest.approx(1, abs=1e-6)
