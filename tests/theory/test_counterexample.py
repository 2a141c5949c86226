"""Theorem cf_ambiguity: laws that a finite set of frequencies takes for a Gaussian, and transport does not."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.integrate import quad, quad_vec
from scipy.stats import chi, norm

from atlas_wm.losses import gaussian_cells, sigreg, wemreg
from atlas_wm.losses.sigreg import KNOTS, LARGEST_FREQUENCY
from atlas_wm.theory import GaussianTwin

FREQUENCIES = {
    "one": np.array([1.0]),
    "irregular": np.array([0.3, 1.1, 2.5]),
    "fast": np.array([2.0, 4.0, 8.0]),
    "published": np.linspace(0, LARGEST_FREQUENCY, KNOTS),
}
# A fifth of what was measured or less; the same sum for the Gaussian itself is below 1e-28. For 17 frequencies
# the constraints are dependent to rounding, which then picks one of many solutions: a tenth of the least seen.
AT_LEAST = {
    (2, "one"): 1e-4,
    (2, "irregular"): 1e-5,
    (2, "fast"): 2e-5,
    (2, "published"): 1e-7,
    (8, "one"): 2e-6,
    (8, "irregular"): 1e-8,
    (8, "fast"): 3e-6,
    (8, "published"): 5e-14,
}
AXIS = torch.ones(1, 1, dtype=torch.float64)


@pytest.fixture(scope="module", params=AT_LEAST, ids=lambda case: f"d{case[0]}-{case[1]}")
def case(request):
    return request.param, GaussianTwin.build(FREQUENCIES[request.param[1]], request.param[0])


def projected_integrals(twin, frequencies):
    """∫ p, ∫ x² p and ∫ cos(t x) p from the density of a projection, shell by shell: not how the twin was built."""

    def integrand(x):
        return np.concatenate([[1, x * x], np.cos(frequencies * x)]) * twin.projected_density(np.array(x))

    ends = [*twin.edges, 12.0]
    pieces = pairwise(ends)
    return 2 * sum(quad_vec(integrand, *piece, epsabs=1e-13, epsrel=1e-12)[0] for piece in pieces)


def test_mean_zero_covariance_identity_and_gaussian_at_every_frequency(case):
    (dimension, name), twin = case
    t = FREQUENCIES[name]
    assert twin.moments() == pytest.approx((1, dimension), abs=1e-12)
    mass, variance, *cosines = projected_integrals(twin, t)
    assert mass == pytest.approx(1, abs=1e-10) and variance == pytest.approx(1, abs=1e-10)
    target = np.exp(-t * t / 2)
    assert np.square(twin.characteristic_function(t) - target).sum() < 1e-28
    assert np.square(np.array(cosines) - target).sum() < 1e-20
    x = np.linspace(0, 6, 50)
    np.testing.assert_array_equal(twin.projected_density(-x), twin.projected_density(x))  # mean and sines are 0


def test_density_lies_between_a_half_and_three_halves(case):
    _, twin = case
    ratio = twin.density_ratio(np.linspace(0, 8, 4001))
    assert ratio.min() >= 0.5 and ratio.max() == 1.5
    assert twin.density_ratio(twin.edges[-1] + 1e-9) == 1
    assert len(twin.heights) == len(FREQUENCIES[case[0][1]]) + 3


def test_projected_density_is_the_mean_of_the_ratio_over_the_other_coordinates(case):
    (dimension, _), twin = case
    for x in (0.0, 0.7, 2.3):
        walls = np.sqrt(np.maximum(twin.edges**2 - x * x, 0))
        ends = np.unique(np.append(walls, 12.0))
        mean = sum(
            quad(lambda w, x=x: chi.pdf(w, dimension - 1) * twin.density_ratio(np.hypot(x, w)), a, b)[0]
            for a, b in pairwise(ends)
        )
        assert twin.projected_density(np.array(x)) == pytest.approx(norm.pdf(x) * mean, rel=1e-9)


def test_tail_is_the_integral_of_the_density(case):
    _, twin = case
    for x in (0.0, 0.4, 1.9, twin.edges[-1] + 0.1):
        ends = [x, *twin.edges[twin.edges > x], 12.0]
        pieces = pairwise(ends)
        tail = sum(quad(lambda y: float(twin.projected_density(np.array(y))), a, b)[0] for a, b in pieces)
        assert twin.projected_tail(np.array(x)) == pytest.approx(tail, abs=1e-10)


def test_transport_sees_it(case):
    key, twin = case
    same = GaussianTwin(twin.dimension, twin.edges, np.zeros_like(twin.heights))
    assert same.wemreg() < 1e-28
    assert twin.wemreg() > AT_LEAST[key]
    x, step = np.linspace(0, twin.edges[-1], 4001, retstep=True)  # the same integral by the trapezoid rule
    integrand = (twin.gaussian_position(x) - x) ** 2 * twin.projected_density(x)
    assert twin.wemreg() == pytest.approx(2 * step * integrand.sum(), rel=0.01)


@pytest.mark.parametrize("dimension", [1, 2, 8])
def test_the_loss_functions_themselves(dimension):
    """On 20,000 quantile-cell means, SIGReg sees 1e-5 of what it sees of an equally distant rescaling."""
    twin = GaussianTwin.build(FREQUENCIES["published"], dimension)
    means, kappa = gaussian_cells(20_000)
    x = np.linspace(0, 5, 4001)
    place = twin.gaussian_position(x)
    shift = np.interp(means.abs(), place, x - place)  # Φ⁻¹∘F turned round
    sample = means + means.sign() * torch.from_numpy(shift)
    distance = twin.wemreg()
    assert wemreg(sample[:, None], AXIS).item() - kappa == pytest.approx(distance, rel=0.02)
    rescaled = (1 + distance**0.5) * means
    assert wemreg(rescaled[:, None], AXIS).item() - kappa == pytest.approx(distance, rel=0.02)
    gaussian, seen, seen_rescaled = (sigreg(z[:, None], AXIS).item() for z in (means, sample, rescaled))
    assert abs(seen - gaussian) < 1e-5 * abs(seen_rescaled - gaussian)


def test_other_frequencies_would_see_it():
    twin = GaussianTwin.build(FREQUENCIES["published"], 2)
    t = np.linspace(LARGEST_FREQUENCY, 12, 100)
    assert np.abs(twin.characteristic_function(t) - np.exp(-t * t / 2)).max() > 1e-4


def test_in_the_dimension_of_a_latent_it_exists_and_is_faint():
    distances = [GaussianTwin.build(FREQUENCIES["one"], d).wemreg() for d in (2, 8, 32, 192)]
    assert distances == sorted(distances, reverse=True)
    assert 1e-10 < distances[-1] < 1e-8
