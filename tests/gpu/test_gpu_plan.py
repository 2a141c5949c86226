"""Plans on the device: captured graphs and Triton's kernels, against the search as it is written."""

import gc
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from on_device import DEVICE, FLOAT32, config_of, images, random_model

from atlas_wm.models.temporal_head import TemporalHead
from atlas_wm.plan.cem import CEM
from atlas_wm.plan.costs import Cost, candidate_costs
from atlas_wm.plan.planner import Planner
from atlas_wm.rng import make_rng

RECIPES = ["demo", "paper"]


def model_and_plan(recipe, **changes):
    config = config_of(FLOAT32, recipe=recipe)
    return random_model(config).eval(), replace(config.plan, **changes)


def frames_and_goals(model, episodes):
    size = model.config.encoder.image_size
    return images(episodes, size, seed=1), images(episodes, size, seed=2)


@pytest.mark.parametrize("recipe", RECIPES)
@torch.inference_mode()
def test_in_float32_the_kernels_choose_the_elites_of_the_plain_rollout(recipe):
    """They judge the candidates of every iteration of a plain search. Only costs that are equal but for rounding
    may change places."""
    from atlas_wm.kernels.rollout_triton import TritonTerminal

    model, plan = model_and_plan(recipe, iterations=8)
    z, z_goal = (model.encode(some) for some in frames_and_goals(model, 8))
    fast, gaps, swapped = TritonTerminal(model.predictor, torch.float32), [], []

    def cost(candidates):
        plain, other = (model.distance(world.terminal(z, candidates), z_goal[:, None]) for world in (model, fast))
        best, others = (costs.topk(plan.elites, dim=1, largest=False).indices for costs in (plain, other))
        gaps.append(float(((other - plain).abs() / plain).max()))
        for row, mine, theirs in zip(plain, others.tolist(), best.tolist(), strict=True):
            last = row[theirs].max()
            swapped.extend(float((row[i] - last).abs() / last) for i in set(mine) - set(theirs))
        return plain

    CEM(plan)(cost, torch.zeros(8, plan.horizon, 10, device=DEVICE), [make_rng(0, e) for e in range(8)])
    assert max(gaps) < 1e-5
    assert len(swapped) <= 2 and all(gap < 1e-6 for gap in swapped)  # of 8 · 8 · 30


