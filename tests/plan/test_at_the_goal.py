"""The risk of a plan whose agent is at the goal already, and what a planner refuses."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from atlas_wm import Planner, load_model
from atlas_wm.config import PlanConfig
from atlas_wm.errors import UserError
from atlas_wm.models.bank import LatentBank
from atlas_wm.models.temporal_head import TemporalHead
from atlas_wm.models.world_model import WorldModel
from atlas_wm.plan.costs import Cost, Terminal, make_cost
from atlas_wm.rng import make_rng

QUICK = PlanConfig(candidates=20, iterations=2, elites=5)


@pytest.fixture(scope="module")
def shipped_model() -> WorldModel:
    return load_model("demo")


@pytest.fixture(scope="module")
def draw(task):
    return lambda *place: task.draw(np.array([place], np.float32), 224)[0].permute(1, 2, 0).numpy()


@pytest.mark.parametrize("place", [(60, 60), (112, 49), (170, 150), (30, 190)])
def test_who_is_there_risks_little(shipped_model, draw, place):
    plan = Planner(shipped_model).plan(draw(*place), draw(*place))
    assert plan.start_cost == plan.strayed == plan.crossed == 0
    assert plan.remaining < 0.3 and plan.risk == pytest.approx(plan.remaining)


@pytest.mark.parametrize("places", [((60, 60), (60, 90)), ((60, 60), (170, 90))])
def test_on_the_way_nothing_changes(shipped_model, draw, places):
    """By the definitions of docs/concepts.md."""
    frame, goal = (draw(*place) for place in places)
    planner = Planner(shipped_model)
    plan = planner.plan(frame, goal)
    assert plan.start_cost > planner.cost.near(shipped_model) > 0
    frames = planner.prepare(torch.from_numpy(frame).permute(2, 0, 1)[None])
    with torch.no_grad():
        path = torch.cat([shipped_model.encode(frames), torch.from_numpy(plan.latents)])[None]
    assert plan.remaining == pytest.approx(plan.cost / plan.start_cost)
    assert plan.strayed == pytest.approx(float(shipped_model.demonstrations.strayed(path)), abs=1e-5)
    assert plan.crossed == float(shipped_model.bank.crossed(frames, path))
    assert plan.risk == pytest.approx(1 - (1 - plan.remaining) * (1 - plan.strayed) * (1 - plan.crossed), abs=1e-6)


class Doubled(Terminal):
    def distance(self, model, latents, goal):
        return 2 * model.distance(latents, goal)


def test_what_is_near_has_the_unit_of_the_cost(demo_model):
    cost = make_cost(QUICK, demo_model)
    assert cost.near(demo_model) == 0  # nothing is known
    points = torch.zeros(50, 32)
    points[:, 0] = 3.0 * torch.arange(50)
    demo_model.bank = LatentBank.of([points])
    assert cost.near(demo_model) == pytest.approx(float(demo_model.distance(points[0], points[1])))
    assert Doubled(QUICK).near(demo_model) == 0
    alike = SimpleNamespace(bank=demo_model.bank, projector=None, config=SimpleNamespace(latent_shape=(7, 32)))
    tokens = points[:, None].expand(-1, 7, -1)  # all of a frame are its mean
    assert cost.near(alike) == pytest.approx(float((tokens[1] - tokens[0]).square().mean()))
    demo_model.temporal_head = TemporalHead.initial(points, make_rng(0))
    assert make_cost(replace(QUICK, cost="temporal"), demo_model).near(demo_model) == 1
    assert Cost.near is Terminal.near


@pytest.mark.parametrize(
    ("missing", "parts"),
    [(["bank"], "crossed"), (["demonstrations"], "strayed"), (["demonstrations", "bank"], "strayed and crossed")],
)
def test_a_planner_warns_of_what_the_risk_is_without(shipped_model, caplog, monkeypatch, missing, parts):
    Planner(shipped_model)
    assert not caplog.records
    for part in missing:
        monkeypatch.setattr(shipped_model, part, None)
    Planner(shipped_model)
    (record,) = caplog.records
    assert f"risk is without {parts}: `atlas bank RUN` adds" in record.message


def test_a_plan_is_made_in_eval_mode(demo_model):
    frame, goal = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    planner = Planner(demo_model, QUICK)
    before = planner.plan(frame, goal)
    demo_model.train()
    assert np.array_equal(planner.plan(frame, goal).actions, before.actions)


def test_a_planner_says_what_it_takes(demo_model):
    with pytest.raises(UserError, match=r"not 'demo': Planner\(load_model"):
        Planner("demo")
    with pytest.raises(UserError, match=r"as a PlanConfig\(…\), not {'candidates': 20}"):
        Planner(demo_model, {"candidates": 20})


def test_the_last_plan_must_fit(demo_model):
    frame, goal = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    planner = Planner(demo_model, replace(QUICK, cost="nearest", execute=2))
    plan = planner.plan(frame, goal)
    planner.plan(frame, goal, last=plan)
    wrong = (plan.rest, 3, "plan", *(plan._replace(rest=np.zeros(shape)) for shape in ((6, 10), (3, 9), (3,))))
    for last in wrong:
        with pytest.raises(UserError, match="last must be a plan of this planner"):
            planner.plan(frame, goal, last=last)
