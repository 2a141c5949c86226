"""The fast search finds what the plain one finds from the same noise.

Here its kernels run in Triton's interpreter, and a stand-in replays what a CUDA graph would.
"""

import logging
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from atlas_wm.config import PlanConfig
from atlas_wm.errors import UserError
from atlas_wm.kernels.rollout import FastTerminal
from atlas_wm.models.temporal_head import TemporalHead
from atlas_wm.models.world_model import WorldModel
from atlas_wm.plan import captured
from atlas_wm.plan import planner as planner_module
from atlas_wm.plan.captured import CapturedSearch, padded
from atlas_wm.plan.costs import make_cost
from atlas_wm.plan.planner import Planner
from atlas_wm.recipes import demo
from atlas_wm.rng import make_rng

pytest.importorskip("triton")
TINY = PlanConfig(candidates=6, iterations=2, elites=3, horizon=2, execute=2)


@pytest.fixture
def kernels():
    from atlas_wm.kernels import cem as kernels

    return kernels


class Replay:
    def __init__(self, function):
        self.function, self.result = function, function()

    def replay(self):
        again = self.function()
        if self.result is not None:
            self.result.copy_(again)


@pytest.fixture
def search(kernels, monkeypatch, shallow_model):
    monkeypatch.setattr(captured, "captured", lambda function, pool: ((r := Replay(function)), r.result))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return CapturedSearch(shallow_model, TINY, torch.float32)


def noise(kernels, keys, iteration=0, samples=400):
    mean, keys = torch.zeros(len(keys), 5, 10), torch.tensor(keys)
    return kernels.draw_candidates(mean, mean + 1, keys, torch.tensor([iteration]), samples)


def test_noise_is_standard_normal_and_candidate_0_the_mean(kernels):
    draws = noise(kernels, [3, 2**62 + 1])
    assert (draws[:, 0] == 0).all()
    x = draws[:, 1:].double()
    assert x.mean().abs() < 0.02 and abs(x.var() - 1) < 0.03 and abs((x**4).mean() - 3) < 0.2
    shifted = kernels.draw_candidates(
        torch.full((2, 5, 10), 4.0),
        torch.full((2, 5, 10), 0.5),
        torch.tensor([3, 2**62 + 1]),
        torch.tensor([0]),
        400,
    )
    torch.testing.assert_close(shifted, 4 + 0.5 * draws)


def test_noise_depends_on_key_and_iteration_and_not_on_the_batch(kernels):
    together = noise(kernels, [5, 6, 7, 8])
    assert torch.equal(noise(kernels, [7])[0], together[2])
    others = [*together[:, 1:].flatten(1), *(noise(kernels, [5], i)[0, 1:].flatten() for i in (1, 2))]
    related = torch.corrcoef(torch.stack(others)).fill_diagonal_(0)
    assert related.abs().max() < 0.03  # 20,000 numbers each: 4 deviations


def test_mean_and_deviation_are_those_of_the_cheapest(kernels):
    """Also where costs are equal, infinite or no numbers; no size is a power of two."""
    costs = torch.randint(0, 40, (3, 70), generator=make_rng(1)).float()
    costs[1, :5], costs[2, 3:50:2] = float("inf"), float("nan")
    candidates = 5 + torch.randn(3, 70, 5, 3, generator=make_rng(2))
    mean, std, iteration = torch.empty(3, 5, 3), torch.empty(3, 5, 3), torch.tensor([4])
    kernels.refine(costs, candidates, 9, mean, std, iteration)
    for i in range(3):
        order = costs[i].nan_to_num(nan=float("inf"), posinf=float("inf")).argsort(stable=True)
        elites = candidates[i, order[:9]]
        torch.testing.assert_close(mean[i], elites.mean(dim=0))
        torch.testing.assert_close(std[i], elites.std(dim=0))
    assert iteration == 5


