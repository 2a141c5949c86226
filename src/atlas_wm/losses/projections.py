"""Random one-dimensional views of a point cloud, shared by the sliced regularisers."""

import torch
from torch import Tensor


def random_directions(
    dim: int, count: int, *, device: torch.device | str = "cpu", generator: torch.Generator | None = None
) -> Tensor:
    """``count`` directions drawn uniformly from the unit sphere S^{dim-1}, as columns: (dim, count)."""
    gaussian = torch.randn(dim, count, device=device, generator=generator)
    return gaussian / gaussian.norm(dim=0, keepdim=True)


def project(z: Tensor, directions: int | Tensor, generator: torch.Generator | None = None) -> Tensor:
    """u·z for every direction u, in float32 (float64 stays float64) even under autocast.

    z: (..., N, d); directions: a number to draw, or a tensor (d, L). Returns (..., N, L).
    """
    z = z if z.dtype == torch.float64 else z.float()
    if isinstance(directions, int):
        directions = random_directions(z.shape[-1], directions, device=z.device, generator=generator)
    with torch.autocast(z.device.type, enabled=False):
        return z @ directions.to(z)
