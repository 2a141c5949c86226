"""State probes: how well coordinates of the environment's state can be read from a representation.

A linear probe (ridge regression) asks whether a coordinate lies along a direction of the representation. A small
MLP asks whether it is there at all. Both are fitted on some rows and judged on others.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

PENALTY = 1e-3  # of the ridge, for standardised inputs and a mean squared error
HIDDEN, STEPS, BATCH, RATE, WEIGHT_DECAY = 256, 600, 256, 1e-3, 1e-2

Probe = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Inputs (N, d) and targets (N, k) to fit, inputs (M, d) to read → predictions (M, k), float64."""


def ridge_probe(x: Tensor, y: Tensor, queries: Tensor) -> Tensor:
    """argmin_W mean ‖[x, 1] W − y‖² + PENALTY ‖W‖² without a penalty on the intercept; x is standardised."""
    x, queries = standardised(x, queries)
    y = y.double()
    mean = y.mean(dim=0)
    gram = x.T @ x / len(x) + PENALTY * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    return queries @ torch.linalg.solve(gram, x.T @ (y - mean) / len(x)) + mean


def mlp_probe(x: Tensor, y: Tensor, queries: Tensor, seed: int = 0) -> Tensor:
    """Two hidden layers, trained in float32 for a fixed number of steps. The same seed gives the same probe."""
    x, queries = (t.float() for t in standardised(x, queries))
    mean, std = y.double().mean(dim=0), y.double().std(dim=0, correction=0).clamp_min(1e-12)
    target = ((y.double() - mean) / std).float()
    rng = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng([x.device] if x.is_cuda else []):  # the caller's random state stays as it is
        torch.manual_seed(seed)
        sizes = (x.shape[1], HIDDEN, HIDDEN, y.shape[1])
        layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
        net = nn.Sequential(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2]).to(x.device)
    optimizer = torch.optim.AdamW(net.parameters(), RATE, weight_decay=WEIGHT_DECAY)
    with torch.enable_grad():
        for _ in range(STEPS):
            rows = torch.randint(len(x), (min(BATCH, len(x)),), generator=rng).to(x.device)
            loss = (net(x[rows]) - target[rows]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        return net(queries).double() * std + mean


def standardised(x: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float64, by the mean and the standard deviation of x; coordinates that never vary become 0."""
    x, queries = x.double(), queries.double()
    mean, std = x.mean(dim=0), x.std(dim=0, correction=0)
    scale = torch.where(std > 1e-12 * (1 + mean.abs()), 1 / std.clamp_min(1e-300), torch.zeros_like(std))
    return (x - mean) * scale, (queries - mean) * scale


def explained(predicted: Tensor, y: Tensor) -> float:
    """R² = 1 − Σ‖ŷ − y‖² / Σ‖y − ȳ‖² over rows (M, k); NaN where y never varies."""
    y = y.double()
    rest, total = (predicted - y).square().sum(), (y - y.mean(dim=0)).square().sum()
    return float(1 - rest / total) if total > 0 else float("nan")


def error(predicted: Tensor, y: Tensor, angle: bool = False) -> float:
    """The root of the mean squared distance, in the unit of y; of angles, given as (cos, sin), the mean absolute
    difference in degrees."""
    if not angle:
        return float((predicted - y).double().square().sum(dim=1).mean().sqrt())
    turn = torch.atan2(predicted[:, 1], predicted[:, 0]) - torch.atan2(y[:, 1], y[:, 0]).double()
    return float(torch.atan2(turn.sin(), turn.cos()).abs().mean().rad2deg())
