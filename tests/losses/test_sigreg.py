import math

import pytest
import torch
from stable_worldmodel.wm.loss import SIGReg

from atlas_wm.losses import sigreg
from atlas_wm.losses.projections import random_directions
from atlas_wm.rng import make_rng


def plain_sigreg(z, directions):
    """The trapezoid rule for ∫ |φ_N(t) − e^{−t²/2}|² e^{−t²/2} dt over [−3, 3], in plain loops."""
    total, n, dt = 0.0, len(z), 3 / 16
    for u in directions.T.tolist():
        x = [sum(a * b for a, b in zip(row, u, strict=True)) for row in z.tolist()]
        for j in range(-16, 17):
            t = j * dt
            real = sum(math.cos(t * v) for v in x) / n - math.exp(-t * t / 2)
            imaginary = sum(math.sin(t * v) for v in x) / n
            # The ends count half. Folding onto [0, 3] keeps that: 0 once as dt, each inner knot twice, 3 as dt.
            total += (0.5 if abs(j) == 16 else 1.0) * dt * math.exp(-t * t / 2) * (real**2 + imaginary**2)
    return n * total / directions.shape[1]


@pytest.mark.parametrize(("n", "d"), [(1, 1), (5, 2), (40, 7)])
def test_equals_plain_quadrature(n, d):
    z = 1.5 * torch.randn(n, d, generator=make_rng(0), dtype=torch.float64) + 0.3
    directions = random_directions(d, 4, generator=make_rng(1)).double()
    assert sigreg(z, directions).item() == pytest.approx(plain_sigreg(z, directions), rel=1e-12)


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_equals_the_published_implementation(scale):
    z = scale * torch.randn(4, 32, 24, generator=make_rng(0))
    torch.manual_seed(3)
    expected = SIGReg(num_proj=64)(z)
    torch.manual_seed(3)
    directions = torch.randn(24, 64)
    value = sigreg(z, directions / directions.norm(dim=0))
    torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-5)


def test_gradient_equals_finite_differences():
    directions = random_directions(3, 5, generator=make_rng(1)).double()
    z = torch.randn(2, 6, 3, generator=make_rng(0), dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: sigreg(x, directions), z)


def test_each_leading_index_is_a_statistic_of_its_own():
    directions = random_directions(4, 6, generator=make_rng(1))
    z = torch.arange(1.0, 4.0)[:, None, None] * torch.randn(3, 11, 4, generator=make_rng(0))
    each = torch.stack([sigreg(batch, directions) for batch in z])
    torch.testing.assert_close(sigreg(z, directions), each.mean())


def test_the_generator_decides_the_directions():
    z = torch.randn(11, 4, generator=make_rng(0))
    assert torch.equal(sigreg(z, 3, make_rng(7)), sigreg(z, 3, make_rng(7)))
    assert not torch.equal(sigreg(z, 3, make_rng(7)), sigreg(z, 3, make_rng(8)))
