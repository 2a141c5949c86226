"""Theorem planning_stability and what surrounds it: true of random clouds, and no term can be left out."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_wm.diagnose.stability import planning_stability, regret, relational_distortion, selection_margin
from atlas_wm.losses.relational import EPSILON_0
from atlas_wm.models.geometry import Scale, knn_novelty
from atlas_wm.rng import make_rng
from atlas_wm.theory import order_is_preserved, rollout_error_bound, task_regret_bound

UNIT = Scale(torch.tensor([1 + EPSILON_0], dtype=torch.float64), 1.0)  # η = 0, ℓ = 1 + ε₀
ROUNDING = 1e-9

levels = st.sampled_from([0.0, 1e-3, 1e-2, 0.1, 1.0])
worlds = st.tuples(st.integers(0, 10**6), st.integers(1, 12), levels, levels, levels)


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def world(seed, candidates, distortion, prediction, spread, d=3):
    """Arguments of planning_stability: anchors that are noisy rescaled latents, and noisy predictions."""
    draw = make_rng(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    widths = (spread * noise(d)).exp()
    latents = noise(40 + candidates + 1, d) * widths
    anchors = latents / widths + distortion * noise(*latents.shape)
    scales = Scale.fit(latents[:40]), Scale.fit(anchors[:40])  # a reference bank beside the pool
    z, p = latents[40:], anchors[40:]
    return z[:-1] + prediction * noise(candidates, d), z[:-1], z[-1], p[:-1], p[-1], *scales


def anchor_costs(arguments):
    _, _, _, anchors, anchor_goal, _, scale = arguments
    return scale.distances(anchors, anchor_goal[None]).squeeze(-1)


@settings(max_examples=200, deadline=None)
@given(worlds)
def test_regret_is_bounded_and_a_margin_guarantees_the_choice(drawn):
    arguments = predicted, _, goal, *_, scale, _ = world(*drawn)
    found, cost = planning_stability(*arguments), anchor_costs(arguments)
    planner_cost = (predicted - goal).norm(dim=-1) / scale.length
    assert (planner_cost - cost).abs().max() <= found.error.total + ROUNDING
    assert found.chosen == planner_cost.argmin()
    assert found.regret == cost[found.chosen] - cost.min()
    assert found.regret <= found.error.regret_bound + ROUNDING
    if found.guaranteed:
        assert found.chosen == cost.argmin()


@settings(max_examples=100, deadline=None)
@given(worlds)
def test_raw_latent_distances_differ_from_normalised_ones_by_the_mismatch(drawn):
    _, z, goal, *_, scale, _ = world(*drawn)
    normalised = scale.distances(z, goal[None]).squeeze(-1)
    raw = (z - goal).norm(dim=-1) / scale.length
    assert ((raw - normalised).abs() <= scale.mismatch * normalised + ROUNDING).all()


def by_prediction(delta):
    """Prediction errors ±δ turn round two candidates whose costs are 1.98 δ apart."""
    z = column(1, 1 + 1.98 * delta)
    return z + column(delta, -delta), z, column(0)[0], z, column(0)[0], UNIT, UNIT


def by_distortion(delta):
    """Latents on either side of the goal, each δ off its anchor; the distance between them is preserved."""
    z, p = column(1 + delta, -1 - 0.98 * delta), column(1, -1 - 1.98 * delta)
    return z, z, column(0)[0], p, column(0)[0], UNIT, UNIT


def by_scale(eta):
    """One coordinate too wide, the other too narrow: raw distances rank the two candidates the wrong way."""
    scale = Scale((1 + EPSILON_0) * torch.tensor([1 + eta, 1 - eta], dtype=torch.float64), 1.0)
    z, goal = torch.tensor([[1.0001, 0], [0, 1]], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    return z, z, goal, z, goal, scale, scale


EXAMPLES = {"prediction": by_prediction, "relational": by_distortion, "scale": by_scale}


@pytest.mark.parametrize("cause", EXAMPLES)
def test_each_part_of_the_bound_is_needed_and_nearly_attained(cause):
    found = planning_stability(*EXAMPLES[cause](0.05))
    assert found.chosen == 1
    assert 0.9 * found.error.regret_bound < found.regret <= found.error.regret_bound
    assert found.error.total - getattr(found.error, cause) < 1e-12  # the other two parts are 0
    assert not found.guaranteed and found.margin > 0.9 * found.error.regret_bound  # nor may the margin be less


def test_all_parts_together_are_attained_by_the_planner_cost():
    """1-D, σ = 1.2: latent distance ε above the anchor's, prediction e farther out. Nothing cancels."""
    scale = Scale(1.2 * UNIT.deviations, 1.0)
    p, goal = column(2), column(0)[0]
    z = 1.2 * (p + 0.1 * (1 + EPSILON_0))
    found = planning_stability(z + 0.3, z, goal, p, goal, scale, UNIT)
    expected = torch.tensor([0.3 / (1 + EPSILON_0), 1.2 * 0.1, 0.2 * 2 / (1 + EPSILON_0)], dtype=torch.float64)
    torch.testing.assert_close(torch.stack(list(found.error)), expected)
    planner_cost = (z + 0.3).item() / scale.length
    assert planner_cost - 2 / (1 + EPSILON_0) == pytest.approx(found.error.total.item(), rel=1e-12)