@pytest.mark.parametrize("horizon", [1, 3, 5])
def test_kernels_compute_what_the_torch_operations_compute(demo_model, horizon):
    from atlas_wm.kernels.rollout_triton import TritonTerminal

    z, actions = torch.randn(2, 32, generator=make_rng(1)), torch.randn(2, 2, horizon, 10, generator=make_rng(2))
    with torch.inference_mode():
        fast = TritonTerminal(demo_model.predictor, torch.float32)
        torch.testing.assert_close(fast(z, actions), demo_model.terminal(z, actions), atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(fast.rollout(z, actions), demo_model.rollout(z, actions), atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(
            FastTerminal(demo_model.predictor).rollout(z, actions),
            demo_model.rollout(z, actions),
            atol=2e-5,
            rtol=1e-4,
        )


def plain_search(model, kernels, frames, goals, keys, start=None, nearest=False):
    z, z_goal = model.encode(frames), model.encode(goals)
    mean = torch.zeros(len(keys), 2, 10) if start is None else start
    std = torch.ones_like(mean)
    for i in range(TINY.iterations):
        candidates = kernels.draw_candidates(mean, std, torch.tensor(keys), torch.tensor([i]), TINY.candidates)
        distances = model.distance(model.rollout(z, candidates), z_goal[:, None, None])
        costs = distances.amin(dim=-1) if nearest else distances[..., -1]
        best = costs.argsort(dim=1)[:, : TINY.elites]
        elites = torch.stack([c[b] for c, b in zip(candidates, best, strict=True)])
        mean, std = elites.mean(dim=1), elites.std(dim=1)
    return z, z_goal, mean, model.rollout(z, mean[:, None])[:, 0]


@pytest.mark.slow
def test_it_finds_what_the_plain_search_finds_and_notices_new_weights(search, kernels, shallow_model, monkeypatch):
    monkeypatch.setattr(captured, "EXACT_BATCHES", 2)  # so that 3 episodes are padded to 4
    frames, goals = torch.randint(0, 256, (2, 3, 3, 32, 32), dtype=torch.uint8, generator=make_rng(0))
    for change in (0.0, 0.5):
        with torch.inference_mode():
            shallow_model.predictor.head.down.bias += change
        found = search(frames, goals, [11, 12, 13], torch.zeros(3, 2, 10))
        with torch.inference_mode():
            expected = plain_search(shallow_model, kernels, frames, goals, [11, 12, 13])
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    assert list(search.batches) == [4]


def test_the_nearest_step_from_a_start_in_chunks(search, kernels, shallow_model):
    search.config = replace(TINY, cost="nearest")
    search.cost = make_cost(search.config, shallow_model)
    search.most = 4  # of 6 candidates
    frames, goals = torch.randint(0, 256, (2, 1, 3, 32, 32), dtype=torch.uint8, generator=make_rng(0))
    start = torch.randn(1, 2, 10, generator=make_rng(1))
    found = search(frames, goals, [11], start)
    with torch.inference_mode():
        expected = plain_search(shallow_model, kernels, frames, goals, [11], start, nearest=True)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_the_answer_is_clipped_before_it_is_rolled_out_and_the_search_is_not(search, kernels, shallow_model):
    shallow_model.normalizer = replace(shallow_model.normalizer, low=(2.9, -1.5), high=(3.2, -0.5))
    frames, goals = torch.randint(0, 256, (2, 1, 3, 32, 32), dtype=torch.uint8, generator=make_rng(0))
    found = search(frames, goals, [11], torch.zeros(1, 2, 10))
    again = search(frames, goals, [11], torch.zeros(1, 2, 10))
    with torch.inference_mode():
        z, _, mean, _ = plain_search(shallow_model, kernels, frames, goals, [11])
        low, high = torch.tensor([-0.2, -0.25] * 5), torch.tensor([0.4, 0.25] * 5)  # standardised
        clipped = mean.clamp(low, high)
        imagined = shallow_model.rollout(z, clipped[:, None])[:, 0]
    assert not torch.equal(mean, clipped)
    for result in (found, again):
        torch.testing.assert_close(result.mean, clipped, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(result.latents, imagined, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cost", ["nearest", "temporal"])
def test_retrieved_sequences_and_the_start_compete_as_in_the_plain_search(search, shallow_model, monkeypatch, cost):
    """With the noise of the plain search, which it draws elsewhere; the start and the demonstrations to leave out
    are buffers, so two plans need no new graphs."""
    config = replace(TINY, cost=cost, start="retrieval")
    shown = torch.randint(0, 256, (2, 6, 3, 32, 32), dtype=torch.uint8, generator=make_rng(7))
    pieces = [(frames, torch.randn(6, 10, generator=make_rng(8, e)), e) for e, frames in enumerate(shown)]
    shallow_model.build_demonstrations(pieces)
    shallow_model.temporal_head = TemporalHead.initial(shallow_model.demonstrations.points.float(), make_rng(0))
    planner = Planner(shallow_model, config, plain=True)
    search.config, search.cost, search.retrieval = config, make_cost(config, shallow_model), planner.retrieval
    noise = torch.randn(2, 1, 6, 2, 10, generator=make_rng(5))

    def draw(mean, std, keys, iteration, samples):
        candidates = mean[:, None] + std[:, None] * noise[int(iteration)]
        candidates[:, 0] = mean
        return candidates

    monkeypatch.setattr(search.kernels, "draw_candidates", draw)
    for seed in (0, 1):
        frames, goals = torch.randint(0, 256, (2, 1, 3, 32, 32), dtype=torch.uint8, generator=make_rng(seed))
        start = torch.randn(1, 2, 10, generator=make_rng(seed, 1))
        left_out = torch.tensor([seed])
        found = search(frames, goals, [11], start, left_out)
        drawn = iter(noise[:, 0])
        with monkeypatch.context() as patch, torch.inference_mode():
            patch.setattr(torch, "randn", lambda *_, drawn=drawn, **__: next(drawn))
            expected = planner._search(frames, goals, [make_rng(0)], start, left_out)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    assert list(search.batches) == [1]


def test_batches_are_padded_to_few_sizes():
    assert [padded(n, 128) for n in (1, 7, 8, 9, 50, 100, 128)] == [1, 7, 8, 16, 56, 104, 128]
    assert padded(50, 52) == 52


@pytest.mark.parametrize("method", ["fast-wm", "dino-wm"])
def test_other_predictors_are_left_to_the_plain_search(kernels, monkeypatch, method):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    config = demo(method)
    with pytest.raises(UserError, match="Predictor has no fast rollout"):
        CapturedSearch(WorldModel(config.model, 2), config.plan)


def test_where_it_fails_the_planner_says_so_once_and_goes_on(demo_model, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("no compiler\nand a long story")

    monkeypatch.setattr(planner_module, "CapturedSearch", fail)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    planner = Planner(demo_model, TINY)
    frames = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    with caplog.at_level(logging.INFO):
        assert planner._search_captured(frames, frames, [make_rng(0)], torch.zeros(1, 2, 10)) is None
    assert [record.message for record in caplog.records] == ["fast path: off (RuntimeError: no compiler)"]
    assert planner.plain
