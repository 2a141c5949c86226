r"""The theory as functions: normalised distances, novelty, distortion, planning bounds and a counter-example.

Everything is computed in float64. Names in brackets are the labels of the paper; docs/math.md lists all of them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import gammainc, gammaincinv, gammaln, hyp0f1, ndtr, ndtri
from torch import Tensor

from atlas_wm.losses.relational import EPSILON_0

CHUNK = 2**23  # numbers held at once: 64 MiB
ALL_PAIRS_AT_ONCE = 4096  # points whose distances are taken in one piece, coordinate by coordinate


@dataclass(frozen=True)
class Scale:
    """d_X(a, b) = ‖S_X⁻¹(a − b)‖ / c_X for points in or outside the bank X that S_X and c_X come from."""

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

    Neighbours are found by matrix products and their distances taken again from the coordinates: exact, but for
    neighbours nearer than about 1e-7 deviations, whose order rounding may change.
    """
    if not 1 <= k <= len(bank) - leave_one_out:
        raise ValueError(
            f"k must lie between 1 and {len(bank) - leave_one_out}, the points to choose from, not {k}"
        )
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


class Distortion(NamedTuple):
    """How far two normalised geometries are apart; each (...), over all pairs, the zero diagonal included."""

    rmse: Tensor  # √L_OOD
    percentile_95: Tensor
    maximum: Tensor  # ε_rel


def relational_distortion(d_z: Tensor, d_p: Tensor) -> Distortion:
    """|d_Z − d_P| over all pairs of (..., N, N) or (..., n, k); its maximum is ε_rel  [theory_uniform_rel]."""
    error = (d_z - d_p).abs().flatten(-2)
    return Distortion(error.square().mean(dim=-1).sqrt(), error.quantile(0.95, dim=-1), error.amax(dim=-1))


def uniform_distortion_bound(rmse: Tensor, n: int) -> Tensor:
    """ε_rel ≤ N √L_OOD on a pool of N points  [theory_mse_to_uniform]. By symmetry N √(L_OOD / 2) holds too."""
    return n * rmse


class PlanningError(NamedTuple):
    """ε_plan by its three causes, each (...)  [app_uniform_planning_cost]."""

    prediction: Tensor  # e / ℓ
    relational: Tensor  # (1 + η) ε_rel
    scale: Tensor  # η M

    @property
    def total(self) -> Tensor:
        """ε_plan = e/ℓ + (1 + η) ε_rel + η M."""
        return self.prediction + self.relational + self.scale

    @property
    def regret_bound(self) -> Tensor:
        """2 ε_plan  [theory_planning_regret]."""
        return 2 * self.total


class PlanningStability(NamedTuple):
    """One planning query, or one for each leading index."""

    error: PlanningError
    chosen: Tensor  # (...) the candidate nearest to the goal by predicted latent
    regret: Tensor  # (...) its anchor distance less the smallest anchor distance
    margin: Tensor  # (...) the second smallest anchor distance less the smallest
    guaranteed: Tensor  # (...) bool: margin > 2 ε_plan, so the choice is the anchor's  [theory_planning_margin]


def planning_stability(
    predicted: Tensor,
    terminal: Tensor,
    goal: Tensor,
    anchors: Tensor,
    anchor_goal: Tensor,
    latent_scale: Scale,
    anchor_scale: Scale,
) -> PlanningStability:
    """What the planner loses in anchor geometry, and Theorem planning_stability's bound on it.

    predicted ẑ, terminal z: (..., C, d); goal z_g: (..., d); anchors p: (..., C, m); anchor_goal: (..., m).
    ε_rel is taken over all pairs of the C terminal states and the goal, e and M over the C candidates.
    """
    latents = torch.cat([terminal, goal.unsqueeze(-2)], dim=-2)
    features = torch.cat([anchors, anchor_goal.unsqueeze(-2)], dim=-2)
    d_p = anchor_scale.distances(features, features)  # (..., C + 1, C + 1)
    epsilon_rel = relational_distortion(latent_scale.distances(latents, latents), d_p).maximum
    cost = d_p[..., :-1, -1]  # d_P(i, g)
    worst_prediction = (predicted.double() - terminal.double()).norm(dim=-1).amax(dim=-1)  # e
    eta = latent_scale.mismatch
    error = PlanningError(worst_prediction / latent_scale.length, (1 + eta) * epsilon_rel, eta * cost.amax(dim=-1))
    chosen = (predicted.double() - goal.double().unsqueeze(-2)).norm(dim=-1).argmin(dim=-1)
    margin = selection_margin(cost)
    return PlanningStability(error, chosen, regret(cost, chosen), margin, margin > error.regret_bound)