def test_margins_occur_and_so_do_wrong_choices():
    found = [(planning_stability(*w), anchor_costs(w)) for w in (world(s, 4, 0.02, 0.02, 0.02) for s in range(200))]
    guaranteed = sum(bool(f.guaranteed) for f, _ in found)
    wrong = sum(bool(f.chosen != cost.argmin()) for f, cost in found)
    assert guaranteed > 20 and wrong > 5


def test_exact_latents_choose_as_the_anchor_does():
    _, z, goal, *_ = world(0, 8, 0.0, 0.0, 0.0)
    scale = Scale(torch.full((3,), 1 + EPSILON_0, dtype=torch.float64), 2.0)
    found = planning_stability(z, z, goal, z, goal, scale, scale)
    assert found.error.total < 1e-12 and found.regret == 0 and found.guaranteed


def test_queries_may_be_batched():
    one, other = world(0, 5, 0.1, 0.1, 0.1), world(1, 5, 1.0, 0.1, 0.1)
    scales = one[5:]
    together = planning_stability(*map(torch.stack, zip(one[:5], other[:5], strict=True)), *scales)
    for i, arguments in enumerate((one, other)):
        alone = planning_stability(*arguments[:5], *scales)
        torch.testing.assert_close([part[i] for part in together.error], list(alone.error))
        torch.testing.assert_close([field[i] for field in together[1:]], list(alone[1:]))


@settings(max_examples=200, deadline=None)
@given(worlds, st.integers(1, 6))
def test_novelty_moves_by_at_most_the_distortion_and_clear_orders_are_kept(drawn, k):
    seed, candidates, distortion, _, spread = drawn
    _, z, _, p, _, *scales = world(seed, candidates + 10, distortion, 0.0, spread)
    epsilon = relational_distortion(scales[0].distances(z, z), scales[1].distances(p, p)).maximum
    s_z, s_p = (knn_novelty(x, x[:6], k, scale) for x, scale in zip((z, p), scales, strict=True))
    assert (s_z - s_p).abs().max() <= epsilon + ROUNDING
    preserved = order_is_preserved(s_p[:, None], s_p, epsilon + ROUNDING)
    assert (s_z[:, None] > s_z)[preserved].all()
    if distortion < 0.1:
        assert preserved.any()


def test_the_novelty_bound_is_attained_and_twice_the_distortion_needed():
    bank, queries = column(-0.2, -0.1, 0, 0.1, 0.2), column(3, -3 - 1.9 * 0.5)
    moved = queries + 0.5  # nearer on the left, farther on the right; every distance changes by 0.5
    s_p, s_z = (knn_novelty(q, bank, 3, UNIT) for q in (queries, moved))
    epsilon = relational_distortion(UNIT.distances(moved, bank), UNIT.distances(queries, bank)).maximum
    torch.testing.assert_close((s_z - s_p).abs(), epsilon.expand(2))
    assert s_p[1] - s_p[0] > 1.89 * epsilon and s_z[1] < s_z[0]
    assert not order_is_preserved(s_p[1], s_p[0], epsilon) and order_is_preserved(s_p[1], s_p[0], 0.9 * epsilon)


costs = st.lists(st.floats(-10, 10), min_size=1, max_size=10)


