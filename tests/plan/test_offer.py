"""Planning uses the predictor's own mathematics; a fast path is one that it offers and that agrees with it."""

import logging

import pytest
import torch
from torch import nn

from atlas_wm.config import PlanConfig
from atlas_wm.errors import UserError
from atlas_wm.kernels.rollout import FastTerminal
from atlas_wm.models.predictors import CausalPredictor
from atlas_wm.plan.captured import CapturedSearch
from atlas_wm.plan.offer import fast_rollout
from atlas_wm.plan.planner import Planner
from atlas_wm.rng import make_rng

PLAN = PlanConfig(candidates=12, iterations=2, elites=4, horizon=4, execute=2)


class Forward(CausalPredictor):
    def forward(self, z, embedded_actions):
        return 2 * super().forward(z, embedded_actions)


class Read(CausalPredictor):
    def read(self, hidden):
        return 1 + super().read(hidden)


class Rollout(CausalPredictor):
    def rollout(self, z, actions):
        return 1 + super().rollout(z, actions)


class Terminal(CausalPredictor):
    def terminal(self, z, actions):
        return 1 + super().terminal(z, actions)


class OneMoreHead(CausalPredictor):
    """Trains something beside, and plans as it did."""

    def __init__(self, config, action_chunk):
        super().__init__(config, action_chunk)
        self.reward = nn.Linear(config.latent, 1)


class Halved:
    def __init__(self, world):
        self.world, self.calls = world, 0

    def terminal(self, z, actions):
        self.calls += 1
        return self.world.terminal(z, actions) / 2

    def rollout(self, z, actions):
        return self.world.rollout(z, actions) / 2


class Offering(CausalPredictor):
    """Imagines half of what the base class does, and knows how to do that fast."""

    def rollout(self, z, actions):
        return super().rollout(z, actions) / 2

    def fast_rollout(self, dtype, capturable=False):
        self.offered = Halved(FastTerminal(self, dtype))
        return self.offered


class Lying(CausalPredictor):
    def fast_rollout(self, dtype, capturable=False):
        return Halved(FastTerminal(self, dtype))


def become(model, kind):
    """The model with a predictor of this class and the same weights."""
    theirs = model.predictor.state_dict()
    model.predictor = kind(*model.predictor.settings).eval()
    model.predictor.load_state_dict(theirs, strict=False)
    return model


def images(seed):
    return torch.randint(0, 256, (1, 3, 32, 32), generator=make_rng(seed), dtype=torch.uint8)


def plan(model, caplog, plain=False):
    """A plan's cost and latents, and what was said in making two."""
    planner = Planner(model, PLAN, plain=plain)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        found = [planner.plan_batch(images(0), images(1), [make_rng(0)])[0] for _ in range(2)]
    return found[0], [record.message for record in caplog.records]


def swap(name, new):
    def change(model):
        *path, last = name.split(".")
        setattr(model.predictor.get_submodule(".".join(path)), last, new)

    return change


def hook(model):
    model.predictor.blocks[0].mlp.register_forward_hook(lambda module, given, answer: 2 * answer)


@pytest.mark.parametrize(
    "change",
    [
        *(lambda model, kind=kind: become(model, kind) for kind in (Forward, Read, Rollout, Terminal)),
        swap("blocks.1.mlp.activation", nn.ReLU()),
        swap("blocks.1.mlp.activation", nn.GELU(approximate="tanh")),
        swap("blocks.0.norm.eps", 1.0),
        swap("norm.forward", lambda x: x),
        swap("history", 2),
        hook,
    ],
    ids=["forward", "read", "rollout", "terminal", "relu", "tanh", "eps", "patched", "history", "hook"],
)
def test_a_predictor_that_was_changed_is_planned_with_as_it_is(demo_model, caplog, change):
    change(demo_model)
    expected, _ = plan(demo_model, caplog, plain=True)
    found, said = plan(demo_model, caplog)
    assert found.cost == expected.cost and (found.latents == expected.latents).all()
    assert len(said) == 1 and said[0].startswith("fast path: off (")
    with pytest.raises(UserError):
        fast_rollout(demo_model, torch.float32, capturable=True)


def test_a_subclass_that_plans_alike_keeps_the_fast_path(demo_model, caplog):
    expected, _ = plan(demo_model, caplog)
    found, said = plan(become(demo_model, OneMoreHead), caplog)
    assert found.cost == expected.cost and said == []


def test_a_predictor_may_offer_a_fast_path_of_its_own(demo_model, caplog):
    model = become(demo_model, Offering)
    expected, _ = plan(model, caplog, plain=True)
    found, said = plan(model, caplog)
    assert found.cost == pytest.approx(expected.cost, rel=1e-4) and said == []
    assert model.predictor.offered.calls > PLAN.iterations


def test_an_offer_that_computes_something_else_is_not_used_and_told_of_once(demo_model, caplog):
    model = become(demo_model, Lying)
    expected, _ = plan(model, caplog, plain=True)
    found, said = plan(model, caplog)
    assert found.cost == expected.cost
    assert said == ["fast path: off (the fast rollout of Lying differs from its plain one by 5.0e-01)"]


def test_a_world_model_with_a_rollout_of_its_own_is_not_passed_over(demo_model, caplog, monkeypatch):
    terminal = demo_model.terminal
    monkeypatch.setattr(demo_model, "terminal", lambda z, actions: 3 * terminal(z, actions))
    _, said = plan(demo_model, caplog)
    assert said == ["fast path: off (the fast rollout of CausalPredictor differs from its plain one by 6.7e-01)"]


def test_latents_that_are_no_numbers_are_no_agreement(demo_model, caplog):
    with torch.no_grad():
        demo_model.predictor.head.down.bias[0] = float("nan")
    _, said = plan(demo_model, caplog)
    assert said == ["fast path: off (the fast rollout of CausalPredictor differs from its plain one by nan)"]


def test_the_captured_search_takes_nothing_else_either(demo_model, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    with pytest.raises(UserError, match="Lying differs from its plain one by 5"):
        CapturedSearch(become(demo_model, Lying), PLAN)


def test_the_comparison_draws_no_random_numbers_and_leaves_the_model_as_it_was(demo_model):
    before = {name: t.clone() for name, t in demo_model.state_dict().items()}
    drawn = torch.get_rng_state()
    fast_rollout(demo_model, torch.float32)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(t, before[name]) for name, t in demo_model.state_dict().items())
