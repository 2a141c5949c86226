import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from atlas_wm.losses import gaussian_cells, wemreg
from atlas_wm.losses.projections import random_directions
from atlas_wm.rng import make_rng

SIZES = [2, 3, 7, 64, 513]
SAMPLERS = {
    "gaussian": lambda rng, n: rng.normal(size=n),
    "shifted and wide": lambda rng, n: 5 + 3 * rng.normal(size=n),
    "uniform": lambda rng, n: rng.uniform(-1, 1, size=n),
    "heavy tails": lambda rng, n: rng.standard_t(2, size=n),
    "ties": lambda rng, n: rng.integers(-1, 2, size=n).astype(float),
    "collapsed": lambda rng, n: np.zeros(n),
}
AXIS = torch.ones(1, 1, dtype=torch.float64)  # the one direction there is in 1-D


def integral(f, low, high):
    return quad(f, low, high, epsabs=1e-12, epsrel=1e-12)[0]


def density(q):
    return math.exp(-q * q / 2) / math.sqrt(2 * math.pi)


def edges(n):
    return norm.ppf(np.arange(n + 1) / n)


def integrated_w2(x):
    """∫(F⁻¹(p) − Φ⁻¹(p))² dp with p = Φ(q), cell by cell: accurate in the tails too."""
    x, q = np.sort(x), edges(len(x))
    return sum(integral(lambda t, i=i: (x[i] - t) ** 2 * density(t), q[i], q[i + 1]) for i in range(len(x)))


def column(x):
    return torch.as_tensor(np.asarray(x), dtype=torch.float64)[:, None]


def cloud(*shape, seed=0):
    return torch.randn(*shape, generator=make_rng(seed), dtype=torch.float64)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("n", SIZES)
def test_equals_the_integral_of_squared_quantile_differences(n, sampler):
    x = SAMPLERS[sampler](np.random.default_rng(n), n)
    assert wemreg(column(x), AXIS).item() == pytest.approx(integrated_w2(x), rel=1e-6, abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-10, 10), min_size=1, max_size=20))
def test_equals_the_integral_for_any_sample(x):
    assert wemreg(column(x), AXIS).item() == pytest.approx(integrated_w2(x), abs=1e-6)


@pytest.mark.parametrize("n", SIZES)
def test_cells_are_the_conditional_means_of_a_gaussian(n):
    means, kappa = gaussian_cells(n)
    q = edges(n)
    expected = [n * integral(lambda t: t * density(t), q[i], q[i + 1]) for i in range(n)]
    assert means.dtype == torch.float64
    torch.testing.assert_close(means, torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=0)
    assert abs(means.sum().item()) < 1e-9
    assert 0 < kappa < 1
    assert kappa == pytest.approx(1 - np.mean(np.square(expected)), abs=1e-9)


def test_a_batch_needs_a_sample():
    with pytest.raises(ValueError, match="at least one sample"):
        gaussian_cells(0)


@pytest.mark.parametrize("n", SIZES)
def test_smallest_over_scales_of_gaussian_quantiles_at_one_where_it_is_kappa(n):
    means, kappa = gaussian_cells(n)
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    value = wemreg(scale * means[:, None], AXIS)
    value.backward()
    assert value.item() == pytest.approx(kappa, abs=1e-12)
    assert scale.grad.item() == pytest.approx(0, abs=1e-12)
    for c in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        assert wemreg(c * means[:, None], AXIS) > value + 1e-6


@pytest.mark.parametrize("c", [0.25, 1.0, 1.5, 4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_three_sample_example_of_the_nonredundancy_proposition(c, dtype):
    b = 3 * density(norm.ppf(2 / 3))  # m = (−b, 0, b)
    v3 = 2 * b**2 / 3
    z = c * torch.tensor([[b], [-b], [0.0]], dtype=dtype)
    assert wemreg(z, AXIS).item() == pytest.approx(1 - v3 + (c - 1) ** 2 * v3, abs=1e-6)


def test_gradient_equals_finite_differences():
    directions = random_directions(3, 5, generator=make_rng(1)).double()
    z = cloud(2, 6, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: wemreg(x, directions), z)


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(9)))
def test_order_of_the_batch_does_not_matter(order):
    z, directions = cloud(9, 4), random_directions(4, 6, generator=make_rng(1))
    torch.testing.assert_close(wemreg(z[list(order)], directions), wemreg(z, directions), atol=1e-12, rtol=0)


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_input_is_computed_in_float32(autocast):
    directions = random_directions(16, 32, generator=make_rng(1))
    z = cloud(4, 33, 16).bfloat16()
    expected = wemreg(z.float(), directions)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        value = wemreg(z, directions)
    assert value.dtype == torch.float32
    assert torch.equal(value, expected)


@pytest.mark.parametrize("leading", [(1,), (4,), (2, 3)])
def test_each_leading_index_is_a_statistic_of_its_own(leading):
    directions = random_directions(4, 6, generator=make_rng(1))
    scale = 1 + torch.arange(math.prod(leading), dtype=torch.float64).reshape(*leading, 1, 1)
    z = scale * cloud(*leading, 11, 4)
    each = [wemreg(batch, directions) for batch in z.reshape(-1, 11, 4)]
    torch.testing.assert_close(wemreg(z, directions), torch.stack(each).mean(), atol=1e-12, rtol=1e-12)


def test_all_time_steps_see_the_same_drawn_directions():
    z = cloud(11, 4)
    repeated = wemreg(z.expand(5, 11, 4), 3, make_rng(7))
    torch.testing.assert_close(repeated, wemreg(z, 3, make_rng(7)), atol=1e-12, rtol=0)


def test_the_generator_decides_the_directions():
    z = cloud(11, 4)
    generator = make_rng(7)
    first, second = wemreg(z, 3, generator), wemreg(z, 3, generator)
    assert torch.equal(first, wemreg(z, 3, make_rng(7)))
    assert not torch.equal(first, second)


def test_drawn_directions_have_length_one_and_may_be_passed_in():
    directions = random_directions(5, 100, generator=make_rng(7))
    assert directions.shape == (5, 100)
    torch.testing.assert_close(directions.norm(dim=0), torch.ones(100), atol=1e-6, rtol=0)
    z = cloud(11, 5)
    assert torch.equal(wemreg(z, directions), wemreg(z, 100, make_rng(7)))
