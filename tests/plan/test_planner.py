import logging

import numpy as np
import pytest
import torch

from atlas_wm.config import PlanConfig
from atlas_wm.plan import planner as module
from atlas_wm.plan.planner import Planner, dtype_of
from atlas_wm.plan.solver import Solution, Solver
from atlas_wm.rng import make_rng

QUICK = PlanConfig(candidates=20, iterations=3, elites=5, horizon=4, execute=3)


def image(side=32, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


def images(count, seed=0):
    return torch.randint(0, 256, (count, 3, 32, 32), generator=make_rng(seed), dtype=torch.uint8)


def channels_first(frame):
    return torch.as_tensor(frame).permute(2, 0, 1)[None]


def area_means(frame, side):
    """Each target pixel is the rounded mean of all source pixels it touches."""
    cuts = [(i * len(frame) // side, -(-(i + 1) * len(frame) // side)) for i in range(side)]
    means = [[frame[top:bottom, left:right].mean(axis=(0, 1)) for left, right in cuts] for top, bottom in cuts]
    return np.round(means).astype(np.uint8)


@pytest.fixture
def planner(demo_model):
    return Planner(demo_model, QUICK)


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_an_episode_alone_is_bit_for_bit_the_episode_among_sixteen(planner):
    frames, goals = images(16), images(16, seed=1)
    together = planner.plan_batch(frames, goals, [make_rng(0, e) for e in range(16)])
    assert len(together) == 16
    for e in range(16):
        (alone,) = planner.plan_batch(frames[e : e + 1], goals[e : e + 1], [make_rng(0, e)])
        assert same(alone, together[e])


@pytest.mark.parametrize(
    ("most", "given", "expected"),
    [(10**9, None, 1), (0, None, 3), (10**9, "3", 3)],
    ids=["small", "large", "given"],
)
def test_a_small_model_plans_with_one_thread_unless_the_user_says_how_many(
    demo_model, monkeypatch, most, given, expected
):
    monkeypatch.setattr(module, "SMALL_PREDICTOR", most)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    planner, before, seen = Planner(demo_model, QUICK), torch.get_num_threads(), []
    monkeypatch.setattr(planner, "_solve", lambda *_: seen.append(torch.get_num_threads()) or [])
    torch.set_num_threads(3)
    try:
        planner.plan_batch(images(1), images(1), [make_rng(0)])
        assert (seen, torch.get_num_threads()) == ([expected], 3)
    finally:
        torch.set_num_threads(before)


def test_the_same_seed_gives_the_same_plan_and_another_seed_another(planner):
    plan = planner.plan(image(), image(seed=1), seed=0)
    assert same(plan, planner.plan(image(), image(seed=1), seed=0))
    assert not np.array_equal(plan.actions, planner.plan(image(), image(seed=1), seed=1).actions)


def test_candidates_are_ranked_by_the_squared_distance_of_their_last_latent(planner, demo_model):
    candidates, costs = torch.randn(1, 6, 4, 10, generator=make_rng(0)), []

    class Capture(Solver):
        def __call__(self, cost, start, rngs):
            costs.append(cost(candidates))
            return Solution(candidates[:, 0], torch.zeros(1, 1))

    planner.solver = Capture(QUICK)
    planner.plan(image(), image(seed=1))
    with torch.no_grad():
        z, goal = (demo_model.encode(channels_first(image(seed=s))) for s in (0, 1))
        ends = demo_model.rollout(z, candidates)[0, :, -1]
    torch.testing.assert_close(costs[0][0], (ends - goal).square().sum(dim=1), atol=1e-4, rtol=1e-4)


def test_planning_lowers_the_cost(demo_model):
    few, many = (PlanConfig(candidates=50, elites=8, iterations=i) for i in (1, 8))
    first, last = (Planner(demo_model, config).plan(image(), image(seed=1)) for config in (few, many))
    assert last.cost < 0.9 * first.cost


def test_costs_are_squared_distances_to_the_encoded_goal(planner, demo_model):
    plan = planner.plan(image(), image(seed=1))
    with torch.no_grad():
        z, goal = (demo_model.encode(channels_first(image(seed=s)))[0].numpy() for s in (0, 1))
    assert plan.latents.shape == (4, 32)
    assert plan.cost == pytest.approx(((plan.latents[-1] - goal) ** 2).sum(), rel=1e-5)
    assert plan.start_cost == pytest.approx(((z - goal) ** 2).sum(), rel=1e-5)


def test_latents_are_what_the_model_imagines_for_the_actions(demo_model):
    planner = Planner(demo_model, PlanConfig(candidates=20, iterations=2, elites=5, horizon=4, execute=4))
    plan = planner.plan(image(), image(seed=1))
    standardised = demo_model.normalizer.apply(torch.as_tensor(plan.actions)).reshape(1, 1, 4, 10)
    with torch.no_grad():
        imagined = demo_model.rollout(demo_model.encode(channels_first(image())), standardised)
    np.testing.assert_allclose(plan.latents, imagined[0, 0].numpy(), atol=1e-4)


def test_actions_leave_standardised_space_in_the_order_chunk_step_coordinate(planner):
    mean = torch.arange(4 * 10.0).reshape(1, 4, 10) / 10

    class Known(Solver):
        def __call__(self, cost, start, rngs):
            return Solution(mean, torch.zeros(1, 1))

    planner.solver = Known(QUICK)
    actions = planner.plan(image(), image(seed=1)).actions
    assert actions.shape == (3 * 5, 2)  # 3 of the 4 chunks are executed
    for chunk in range(3):
        for step in range(5):
            a, b = mean[0, chunk, 2 * step : 2 * step + 2].tolist()
            expected = (a * 0.5 + 3.0, b * 2.0 - 1.0)  # the normaliser of the fixture
            assert actions[5 * chunk + step] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 20, 1000])
def test_chunks_of_candidates_do_not_change_the_plan(planner, demo_model, chunk):
    config = PlanConfig(**{**vars(QUICK), "candidate_chunk": chunk})
    whole = planner.plan(image(), image(seed=1))
    chunked = Planner(demo_model, config).plan(image(), image(seed=1))
    for a, b in zip(whole[:4], chunked[:4], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


def test_a_chunk_bounds_the_candidates_rolled_out_at_once(demo_model, monkeypatch):
    sizes, terminal = [], demo_model.terminal
    monkeypatch.setattr(demo_model, "terminal", lambda z, a: (sizes.append(a.shape[1]), terminal(z, a))[1])
    config = PlanConfig(candidates=20, iterations=1, elites=5, candidate_chunk=8)
    Planner(demo_model, config, plain=True).plan(image(), image(seed=1))
    assert sizes == [8, 8, 4]


def test_products_in_bf16_find_plans_of_like_cost(demo_model):
    config = PlanConfig(candidates=50, elites=8, iterations=5)
    exact, rough = (Planner(demo_model, config, dtype=dtype_of(p)) for p in ("auto", "bf16"))
    assert (exact.dtype, rough.dtype) == (torch.float32, torch.bfloat16)
    plans = [planner.plan(image(), image(seed=1)) for planner in (exact, rough)]
    assert plans[1].cost == pytest.approx(plans[0].cost, rel=0.1)
    assert not np.array_equal(plans[0].actions, plans[1].actions)


def test_a_cpu_without_packed_products_is_told_of_once(planner, monkeypatch, caplog):
    expected = planner.plan(image(), image(seed=1))
    monkeypatch.setattr(module.PackedProduct, "supported", lambda dtype: False)
    without = Planner(planner.model, QUICK)
    with caplog.at_level(logging.INFO):
        plans = [without.plan(image(), image(seed=1)) for _ in range(2)]
    assert caplog.text.count("no oneDNN products in float32") == 1
    np.testing.assert_allclose(plans[0].cost, expected.cost, rtol=1e-3)


def test_new_weights_are_noticed(planner, demo_model):
    before = planner.plan(image(), image(seed=1))
    with torch.no_grad():
        demo_model.predictor.head.down.bias += 1
    after = planner.plan(image(), image(seed=1))
    assert not same(before[:4], after[:4])
    assert same(after[:4], Planner(demo_model, QUICK).plan(image(), image(seed=1))[:4])


def test_planning_runs_in_eval_mode(demo_model, planner):
    expected = planner.plan(image(), image(seed=1))
    demo_model.train()
    assert same(Planner(demo_model, QUICK).plan(image(), image(seed=1)), expected)


@pytest.mark.parametrize("side", [224, 100])
def test_frames_of_any_size_are_reduced_to_the_size_of_the_model(planner, side):
    large, goal = image(side), image(side, seed=1)
    small, small_goal = (channels_first(area_means(p, 32)) for p in (large, goal))
    plan = planner.plan(large, goal)
    assert plan.actions.shape == (15, 2)
    assert same(plan, planner.plan_batch(small, small_goal, [make_rng(0)])[0])
