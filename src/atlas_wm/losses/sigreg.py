r"""SIGReg, the regulariser of LeWM: a characteristic-function test of normality on random projections.

    err(t) = (mean cos(t·x) − e^{−t²/2})² + (mean sin(t·x))²
    statistic = N Σ_j w_j e^{−t_j²/2} err(t_j),   t_j: 17 knots on [0, 3]

w_j are trapezoid weights, doubled because the integrand is even: 2·dt inside, dt at both ends.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from atlas_wm.losses.projections import project

KNOTS, LARGEST_FREQUENCY = 17, 3.0


def sigreg(z: Tensor, directions: int | Tensor = 1024, generator: torch.Generator | None = None) -> Tensor:
    """Mean Epps–Pulley statistic over directions and leading axes, a scalar. z: (..., N, d), as in wemreg."""
    x = project(z, directions, generator)  # (..., N, L)
    t = torch.linspace(0, LARGEST_FREQUENCY, KNOTS, device=x.device, dtype=x.dtype)
    apart = LARGEST_FREQUENCY / (KNOTS - 1)
    weight = pad(torch.full_like(t[1:-1], 2 * apart), (1, 1), value=apart)
    gaussian = torch.exp(-t.square() / 2)  # both the target characteristic function and the window
    angle = x.unsqueeze(-1) * t  # (..., N, L, knots)
    error = (angle.cos().mean(-3) - gaussian).square() + angle.sin().mean(-3).square()
    return (error * (weight * gaussian)).sum(-1).mean() * x.shape[-2]  # no matmul: autocast would round it