@pytest.mark.parametrize(("recipe", "cost"), [("demo", "terminal"), ("demo", "nearest"), ("paper", "terminal")])
@torch.inference_mode()
def test_in_float32_the_captured_search_is_the_plain_one_from_the_same_noise(recipe, cost):
    from atlas_wm.kernels.cem import draw_candidates
    from atlas_wm.plan.captured import CapturedSearch

    model, plan = model_and_plan(recipe, iterations=3, cost=cost)
    frames, goals = frames_and_goals(model, 3)
    start, keys = torch.zeros(3, plan.horizon, 10, device=DEVICE), [11, 2**62 + 12, 13]
    found = CapturedSearch(model, plan, torch.float32)(frames, goals, keys, start)

    z, z_goal = model.encode(frames), model.encode(goals)
    mean, std, key = start, torch.ones_like(start), torch.tensor(keys, device=DEVICE)
    for i in range(plan.iterations):
        number = torch.tensor([i], device=DEVICE)
        candidates = draw_candidates(mean.contiguous(), std.contiguous(), key, number, plan.candidates)
        distances = model.distance(model.rollout(z, candidates), z_goal[:, None, None])
        costs = distances.amin(dim=-1) if cost == "nearest" else distances[..., -1]
        best = costs.topk(plan.elites, dim=1, largest=False).indices
        elites = torch.stack([c[b] for c, b in zip(candidates, best, strict=True)])
        mean, std = elites.mean(dim=1), elites.std(dim=1)
    torch.testing.assert_close(found.z, z, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.z_goal, z_goal, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.mean, mean, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(found.latents, model.rollout(z, mean[:, None])[:, 0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("recipe", "cost"), [("demo", "terminal"), ("demo", "nearest"), ("demo", "temporal"), ("paper", "terminal")]
)
def test_captured_plans_start_from_demonstrations(recipe, cost, caplog):
    """One iteration whose elites are the cheapest two: no plan costs more than the best proposal, and no graph is
    captured again for another start."""
    model, plan = model_and_plan(recipe, iterations=1, elites=2, cost=cost, start="retrieval", clip_actions=False)
    size, episodes = model.config.encoder.image_size, 30
    model.build_demonstrations(
        (images(8, size, seed=20 + e), torch.randn(8, 10, generator=make_rng(e)), e) for e in range(episodes)
    )
    model.temporal_head = TemporalHead.initial(model.demonstrations.points.float(), make_rng(0))
    planner, (frames, goals) = Planner(model, plan, dtype=torch.float32), frames_and_goals(model, 4)
    rngs = [make_rng(0, e) for e in range(4)]
    with caplog.at_level(logging.INFO, "atlas_wm"):
        plans = planner.plan_batch(frames, goals, rngs)
    assert "fast path: CUDA graphs" in caplog.text and "fast path: off" not in caplog.text
    graphs = planner._captured.batches[4]
    rests = [np.full((2, 10), 0.5, np.float32)] * 4
    again = planner.plan_batch(goals, frames, rngs, rests, left_out := [5, -1, 7, 5])
    assert planner._captured.batches[4] is graphs
    assert planner._captured.batches[4].left_out.tolist() == left_out
    proposed = planner._captured.batches[4].proposals
    for episode, group in enumerate(left_out):
        own = model.demonstrations.actions[model.demonstrations.episodes == group].to(DEVICE)
        assert not torch.isin(proposed[episode, 1:, 0, 0], own[:, 0]).any()
    none = [-1] * 4
    for found, now, then, rest, without in (
        (plans, frames, goals, 0.0, none),
        (again, goals, frames, 0.5, left_out),
    ):
        with torch.inference_mode():
            z, z_goal = model.encode(now), model.encode(then)
            start = torch.zeros(4, plan.horizon, 10, device=DEVICE)
            start[:, :2] = 0.0 if cost == "terminal" else rest
            proposals = planner.retrieval.proposals(start, z, z_goal, torch.tensor(without, device=DEVICE))
            best = candidate_costs(planner.cost, model, model, z, proposals, z_goal).amin(dim=1).tolist()
        assert all(p.cost <= b * (1 + 1e-3) for p, b in zip(found, best, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_in_bf16_plans_are_as_good(recipe, caplog):
    model, plan = model_and_plan(recipe, iterations=10)
    frames, goals = frames_and_goals(model, 16)
    rngs = [make_rng(0, e) for e in range(16)]
    with caplog.at_level(logging.INFO, "atlas_wm"):
        fast = Planner(model, plan).plan_batch(frames, goals, rngs)
    assert "fast path: CUDA graphs, products in bfloat16" in caplog.text and "fast path: off" not in caplog.text
    plain = Planner(model, plan, plain=True).plan_batch(frames, goals, rngs)
    before, mine, theirs = (
        np.mean(costs) for costs in ([p.start_cost for p in plain], [p.cost for p in fast], [p.cost for p in plain])
    )
    assert abs(mine - theirs) < 0.1 * abs(before - theirs) + 0.02 * theirs


def test_a_plan_does_not_depend_on_those_beside_it():
    """In float32, but for rounding, which depends on the size of a batch."""
    model, plan = model_and_plan("demo", iterations=3)
    frames, goals = frames_and_goals(model, 20)  # padded to 24
    rngs = [make_rng(0, e) for e in range(20)]
    planner = Planner(model, plan, dtype=torch.float32)
    together = planner.plan_batch(frames, goals, rngs)
    for e in (0, 7, 19):
        alone = planner.plan_batch(frames[e : e + 1], goals[e : e + 1], rngs[e : e + 1])[0]
        np.testing.assert_allclose(alone.actions, together[e].actions, atol=1e-3)


@pytest.mark.apart
@pytest.mark.parametrize("plain", [False, True], ids=["captured", "plain"])
def test_out_of_memory_a_plan_comes_in_parts_and_is_the_same(plain, caplog):
    model, plan = model_and_plan("paper", iterations=2)
    frames, goals = frames_and_goals(model, 48)
    rngs = lambda: [make_rng(0, e) for e in range(48)]  # noqa: E731
    with torch.inference_mode():
        model.encode(frames)  # the libraries take their own memory before it is counted
    torch.cuda.empty_cache()
    base = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    planner = Planner(model, plan, plain=plain, dtype=torch.float32)
    expected = planner.plan_batch(frames, goals, rngs())
    needed = torch.cuda.max_memory_reserved() - base
    del planner
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction((base + 0.45 * needed) / total)
    planner = Planner(model, plan, plain=plain, dtype=torch.float32)
    with caplog.at_level(logging.INFO, "atlas_wm"):
        found = planner.plan_batch(frames, goals, rngs())
    assert "out of memory with" in caplog.text and "from now on" in caplog.text
    assert "fast path: off" not in caplog.text and planner.plain == plain
    np.testing.assert_allclose([p.cost for p in found], [p.cost for p in expected], rtol=2e-2)
    same = [np.allclose(a.actions, b.actions, atol=1e-3) for a, b in zip(found, expected, strict=True)]
    assert np.mean(same) > 0.9  # where two costs are equal but for rounding, another candidate may be an elite


class End(Cost):
    """The paper's cost, as somebody else's class."""

    def __call__(self, imagined):
        return imagined.distances[..., -1]


def test_an_own_cost_is_planned_with_without_graphs_and_by_the_fast_rollout(caplog):
    model, plan = model_and_plan("demo", iterations=3)
    frames, goals = frames_and_goals(model, 4)
    planner = Planner(model, replace(plan, cost=f"{__name__}:End"), dtype=torch.float32)
    with caplog.at_level(logging.INFO, "atlas_wm"):
        found = planner.plan_batch(frames, goals, [make_rng(0, e) for e in range(4)])
    assert "fast path: off" not in caplog.text and not planner.plain and planner._captured is None
    expected = Planner(model, plan, plain=True).plan_batch(frames, goals, [make_rng(0, e) for e in range(4)])
    np.testing.assert_allclose([p.cost for p in found], [p.cost for p in expected], rtol=2e-2)
