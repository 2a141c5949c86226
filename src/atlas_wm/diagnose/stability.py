"""What planning loses by the geometry of its latent: distortion, regret, margin, and the bound on them.

Everything is float64. Names in brackets are the labels of the paper; docs/reference/math.md lists all of them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from atlas_wm.models.geometry import Scale


class Distortion(NamedTuple):
    """How far two normalised geometries are apart; each (...), over all pairs, the zero diagonal included."""

    rmse: Tensor  # √L_OOD
    percentile_95: Tensor
    maximum: Tensor  # ε_rel


def relational_distortion(d_z: Tensor, d_p: Tensor) -> Distortion:
    """|d_Z − d_P| over all pairs of (..., N, N) or (..., n, k); its maximum is ε_rel  [theory_uniform_rel]."""
    error = (d_z - d_p).abs().flatten(-2)
    return Distortion(error.square().mean(dim=-1).sqrt(), error.quantile(0.95, dim=-1), error.amax(dim=-1))


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
