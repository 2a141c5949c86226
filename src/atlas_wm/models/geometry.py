"""Geometry of a bank of points: normalised distances, novelty and effective rank, in float64.

Names in brackets are the labels of the paper; docs/reference/math.md lists all of them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from atlas_wm.losses.relational import EPSILON_0

CHUNK = 2**23  # numbers in memory at once: 64 MiB
ALL_PAIRS_AT_ONCE = 4096  # points whose distances are computed at once, coordinate by coordinate


@dataclass(frozen=True)
class Scale:
    """d_X(a, b) = ‖S_X⁻¹(a − b)‖ / c_X, where S_X and c_X come from the bank X; a and b may be any points."""

    deviations: Tensor  # (m,) σ_X + ε₀, float64
    mean_distance: float  # c_X
    epsilon: float = EPSILON_0  # ε₀

    @classmethod
    def standardising(cls, bank: Tensor, epsilon: float = EPSILON_0) -> "Scale":
        """S_X = diag(σ_X + ε₀) of a bank (N, m), σ_X with 1/N; c_X = 1."""
        return cls(bank.double().std(dim=0, correction=0) + epsilon, 1.0, epsilon)

    @classmethod
    def fit(cls, bank: Tensor, epsilon: float = EPSILON_0) -> "Scale":
        """S_X and c_X = mean of ‖S_X⁻¹(x_i − x_j)‖ over all N² pairs of a bank (N, m)  [theory_relational_metric].

        On up to 4,096 points this is `losses.normalized_distances` to the last bit.
        """
        unit = cls.standardising(bank, epsilon)
        if len(bank) <= ALL_PAIRS_AT_ONCE:
            mean = float(unit.distances(bank, bank).mean())
        else:
            scaled = (bank.double() - bank.double().mean(dim=0)) / unit.deviations
            rows = scaled.split(max(1, CHUNK // len(bank)))
            sums = [torch.cdist(some, scaled, compute_mode="use_mm_for_euclid_dist").sum() for some in rows]
            mean = float(torch.stack(sums).sum()) / len(bank) ** 2
        return cls(unit.deviations, max(mean, torch.finfo(torch.float64).tiny), epsilon)

    def distances(self, a: Tensor, b: Tensor) -> Tensor:
        """d_X between all points of a (..., n, m) and of b (..., k, m): (..., n, k)."""
        a, b = a.double() / self.deviations, b.double() / self.deviations
        return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist") / self.mean_distance

    @property
    def mismatch(self) -> float:
        """η = max_j |σ_j − 1| / (1 + ε₀)  [theory_planning_constants]."""
        return float((self.deviations / (1 + self.epsilon) - 1).abs().max())

    @property
    def length(self) -> float:
        """ℓ = (1 + ε₀) c_Z, what a raw latent distance is divided by  [theory_planning_constants]."""
        return (1 + self.epsilon) * self.mean_distance


def knn_novelty(
    queries: Tensor, bank: Tensor, k: int, scale: Scale | None = None, leave_one_out: bool = False
) -> Tensor:
    """s_X(q) = mean of d_X(q, ·) over the k nearest points of the bank  [theory_knn].

    queries: (Q, m), bank: (N, m); returns (Q,) float64. Without a scale the bank is standardised and c_X is 1.
    With leave_one_out, query i is the bank's point i and does not count as its own neighbour.

    Matrix products find the neighbours, and their distances are recomputed from the coordinates: exact, except that
    rounding may change the order of neighbours nearer than about 1e-7 standard deviations.
    """
    if not 1 <= k <= len(bank) - leave_one_out:
        raise ValueError(f"k must lie between 1 and {len(bank) - leave_one_out}, the number of points, not {k}")
    scale = scale or Scale.standardising(bank)
    centre = bank.double().mean(dim=0)
    points, others = ((x.double() - centre) / scale.deviations for x in (queries, bank))
    half_squares = others.square().sum(dim=-1) / 2
    size = max(1, CHUNK // max(len(bank), k * bank.shape[-1]))
    novelty = []
    for piece, some in enumerate(points.split(size)):
        order = torch.addmm(half_squares, some, others.T, alpha=-1)  # (d² − ‖q‖²) / 2: ranks as d does
        if leave_one_out:
            order.diagonal(piece * size).fill_(torch.inf)
        nearest = order.topk(k, largest=False, sorted=False).indices  # (size, k)
        novelty.append((some[:, None] - others[nearest]).norm(dim=-1).mean(dim=-1))
    return torch.cat(novelty) / scale.mean_distance


def percentile(novelty: Tensor, reference: Tensor) -> Tensor:
    """Where novelties (...) stand among reference ones (R,), 0 to 100; an equal value counts half.

    The reference is the bank itself: `knn_novelty(bank, bank, k, leave_one_out=True)`.
    """
    ordered, novelty = reference.sort().values, novelty.contiguous()
    below, not_above = (torch.searchsorted(ordered, novelty, right=right) for right in (False, True))
    return 50.0 * (below + not_above) / len(reference)


def effective_rank(variances: Tensor) -> float:
    """exp of the entropy of variances (d,) along the principal axes: d if all are equal, 1 if only one is not 0."""
    share = variances.clamp_min(0) / variances.sum().clamp_min(1e-300)
    return float(torch.exp(-(share * share.clamp_min(1e-300).log()).sum()))
