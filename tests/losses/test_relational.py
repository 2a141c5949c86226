import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_wm.losses import gaussian_cells, normalized_distances, relational
from atlas_wm.losses.relational import gram_distances
from atlas_wm.rng import make_rng

N, M = 12, 4


def cloud(*shape, seed=0):
    return torch.randn(*shape, generator=make_rng(seed), dtype=torch.float64)


def plain_distances(rows):
    n, columns = len(rows), list(zip(*rows, strict=True))
    scales = []
    for column in columns:
        mean = sum(column) / n
        scales.append(math.sqrt(sum((v - mean) ** 2 for v in column) / n) + 1e-6)
    pairs = [
        [math.sqrt(sum(((a - b) / s) ** 2 for a, b, s in zip(x, y, scales, strict=True))) for y in rows]
        for x in rows
    ]
    mean = sum(map(sum, pairs)) / n**2
    return [[d / mean for d in row] for row in pairs]


def plain_relational(z, anchor):
    dz, dp, n = plain_distances(z.tolist()), plain_distances(anchor.tolist()), len(z)
    return sum((dz[i][j] - dp[i][j]) ** 2 for i in range(n) for j in range(n)) / n**2


@pytest.mark.parametrize(("n", "d", "m"), [(2, 1, 1), (3, 1, 5), (17, 6, 3)])
def test_equals_a_plain_double_loop(n, d, m):
    z, anchor = 3 * cloud(n, d, seed=1) + 1, cloud(n, m, seed=2)
    assert relational(z, anchor).item() == pytest.approx(plain_relational(z, anchor), abs=1e-12)


def test_distances_have_mean_one_over_all_pairs_and_a_zero_diagonal():
    distances = normalized_distances(cloud(N, M))
    assert distances.mean().item() == pytest.approx(1, abs=1e-12)
    assert distances.diagonal().abs().max() == 0


def test_zero_for_the_anchor_itself():
    anchor = cloud(N, M)
    assert relational(anchor.clone(), anchor) == 0
    assert relational(cloud(N, M, seed=1), anchor) > 1e-2


sizes = st.floats(0.1, 100) | st.floats(-100, -0.1)
offsets = st.lists(st.floats(-100, 100), min_size=M, max_size=M)


# ε₀ = 1e-6 beside deviations of at least 0.05 changes a distance by 4e-5 of itself at most: 1e-8 squared.
@settings(max_examples=50, deadline=None)
@given(scale=sizes, offset=offsets)
def test_zero_for_a_scaled_and_shifted_anchor(scale, offset):
    anchor = cloud(N, M)
    assert relational(scale * anchor + torch.tensor(offset), anchor) < 1e-8


@settings(max_examples=50, deadline=None)
@given(scales=st.lists(sizes, min_size=M, max_size=M), offset=offsets)
def test_zero_for_coordinates_rescaled_one_by_one(scales, offset):
    anchor = cloud(N, M)
    assert relational(torch.tensor(scales) * anchor + torch.tensor(offset), anchor) < 1e-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_three_sample_example_of_the_nonredundancy_proposition(dtype):
    anchor = gaussian_cells(3)[0][:, None].to(dtype)  # (−b, 0, b)
    swapped = anchor[[0, 2, 1]]
    assert relational(swapped, anchor).item() == pytest.approx(9 / 16, abs=1e-6)
    assert relational(2.5 * anchor, anchor).item() == pytest.approx(0, abs=1e-6)


def test_gradient_equals_finite_differences():
    z, anchor = cloud(6, 3).requires_grad_(), cloud(6, 2, seed=1)
    assert torch.autograd.gradcheck(lambda x: relational(x, anchor), z)


def duplicated(z):
    z[3] = z[0]
    z[4] = z[0]


def constant(z):
    z[:, 1] = 0.1


def collapsed(z):
    z[:] = 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("degenerate", [duplicated, constant, collapsed])
def test_value_and_gradient_are_finite_for_degenerate_latents(degenerate, dtype):
    z = cloud(N, M).to(dtype)
    degenerate(z)
    z.requires_grad_()
    loss = relational(z, cloud(N, 3, seed=1).to(dtype))
    loss.backward()
    assert loss.isfinite() and z.grad.isfinite().all()


def test_gradient_is_zero_along_a_constant_coordinate_and_not_elsewhere():
    z = cloud(N, M)
    z[:, 1] = 0
    z.requires_grad_()
    relational(z, cloud(N, 3, seed=1)).backward()
    assert (z.grad[:, 1] == 0).all()
    assert (z.grad[:, [0, 2, 3]] != 0).all()


def test_no_gradient_reaches_the_anchor():
    z, anchor = cloud(N, M).requires_grad_(), cloud(N, M, seed=1).requires_grad_()
    relational(z, anchor).backward()
    assert anchor.grad is None
    assert z.grad.abs().max() > 0


def test_leading_axes_are_samples_of_one_statistic():
    z, anchor = cloud(3, 4, M), cloud(3, 4, 2, seed=1)
    assert torch.equal(relational(z, anchor), relational(z.reshape(N, M), anchor.reshape(N, 2)))


def test_bfloat16_input_is_computed_in_float32():
    z, anchor = cloud(N, M).bfloat16(), cloud(N, 3, seed=1).bfloat16()
    expected = relational(z.float(), anchor.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(relational(z, anchor), expected)


@pytest.mark.parametrize("shape", [(N - 1, M), (3, N // 3, M)])
def test_different_samples_are_refused(shape):
    with pytest.raises(ValueError, match="different samples"):
        relational(cloud(*shape), cloud(N, M))


def same_rows(z):
    z[3:6] = z[0]


def nearly_the_same_rows(z):
    z[3] = z[0] * (1 + 1e-4)


def far_from_zero(z):
    z += 1000


@pytest.mark.parametrize("change", [same_rows, nearly_the_same_rows, far_from_zero, collapsed, lambda z: None])
def test_distances_by_a_matrix_product_are_those_of_cdist_gradients_too(change):
    """What a GPU computes, in float32 as training does."""
    z, weights = cloud(40, 24).float(), cloud(40, 40, seed=1).float()
    change(z)
    found = []
    for distances in (gram_distances, lambda x: torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")):
        x = z.clone().requires_grad_()
        value = distances(x)
        found.append((value, *torch.autograd.grad((value * weights).sum(), x)))
    torch.testing.assert_close(found[0], found[1], atol=2e-4, rtol=1e-4)
    assert found[0][0].diagonal().abs().max() == 0