@settings(max_examples=300, deadline=None)
@given(costs, st.floats(0, 3), st.integers(0, 10**6))
def test_minima_under_uniform_perturbations(values, epsilon, seed):
    f = torch.tensor(values, dtype=torch.float64)
    g = f + epsilon * (2 * torch.rand(len(f), generator=make_rng(seed), dtype=torch.float64) - 1)
    epsilon = (f - g).abs().max()
    assert (f.min() - g.min()).abs() <= epsilon + ROUNDING
    assert regret(f, g.argmin()) <= 2 * epsilon + ROUNDING
    if selection_margin(f) > 2 * epsilon + ROUNDING:
        assert g.argmin() == f.argmin()


def test_minima_move_by_the_perturbation_and_choices_turn_just_below_twice_it():
    f = torch.tensor([0, 1.98, 5], dtype=torch.float64)
    g = f + torch.tensor([1, -1, -1], dtype=torch.float64)
    assert regret(f, g.argmin()) == selection_margin(f) == 1.98
    assert ((f + 1).min() - f.min()) == 1
    assert selection_margin(f[:1]) == torch.inf


@settings(max_examples=100, deadline=None)
@given(worlds, st.floats(0, 2))
def test_task_regret_is_bounded(drawn, epsilon_anchor):
    arguments = world(*drawn)
    found, cost = planning_stability(*arguments), anchor_costs(arguments)
    task = cost + epsilon_anchor * (2 * torch.rand(len(cost), generator=make_rng(drawn[0], 1)) - 1)
    bound = task_regret_bound(found.error.total, (task - cost).abs().max())
    assert regret(task, found.chosen) <= bound + ROUNDING


def test_the_task_bound_is_nearly_attained():
    arguments = by_prediction(0.05)
    found = planning_stability(*arguments)
    task = anchor_costs(arguments) + torch.tensor([-0.3, 0.3])
    bound = task_regret_bound(found.error.total, 0.3)
    assert found.error.regret_bound < 0.99 * bound < regret(task, found.chosen) <= bound


def rolled(predictor, start, actions, one_step, draw):
    """A true path whose every step the predictor misses by ``one_step``, and the predicted path: (T + 1, ...)."""
    true, predicted = [start], [start]
    for action in actions:
        miss = torch.randn(start.shape, generator=draw, dtype=torch.float64)
        true.append(predictor(true[-1], action) + one_step * miss / miss.norm(dim=-1, keepdim=True))
        predicted.append(predictor(predicted[-1], action))
    return torch.stack(true), torch.stack(predicted)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 3), st.floats(0, 2), st.integers(1, 8))
def test_rollout_error_of_a_network_is_bounded(seed, gain, one_step, steps):
    draw = make_rng(seed)
    first, second, from_action = (
        torch.randn(4, 4, generator=draw, dtype=torch.float64) * gain / 3 for _ in range(3)
    )
    lipschitz = float(torch.linalg.matrix_norm(first, 2) * torch.linalg.matrix_norm(second, 2))  # tanh' ≤ 1
    actions = torch.randn(steps, 5, 4, generator=draw, dtype=torch.float64)
    start = torch.randn(5, 4, generator=draw, dtype=torch.float64)

    def predictor(z, action):
        return torch.tanh(z @ first + action @ from_action) @ second

    true, predicted = rolled(predictor, start, actions, one_step, draw)
    for t in range(steps + 1):
        worst = (true[t] - predicted[t]).norm(dim=-1).max()
        assert worst <= rollout_error_bound(one_step, lipschitz, t) + ROUNDING


@pytest.mark.parametrize("lipschitz", [0.0, 0.5, 1.0, 1.5])
def test_the_rollout_bound_is_attained_by_errors_that_point_one_way(lipschitz):
    true = predicted = 0.0
    for _ in range(6):
        true, predicted = lipschitz * true + 0.1, lipschitz * predicted
    assert true - predicted == pytest.approx(rollout_error_bound(0.1, lipschitz, 6), rel=1e-12)


def test_a_predictor_that_sees_history_needs_the_constant_of_the_whole_window():
    """g(z₋₁, z) = L (z₋₁ + z) / √2 is L-Lipschitz in its window, yet errors outgrow ε Σ Lᵗ; √(1 + L²) is enough."""
    lipschitz, before, error = 1.0, 0.0, 0.0
    for _ in range(10):
        before, error = error, lipschitz * (before + error) / math.sqrt(2) + 0.1
    assert error > 2 * rollout_error_bound(0.1, lipschitz, 10)
    assert error <= rollout_error_bound(0.1, math.sqrt(1 + lipschitz**2), 10)
