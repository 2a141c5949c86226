"""A plan that does not fit the memory is made in parts, and says so."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from atlas_wm.config import PlanConfig
from atlas_wm.models.world_model import WorldModel
from atlas_wm.plan.captured import CapturedSearch
from atlas_wm.plan.planner import Planner
from atlas_wm.recipes import demo, paper
from atlas_wm.rng import make_rng

PLAN = PlanConfig(candidates=20, iterations=2, elites=5, horizon=3, execute=3)


def images(count=1, seed=0):
    return torch.randint(0, 256, (count, 3, 32, 32), generator=make_rng(seed), dtype=torch.uint8)


def limited(function, most, sizes):
    """Runs out of memory with more than ``most`` candidates."""

    def run(z, actions):
        if actions.shape[0] * actions.shape[1] > most:
            raise torch.cuda.OutOfMemoryError("a long story")
        sizes.append(actions.shape[1])
        return function(z, actions)

    return run


def test_the_plain_search_halves_its_chunks_and_finds_the_same(demo_model, monkeypatch, caplog):
    expected = Planner(demo_model, PLAN, plain=True).plan_batch(images(), images(seed=1), [make_rng(0)])[0]
    sizes = []
    monkeypatch.setattr(demo_model, "terminal", limited(demo_model.terminal, 6, sizes))
    with caplog.at_level(logging.INFO):
        found = Planner(demo_model, PLAN, plain=True).plan_batch(images(), images(seed=1), [make_rng(0)])[0]
    np.testing.assert_allclose(found.actions, expected.actions, atol=1e-5)
    assert sizes == 2 * [5, 5, 5, 5]
    assert [r.message for r in caplog.records] == [
        "out of memory with 20 candidates at once: 10 from now on",
        "out of memory with 10 candidates at once: 5 from now on",
    ]


def test_one_candidate_that_does_not_fit_is_an_error(demo_model, monkeypatch):
    monkeypatch.setattr(demo_model, "terminal", limited(demo_model.terminal, 0, []))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        Planner(demo_model, PLAN, plain=True).plan_batch(images(), images(seed=1), [make_rng(0)])


def test_the_captured_search_halves_its_batches(demo_model, monkeypatch, caplog):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    search, tried = CapturedSearch(demo_model, PLAN, torch.float32), []

    def fits_three_episodes(largest, frames, goals, keys, start, left_out):
        tried.append((largest, search.most))
        if min(largest, len(keys)) > 3:
            raise torch.cuda.OutOfMemoryError
        return "found"

    monkeypatch.setattr(search, "_search_parts", fits_three_episodes)
    assert search(None, None, range(8), None) == "found"
    assert tried == [(128, 2560), (4, 80), (2, 40)]
    assert search(None, None, range(8), None) == "found" and len(tried) == 4  # from now on
    assert len(caplog.records) == 2


def test_on_a_cpu_many_candidates_are_rolled_out_in_parts():
    model = WorldModel(paper("atlas").model, action_size=2)
    chunk = Planner(model, PlanConfig()).chunk
    assert 300 < chunk < 10_000  # the paper's candidates at once: parts of them are slower
    assert Planner(model, replace(PLAN, candidate_chunk=7)).chunk == 7
    tokens, latents = (Planner(WorldModel(demo(m).model, 2), PLAN).chunk for m in ("dino-wm", "atlas"))
    assert tokens < latents / 10  # 16 patches each


def test_a_predictor_without_a_fast_path_says_so_once(caplog):
    planner = Planner(WorldModel(demo("fast-wm").model, 2), PLAN)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            planner.plan_batch(images(), images(seed=1), [make_rng(0)])
    said = "fast path: off (PrefixPredictor has no fast rollout)"
    assert [r.message for r in caplog.records] == [said]
