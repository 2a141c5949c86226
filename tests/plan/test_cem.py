import pytest
import torch

from atlas_wm.config import PlanConfig
from atlas_wm.plan.cem import CEM
from atlas_wm.rng import make_rng

SMALL = PlanConfig(candidates=40, iterations=6, elites=7, horizon=3, execute=3)


def linear_system(start, matrix, goal):
    """x' = x + B·a: the end, and the squared distance of the end from the goal, for (B, S, H, D) actions."""

    def end(actions):
        return start[:, None] + (actions @ matrix.T).sum(dim=2)

    return end, lambda actions: (end(actions) - goal[:, None]).square().sum(dim=-1)


def distance_to(targets):
    """A cost in which no episode touches another: squared distance to a target sequence of its own."""
    return lambda candidates: (candidates - targets[:, None]).square().flatten(2).sum(dim=-1)


@pytest.fixture
def recorded():
    """Costs and candidates of every iteration of one search for 2 episodes, and its solution."""
    targets = torch.randn(2, 3, 4, generator=make_rng(5))
    seen = []

    def cost(candidates):
        costs = distance_to(targets)(candidates)
        seen.append((costs, candidates.clone()))
        return costs

    return seen, CEM(SMALL)(cost, torch.zeros(2, 3, 4), [make_rng(0), make_rng(1)])


def elites(costs, candidates):
    """(B, elites, H, D): the cheapest candidates of each episode."""
    order = costs.argsort(dim=1)[:, : SMALL.elites]
    return torch.stack([c[o] for c, o in zip(candidates, order, strict=True)])


@pytest.mark.parametrize("horizon", [1, 4])
def test_finds_the_optimum_of_a_linear_system(horizon):
    matrix = torch.tensor([[1.0, 0.5], [-0.3, 0.8]])
    start, goal = torch.tensor([[0.0, 0.0], [1.0, -2.0]]), torch.tensor([[1.0, 0.5], [0.5, -1.0]])
    end, cost = linear_system(start, matrix, goal)
    config = PlanConfig(candidates=300, iterations=40, elites=30, horizon=horizon, execute=1)
    solution = CEM(config)(cost, torch.zeros(2, horizon, 2), [make_rng(0), make_rng(1)])
    assert solution.mean.shape == (2, horizon, 2)
    torch.testing.assert_close(end(solution.mean[:, None])[:, 0], goal, atol=2e-3, rtol=0)
    if horizon == 1:  # one action, so one optimum: B⁻¹(goal − start)
        best = torch.linalg.solve(matrix, (goal - start).T).T
        torch.testing.assert_close(solution.mean[:, 0], best, atol=2e-3, rtol=0)
    assert (solution.costs[-1] < 1e-3 * solution.costs[0]).all()


def test_candidate_0_is_the_mean_in_every_iteration(recorded):
    seen, solution = recorded
    assert len(seen) == SMALL.iterations
    expected = torch.zeros(2, 3, 4)
    for costs, candidates in seen:
        torch.testing.assert_close(candidates[:, 0], expected, atol=1e-6, rtol=0)
        expected = elites(costs, candidates).mean(dim=1)
    torch.testing.assert_close(solution.mean, expected, atol=1e-6, rtol=0)


def test_candidates_are_drawn_with_mean_and_deviation_of_the_elites_from_the_episodes_own_stream(recorded):
    seen, _ = recorded
    noise = [make_rng(0), make_rng(1)]
    mean, std = torch.zeros(2, 3, 4), torch.ones(2, 3, 4)
    for costs, candidates in seen:
        drawn = torch.stack([torch.randn(40, 3, 4, generator=g) for g in noise])
        expected = mean[:, None] + std[:, None] * drawn
        torch.testing.assert_close(candidates[:, 1:], expected[:, 1:], atol=1e-5, rtol=0)
        best = elites(costs, candidates)
        mean, std = best.mean(dim=1), best.std(dim=1)


def test_reported_cost_is_the_mean_of_the_elites_in_each_iteration(recorded):
    seen, solution = recorded
    expected = torch.stack([costs.sort(dim=1).values[:, : SMALL.elites].mean(dim=1) for costs, _ in seen])
    torch.testing.assert_close(solution.costs, expected)


@pytest.mark.parametrize("size", [1, 4, 5])
def test_an_episode_alone_is_bit_for_bit_the_episode_among_sixteen(size):
    targets = torch.randn(16, 3, size, generator=make_rng(5))
    together = CEM(SMALL)(distance_to(targets), torch.zeros_like(targets), [make_rng(0, e) for e in range(16)])
    for e in range(16):
        alone = CEM(SMALL)(distance_to(targets[e : e + 1]), torch.zeros(1, 3, size), [make_rng(0, e)])
        assert torch.equal(alone.mean[0], together.mean[e])
        assert torch.equal(alone.costs[:, 0], together.costs[:, e])


def test_streams_of_different_keys_differ():
    keys = [(seed, episode, replan) for seed in (0, 1) for episode in (0, 1) for replan in (0, 1)]
    draws = {key: torch.randn(4, generator=make_rng(*key)) for key in keys}
    assert torch.stack(list(draws.values())).unique(dim=0).shape == (8, 4)
    assert torch.equal(torch.randn(4, generator=make_rng(0, 1, 0)), draws[0, 1, 0])
