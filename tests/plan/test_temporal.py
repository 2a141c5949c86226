"""Plans that minimise the time to the goal: --cost temporal."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from atlas_wm.config import EncoderConfig, ModelConfig, PlanConfig, PredictorConfig
from atlas_wm.errors import UserError
from atlas_wm.models.temporal_head import TemporalHead
from atlas_wm.models.world_model import WorldModel
from atlas_wm.plan.costs import Imagined, candidate_costs, make_cost
from atlas_wm.plan.harness import GoalCost, harness_policy
from atlas_wm.plan.planner import Planner
from atlas_wm.rng import make_rng

PLAN = PlanConfig(candidates=20, iterations=2, elites=5, horizon=3, execute=1, cost="temporal")


def images(count, seed=0, side=32):
    return torch.randint(0, 256, (count, 3, side, side), generator=make_rng(seed), dtype=torch.uint8)


def with_head(model):
    with torch.no_grad():
        z = model.encode(images(30, 9, model.config.encoder.image_size))
    points = z if z.ndim == 2 else z.mean(dim=1)
    model.temporal_head = TemporalHead.initial(points, make_rng(4), step=0.7)
    return model


@pytest.fixture(params=["latent", "patches"])
def model(request, demo_model):
    if request.param == "latent":
        return with_head(demo_model)
    sizes = EncoderConfig(kind="dinov2", image_size=8, patch_size=4, width=12, heads=3, depth=1)
    torch.manual_seed(0)
    config = ModelConfig(sizes, PredictorConfig(kind="patch", depth=1, heads=2, head_dim=4, mlp=16))
    return with_head(WorldModel(config, action_size=2).eval())


def by_hand(model, start, latents, z_goal):
    """(B, …), (B, S, H, …) and (B, …) → (B, S), candidate by candidate"""
    start, latents, z_goal = (z.mean(dim=-2) if z_goal.ndim == 3 else z for z in (start, latents, z_goal))
    costs, d = torch.empty(latents.shape[:2]), model.temporal_head

    def left(z, goal):
        return float(d(z, goal) + (z - goal).norm() / 0.7) / 2

    for b, of_episode in enumerate(latents):
        for s, path in enumerate(of_episode):
            before, jumped, least = start[b], 0.0, torch.inf
            for z in path:
                jumped += 1.5 * max(0.0, float(d(before, z)) - 2)
                before, least = z, min(least, left(z, z_goal[b]) + jumped)
            costs[b, s] = least
    return costs


def test_the_nearest_step_in_time_counts_and_jumps_cost(model):
    side = model.config.encoder.image_size
    with torch.no_grad():
        z, z_goal = model.encode(images(2, 1, side)), model.encode(images(2, 2, side))
        candidates = torch.randn(2, 4, 3, 10, generator=make_rng(3))
        latents, cost = model.rollout(z, candidates), make_cost(PLAN, model)
        found = candidate_costs(cost, model, model, z, candidates, z_goal)
        torch.testing.assert_close(found, by_hand(model, z, latents, z_goal), atol=1e-5, rtol=1e-4)
        at_goal = z_goal[:, None, None].expand(2, 1, 3, *z.shape[1:])
        assert cost(Imagined(model, z_goal, z_goal, candidates[:, :1], at_goal)).max() < 1e-5
        model.temporal_head = replace(model.temporal_head, scale=model.temporal_head.scale + 50)  # all is far away
        there = make_cost(PLAN, model)
        jumped = there(Imagined(model, z, z_goal, candidates[:, :1], at_goal))[:, 0]
        start, goal = (x.mean(dim=1) if x.ndim == 3 else x for x in (z, z_goal))
        torch.testing.assert_close(jumped, 1.5 * (model.temporal_head(start, goal) - 2))


def test_a_plan_reports_model_steps(model):
    side = model.config.encoder.image_size
    planner, frame, goal = Planner(model, PLAN), images(1, 1, side), images(1, 2, side)
    (plan,) = planner.plan_batch(frame, goal, [make_rng(0)])
    with torch.no_grad():
        z, z_goal = model.encode(frame), model.encode(goal)
    imagined = torch.from_numpy(plan.latents)[None, None]
    assert plan.cost == pytest.approx(float(by_hand(model, z, imagined, z_goal)), rel=1e-4)
    assert plan.start_cost == pytest.approx(float(by_hand(model, z, z[:, None, None], z_goal)), rel=1e-4)
    (standing,) = planner.plan_batch(frame, frame, [make_rng(0)])
    assert standing.start_cost == 0


def test_a_search_continues_the_last_plan_and_starts_from_demonstrations(demo_model):
    model, frames, goals = with_head(demo_model), images(8, 1), images(1, 2)
    model.build_demonstrations([(frames, torch.randn(8, 10, generator=make_rng(5)), 0)])
    model.normalizer = replace(model.normalizer, low=None, high=None)
    rest = np.ones((2, 10), np.float32)
    planner = Planner(model, PLAN)
    fresh, warm = (planner.plan_batch(frames[:1], goals, [make_rng(0)], [r])[0] for r in (None, rest))
    assert not np.array_equal(fresh.actions, warm.actions)
    planner = Planner(model, replace(PLAN, start="retrieval"))
    (plan,) = planner.plan_batch(frames[:1], goals, [make_rng(0)], [rest])
    start = torch.zeros(1, 3, 10)
    start[0, :2] = 1
    with torch.no_grad():
        z, z_goal = model.encode(frames[:1]), model.encode(goals)
        proposals = planner.retrieval.proposals(start, z, z_goal)
        assert plan.cost <= by_hand(model, z, model.rollout(z, proposals), z_goal).min() * (1 + 1e-4)


def test_the_librarys_solvers_see_the_same_costs(model):
    side = model.config.encoder.image_size
    frames, goals = images(2, 1, side), images(2, 2, side)
    candidates = torch.randn(2, 6, 3, 10, generator=make_rng(3)).requires_grad_()
    images_of = {"pixels": frames, "goal": goals}
    info = {key: image[:, None, None].expand(-1, 6, -1, -1, -1, -1) for key, image in images_of.items()}
    planner = Planner(model, PLAN, plain=True)
    costs = GoalCost(model, candidate_chunk=4, cost=planner.cost).get_cost(info, candidates)
    with torch.no_grad():
        z, z_goal = model.encode(frames), model.encode(goals)
        torch.testing.assert_close(costs, candidate_costs(planner.cost, model, model, z, candidates, z_goal))
    (gradient,) = torch.autograd.grad(costs.sum(), candidates)
    assert gradient.isfinite().all() and gradient.abs().sum() > 0
    assert harness_policy(model, PLAN).cfg.warm_start
    assert not any(t.requires_grad for t in vars(model.temporal_head).values())


def test_a_model_without_a_head_says_how_to_get_one(demo_model):
    with pytest.raises(UserError, match=r"plan\.cost temporal needs a temporal head.*`atlas head RUN`"):
        Planner(demo_model, PLAN)


def test_the_head_follows_a_model_to_its_device(demo_model):
    """As far as a machine without a GPU shows: weights and costs of another device have no values."""
    cost = make_cost(PLAN, with_head(demo_model))
    latents = torch.empty(1, 2, 3, 32, device="meta")
    imagined = Imagined(demo_model, latents[:, 0, 0], latents[:, 0, 0], latents, latents)
    assert cost(imagined).shape == (1, 2) and cost.head.mean.device.type == "meta"


def test_the_oracle_searches_with_the_distance_of_the_task():
    from atlas_wm.evaluate.oracle import oracle_plan

    assert oracle_plan(PLAN).cost == "nearest"


def test_evaluations_have_a_file_of_their_own():
    assert PLAN.replanning == "_temporal_replan1"
