r"""WEMReg: exact sliced Wasserstein-2 distance of a batch to the standard Gaussian.

    L_WEM(P) = E_u W₂²(P_u, N(0, 1)),    u uniform on the sphere              (Eq. theory_population_sot)

For N sorted projections x_(1) ≤ … ≤ x_(N) the inner distance has a closed form (Lemma quantile_identity):

    W₂² = κ_N + 1/N Σ_i (x_(i) − m_i)²
    m_i = N ∫ Φ⁻¹(p) dp over ((i−1)/N, i/N] = N (φ(q_{i−1}) − φ(q_i)),   q_i = Φ⁻¹(i/N),  φ(±∞) = 0
    κ_N = 1 − 1/N Σ_i m_i²

κ_N does not depend on the samples; with it the value is the true W₂², comparable between batch sizes.
"""

from functools import lru_cache

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

from atlas_wm.losses.projections import project


@lru_cache(maxsize=64)
def gaussian_cells(n: int) -> tuple[Tensor, float]:
    """Means m_i of the N equal-probability cells of N(0, 1), float64 (N,), and κ_N (Eq. theory_cell_constants)."""
    if n < 1:
        raise ValueError(f"a batch needs at least one sample, not {n}")
    edges = ndtri(np.arange(n + 1) / n)  # q_0 = -inf, q_N = +inf
    density = np.exp(-0.5 * edges**2) / np.sqrt(2 * np.pi)  # exp(-inf) = 0 at both ends
    means = n * (density[:-1] - density[1:])
    return torch.from_numpy(means), float(1 - np.mean(means**2))


@lru_cache(maxsize=64)
def _cached_cells(n: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, float]:
    """The same on a device. Cached: a copy at every step waits for the GPU, and a CUDA graph cannot hold it."""
    means, kappa = gaussian_cells(n)
    with torch.inference_mode(False):  # training cannot use tensors made in inference mode
        return means.to(device, dtype), kappa


@torch.compiler.assume_constant_result
def _cells(n: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, float]:
    return _cached_cells(n, device, dtype)


def wemreg(z: Tensor, directions: int | Tensor = 1024, generator: torch.Generator | None = None) -> Tensor:
    """Mean W₂² between the projected batch and N(0, 1), a scalar.

    z: (..., N, d). The last axis but one is the batch. Each leading index, such as time, is a statistic of its own;
    all share the same directions: a number to draw, or a tensor (d, L).
    """
    ordered = project(z, directions, generator).sort(dim=-2).values  # (..., N, L)
    means, kappa = _cells(ordered.shape[-2], ordered.device, ordered.dtype)
    return (ordered - means[:, None]).square().mean() + kappa
