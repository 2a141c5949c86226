"""What a plan costs, where a search starts, and what one plan leaves to the next."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from atlas_wm.cli.plan import PlanFlags
from atlas_wm.config import PlanConfig
from atlas_wm.errors import UserError
from atlas_wm.plan.costs import Imagined, make_cost, starts
from atlas_wm.plan.harness import harness_policy
from atlas_wm.plan.planner import Planner
from atlas_wm.plan.solver import Solution, Solver
from atlas_wm.rng import make_rng

TERMINAL = PlanConfig(candidates=20, iterations=2, elites=5, horizon=4, execute=1)
NEAREST = replace(TERMINAL, cost="nearest")


def images(count, seed=0):
    return torch.randint(0, 256, (count, 3, 32, 32), generator=make_rng(seed), dtype=torch.uint8)


def test_the_end_counts_or_the_nearest_step(demo_model):
    latents = torch.zeros(1, 2, 3, 32)
    latents[0, :, :, 0] = torch.tensor([[3.0, 1.0, 2.0], [5.0, 6.0, 4.0]])
    z = torch.zeros(1, 32)
    imagined = Imagined(demo_model, z, z, torch.zeros(1, 2, 3, 10), latents)
    assert make_cost(TERMINAL, demo_model)(imagined).tolist() == [[4.0, 16.0]]
    assert make_cost(NEAREST, demo_model)(imagined).tolist() == [[1.0, 16.0]]


def test_a_search_begins_with_what_the_last_plan_left_over(demo_model):
    rest = np.ones((3, 10), np.float32)
    assert not starts(make_cost(TERMINAL, demo_model), 10, [rest, None]).any()
    start = starts(make_cost(NEAREST, demo_model), 10, [rest, None])
    assert start.shape == (2, 4, 10)
    assert (start[0, :3] == 1).all() and not start[0, 3:].any() and not start[1].any()


@pytest.mark.parametrize("plain", [False, True])
def test_candidates_are_ranked_by_their_nearest_step(demo_model, plain):
    seen = {}

    class Capture(Solver):
        def __call__(self, cost, start, rngs):
            candidates = torch.randn(1, 6, 4, 10, generator=make_rng(0))
            seen.update(start=start, costs=cost(candidates), candidates=candidates)
            return Solution(start + 1, torch.zeros(1, 1))

    frame, goal = images(1), images(1, seed=1)
    planner = Planner(demo_model, NEAREST, plain=plain)
    planner.solver = Capture(NEAREST)
    (first,) = planner.plan_batch(frame, goal, [make_rng(0)])
    assert first.rest.shape == (3, 10)
    (second,) = planner.plan_batch(frame, goal, [make_rng(0)], [first.rest])
    assert (seen["start"][0, :3] == 1).all() and not seen["start"][0, 3].any()
    with torch.no_grad():
        path, z_goal = demo_model.rollout(demo_model.encode(frame), seen["candidates"]), demo_model.encode(goal)
        distances = (path - z_goal).square().sum(dim=-1)
    assert (distances.argmin(dim=-1) < 3).any()  # some are nearest before their end
    torch.testing.assert_close(seen["costs"], distances.amin(dim=-1), atol=1e-4, rtol=1e-4)
    nearest = ((second.latents - z_goal.numpy()) ** 2).sum(axis=-1).min()
    assert second.cost == pytest.approx(nearest, rel=1e-4)


def test_what_is_handed_on_belongs_to_the_episode(demo_model):
    """Whatever else is in the batch; and the paper's cost does not use it."""
    frames, goals = images(3), images(3, seed=1)
    for config in (NEAREST, TERMINAL):
        planner = Planner(demo_model, config)
        rests = [None, *(p.rest for p in planner.plan_batch(frames[:2], goals[:2], [make_rng(1), make_rng(2)]))]
        together = planner.plan_batch(frames, goals, [make_rng(0, e) for e in range(3)], rests)
        afresh = planner.plan_batch(frames, goals, [make_rng(0, e) for e in range(3)])
        for e in range(3):
            (alone,) = planner.plan_batch(frames[e : e + 1], goals[e : e + 1], [make_rng(0, e)], rests[e : e + 1])
            assert np.array_equal(alone.actions, together[e].actions)
            ignored = config is TERMINAL or rests[e] is None
            assert np.array_equal(together[e].actions, afresh[e].actions) == ignored


def test_flags_change_the_settings_of_the_run():
    flags = PlanFlags(replan_every=2, cost="nearest", candidate_chunk=7)
    plan = flags.applied_to(PlanConfig(iterations=9))
    assert (plan.execute, plan.cost, plan.candidate_chunk, plan.iterations) == (2, "nearest", 7, 9)
    assert PlanFlags().applied_to(plan) == plan
    assert (PlanConfig().replanning, plan.replanning) == ("", "_nearest_replan2")
    with pytest.raises(UserError, match=r"plan\.execute must lie between 1 and plan\.horizon"):
        PlanFlags(replan_every=6).applied_to(PlanConfig())


def test_the_librarys_policy_starts_where_the_cost_says(demo_model):
    assert not harness_policy(demo_model, TERMINAL).cfg.warm_start
    assert harness_policy(demo_model, NEAREST).cfg.warm_start
