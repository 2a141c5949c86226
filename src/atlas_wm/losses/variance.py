r"""The regularisers of PLDM: variance and covariance over the batch and over time, and temporal alignment.

z is centred over the batch first. For n samples of d coordinates

    std = mean over coordinates of max(0, 1 − sqrt(var + 1e-4))
    cov = Σ_{i≠j} C_ij² / (d² − d),   C = Σ_n z_n z_nᵀ / (n − 1)

Over the batch each time step is a statistic of its own; the ``_t`` variants are the same over time, for each clip.
"""

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

EPSILON = 1e-4


def centred(z: Tensor) -> Tensor:
    """(B, T, d) minus its mean over the batch, in float32 (float64 stays float64)."""
    z = z if z.dtype == torch.float64 else z.float()
    return z - z.mean(dim=0, keepdim=True)


def std(z: Tensor) -> Tensor:
    """z: (n, m, d), n samples of m statistics → a scalar"""
    return (1 - (z.var(dim=0) + EPSILON).sqrt()).relu().mean()


def cov(z: Tensor) -> Tensor:
    """z: (n, m, d), n samples of m statistics → a scalar"""
    samples, _, d = z.shape
    z = z.transpose(0, 1)  # (m, n, d)
    with torch.autocast(z.device.type, enabled=False):
        square = (z.mT @ z / (samples - 1)).square()  # (m, d, d)
    diagonal = square.diagonal(dim1=-2, dim2=-1).sum(-1)
    return ((square.sum((-2, -1)) - diagonal) / (d * d - d)).mean()


def temporal(z: Tensor) -> Tensor:
    """Mean squared difference of neighbouring frames. z: (B, T, d)"""
    return mse_loss(z[:, :-1].float(), z[:, 1:].float())
