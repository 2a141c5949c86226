r"""Bounds and a counterexample of the paper, as functions for the tests and docs/reference/math.md.

Everything is float64. Names in brackets are the labels of the paper.
"""

from dataclasses import dataclass

import numpy as np
from scipy.special import gammainc, gammaincinv, gammaln, hyp0f1, ndtr, ndtri
from torch import Tensor


def uniform_distortion_bound(rmse: Tensor, n: int) -> Tensor:
    """ε_rel ≤ N √L_OOD on a pool of N points  [theory_mse_to_uniform]. By symmetry N √(L_OOD / 2) holds too."""
    return n * rmse


def order_is_preserved(first: Tensor, second: Tensor, epsilon_rel: Tensor | float) -> Tensor:
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