def regret(cost: Tensor, chosen: Tensor) -> Tensor:
    """f(î) − min f for costs (..., C) and chosen indices (...)  [Lemma finite_minimum]."""
    return cost.gather(-1, chosen.unsqueeze(-1)).squeeze(-1) - cost.amin(dim=-1)


def selection_margin(cost: Tensor) -> Tensor:
    """Second smallest cost less the smallest, (..., C) → (...). ∞ for one candidate.

    Above 2ε, a perturbation of the costs by at most ε leaves the choice as it is  [Lemma finite_minimum].
    """
    if cost.shape[-1] == 1:
        return torch.full_like(cost[..., 0], torch.inf)
    best = cost.topk(2, dim=-1, largest=False).values
    return best[..., 1] - best[..., 0]


def order_is_kept(first: Tensor, second: Tensor, epsilon_rel: Tensor | float) -> Tensor:
    """Whether s_P(q₁) − s_P(q₂) > 2 ε_rel, which implies s_Z(q₁) > s_Z(q₂)  [Theorem planning_stability]."""
    return first - second > 2 * epsilon_rel


def task_regret_bound(epsilon_plan: Tensor, epsilon_anchor: Tensor | float) -> Tensor:
    """2 (ε_plan + ε_anchor), where |J_task − d_P(·, g)| ≤ ε_anchor  [Corollary task_cost]."""
    return 2 * (epsilon_plan + epsilon_anchor)


def rollout_error_bound(one_step: float, lipschitz: float, steps: int) -> float:
    """ε_dyn Σ_{t<T} Lᵗ for a predictor that is L-Lipschitz in the state before  [Lemma rollout_error].

    One that is L-Lipschitz in a window of states counts as √(1 + L²): it also shifts the window.
    """
    return one_step * sum(lipschitz**t for t in range(steps))


def effective_rank(variances: Tensor) -> float:
    """exp of the entropy of variances (d,) along the principal axes: d if all are equal, 1 if one is alone."""
    share = variances.clamp_min(0) / variances.sum().clamp_min(1e-300)
    return float(torch.exp(-(share * share.clamp_min(1e-300).log()).sum()))


def covariance_bound(wemreg: float, dimension: int) -> float:
    """C_d(s) = √(d(d+2)/2) · [√d (1 + √s) + 1] · √s ≥ ‖Σ − I‖_F  [app_calibration_constant].

    s is the exact expectation over directions; η ≤ C_d(s) / (1 + ε₀)  [app_eta_control].
    """
    d, root = dimension, wemreg**0.5
    return (d * (d + 2) / 2) ** 0.5 * (d**0.5 * (1 + root) + 1) * root


def mean_bound(wemreg: float, dimension: int) -> float:
    """√(d s) ≥ ‖μ‖  [Lemma sot_calibration]."""
    return (dimension * wemreg) ** 0.5


NODES, WEIGHTS = (x / 2 + shift for x, shift in zip(np.polynomial.legendre.leggauss(48), (0.5, 0), strict=True))


