r"""OOD-recovery: the planning latent keeps the pairwise geometry of an anchor representation.

    d_X(i, j) = ‖S_X⁻¹(x_i − x_j)‖ / c_X,   S_X = diag(σ_X + ε₀),
    c_X = mean of ‖S_X⁻¹(x_i − x_j)‖ over all N² pairs                  (Eq. theory_relational_metric)

    L_OOD(Z, P) = 1/N² Σ_ij (d_Z(i, j) − d_P(i, j))²                    (Eq. theory_relational_loss)

P is fixed: no gradient reaches the anchor.
"""

import torch
from torch import Tensor

EPSILON_0 = 1e-6
COINCIDE = 1e-13  # squared distances below this share of the squared lengths are rounding


def gram_distances(x: Tensor) -> Tensor:
    """Distances of all pairs by a matrix product in float64: (N, m) → (N, N).

    In float32, cancellation would lose small distances. In float64 only those below 3e-7 of the samples' distance
    from their mean are lost: they and their gradient are 0.
    """
    wide = x.double()
    wide = wide - wide.mean(dim=0)
    products = wide @ wide.T
    lengths = wide.square().sum(dim=1)  # not products.diagonal(): torch.compile gives that a wrong gradient
    sums = lengths[:, None] + lengths
    squares = sums - 2 * products
    apart = squares > COINCIDE * sums
    return squares.where(apart, 1).sqrt().where(apart, 0).to(x)


def normalized_distances(x: Tensor) -> Tensor:
    """d_X over all pairs, the zero diagonal included: (N, m) → (N, N), with mean 1.

    The gradient is finite, and 0, between two samples that coincide and along a constant coordinate.
    """
    x = x if x.dtype == torch.float64 else x.float()
    with torch.autocast(x.device.type, enabled=False):
        scaled = x / (x.std(dim=0, correction=0) + EPSILON_0)
        if x.is_cuda:  # cdist takes ten times as long there
            distances = gram_distances(scaled)
        else:  # not the matrix-product form of cdist, which loses small distances to cancellation
            distances = torch.cdist(scaled, scaled, compute_mode="donot_use_mm_for_euclid_dist")
        return distances / distances.mean().clamp_min(torch.finfo(distances.dtype).tiny)


def relational(z: Tensor, anchor: Tensor) -> Tensor:
    """L_OOD, a scalar. z: (..., d) and anchor: (..., m) hold the same samples; leading axes are flattened."""
    if z.shape[:-1] != anchor.shape[:-1]:
        raise ValueError(f"z {tuple(z.shape)} and anchor {tuple(anchor.shape)} hold different samples")
    target = normalized_distances(anchor.detach().flatten(0, -2))
    return (normalized_distances(z.flatten(0, -2)) - target).square().mean()