@dataclass(frozen=True)
class GaussianTwin:
    r"""dP = (1 + r/2) dγ_d, r a step function of the radius with max |r| = 1  [Theorem cf_ambiguity].

    P has mean 0, covariance I and, in every direction, the characteristic function of N(0, 1) at the given
    frequencies, yet is not Gaussian. All its projections follow one law, with the density

        p(x) = φ(x) (1 + e(x)/2),   e(x) = E[r(‖z‖) | z₁ = x] = Σ_k (r_k − r_{k+1}) F_{d−1}(b_k² − x²),

    where F_{d−1} is the distribution function of χ²_{d−1}, b_k the outer edge of shell k and r_{K+1} = 0.
    """

    dimension: int
    edges: np.ndarray  # (K + 1,) radii between shells, from 0
    heights: np.ndarray  # (K,) r on each shell; 0 beyond the last

    @classmethod
    def build(cls, frequencies: np.ndarray, dimension: int) -> "GaussianTwin":
        """J + 3 shells of equal mass, r from the J + 2 constraints [app_radial_constraints]. t = 0 is allowed."""
        frequencies = np.atleast_1d(np.asarray(frequencies, float))
        edges = np.sqrt(2 * gammaincinv(dimension / 2, np.linspace(0, 0.9999, len(frequencies) + 4)))
        heights = np.linalg.svd(_radial_constraints(dimension, edges, frequencies))[2][-1]  # spans the null space
        return cls(dimension, edges, heights / heights[np.abs(heights).argmax()])

    def density_ratio(self, radius: np.ndarray) -> np.ndarray:
        """dP/dγ_d at points of the given norm, between 1/2 and 3/2."""
        shell = np.searchsorted(self.edges[1:], radius, side="right")
        return 1 + np.append(self.heights, 0)[shell] / 2

    def moments(self) -> tuple[float, float]:
        """P(ℝᵈ) and E‖z‖²: 1 and d."""
        mass, square = _radial_constraints(self.dimension, self.edges, np.zeros(0)) @ self.heights
        return 1 + float(mass) / 2, self.dimension + float(square) / 2

    def characteristic_function(self, t: np.ndarray) -> np.ndarray:
        """E cos(t u·z), the same for every unit u; the imaginary part is 0. t: (J,) → (J,)."""
        shells = _radial_constraints(self.dimension, self.edges, np.asarray(t, float))[2:]
        return np.exp(-np.square(t) / 2) + shells @ self.heights / 2

    def _excess(self, x: np.ndarray) -> np.ndarray:
        """φ(x) e(x) / 2, what the density of a projection has over that of N(0, 1). (...) → (...)."""
        inside = self.edges[1:] ** 2 - x[..., None] ** 2
        shares = np.where(inside > 0, gammainc((self.dimension - 1) / 2, inside / 2), 0)
        return _gaussian_density(x) * (shares @ (self.heights - np.append(self.heights[1:], 0))) / 2

    def _excess_mass(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """∫ of the excess from low to high (...), within one shell: smooth there but for a root at its edge."""
        x, weights = _nodes_towards(low, high)
        return (self._excess(x) * weights).sum(axis=-1)

    def projected_density(self, x: np.ndarray) -> np.ndarray:
        """p(x) of u·z. (...) → (...)."""
        return _gaussian_density(x) + self._excess(np.asarray(x, float))

    def projected_tail(self, x: np.ndarray) -> np.ndarray:
        """P(u·z > x) for x ≥ 0, which is P(u·z < −x). (...) → (...)."""
        x, outer = np.asarray(x, float), self.edges[1:]
        shells = self._excess_mass(self.edges[:-1], outer)
        beyond = np.append(np.cumsum(shells[::-1])[::-1][1:], 0)  # (K,) excess outside each shell
        shell = np.minimum(np.searchsorted(outer, x), len(outer) - 1)
        excess = self._excess_mass(np.minimum(x, outer[-1]), outer[shell]) + beyond[shell]
        return ndtr(-x) + np.where(x < outer[-1], excess, 0)

    def gaussian_position(self, x: np.ndarray) -> np.ndarray:
        """Φ⁻¹(F(x)) for x ≥ 0, F the distribution function of u·z: the optimal map of P_u to N(0, 1)."""
        return -ndtri(self.projected_tail(x))

    def wemreg(self) -> float:
        """L_WEM(P) = W₂²(P_u, N(0, 1)) = 2 ∫₀^∞ (Φ⁻¹(F(x)) − x)² p(x) dx; beyond the last shell both laws agree."""
        x, weights = _nodes_towards(self.edges[:-1], self.edges[1:])
        return float(2 * ((self.gaussian_position(x) - x) ** 2 * self.projected_density(x) * weights).sum())


def _gaussian_density(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.square(x) / 2) / np.sqrt(2 * np.pi)


def _nodes_towards(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gauss–Legendre nodes and weights from low to high in s, x = high − (high − low) s²: (...) → (..., 48) twice.

    A function of √(high − x) is smooth in s.
    """
    width = (high - low)[..., None]
    return high[..., None] - width * NODES**2, 2 * width * NODES * WEIGHTS


def _radial_constraints(dimension: int, edges: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """∫ over each shell of 1, ‖x‖² and cos(t_j x₁) with respect to γ_d: (2 + J, K)  [app_radial_constraints].

    Over the sphere of radius ρ, cos(t x₁) has the mean ₀F₁(d/2; −t²ρ²/4).
    """
    half, width = dimension / 2, np.diff(edges)[:, None]
    radius = edges[:-1, None] + width * NODES  # (K, nodes)
    log_density = (dimension - 1) * np.log(radius) - radius**2 / 2 - (half - 1) * np.log(2) - gammaln(half)
    density = np.exp(log_density)
    waves = hyp0f1(half, -((frequencies[:, None, None] * radius) ** 2) / 4)  # (J, K, nodes)
    waves = np.where(density > 1e-100, waves, 0)  # for d > 160 scipy's ₀F₁ is not finite near radius 0
    mass, square = (np.diff(gammainc(half + extra, edges**2 / 2)) for extra in (0, 1))
    return np.vstack([mass, dimension * square, (waves * density * width * WEIGHTS).sum(axis=-1)])
