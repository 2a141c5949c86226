from dataclasses import replace

import pytest
import torch

from atlas_wm.config import ObjectiveConfig
from atlas_wm.losses import ClipLatents, objective, prediction, relational, sigreg, wemreg
from atlas_wm.losses.objective import TERMS
from atlas_wm.methods import METHODS
from atlas_wm.recipes import RECIPES
from atlas_wm.rng import make_rng

EVERYTHING = ObjectiveConfig(prediction=0.5, wemreg=2.0, sigreg=0.25, relational=0.125, directions=8)
ABLATION = ("atlas", "wemreg", "lewm+ood", "lewm")
NO_WEIGHTS = {"wemreg": 0.0, "sigreg": 0.0, "relational": 0.0}


@pytest.fixture
def clips():
    draw = make_rng(0)
    z, anchor, predicted = (torch.randn(*shape, generator=draw) for shape in ((6, 4, 5), (6, 4, 3), (6, 3, 5)))
    # Time steps of different scale: statistics over all frames at once would show.
    return ClipLatents(z * torch.arange(1.0, 5.0)[:, None], anchor, predicted, torch.zeros(6, 3, 2))


def test_prediction_is_the_mean_squared_error_of_everything(clips):
    expected = (clips.predicted - clips.z[:, 1:]).square().sum() / (6 * 3 * 5)
    torch.testing.assert_close(prediction(clips.predicted, clips.z[:, 1:]), expected)


def test_prediction_sends_gradient_to_both_sides():
    predicted = torch.randn(6, 3, 5, generator=make_rng(0)).requires_grad_()
    latents = torch.randn(6, 3, 5, generator=make_rng(1)).requires_grad_()
    prediction(predicted, latents).backward()
    assert (predicted.grad != 0).all()
    torch.testing.assert_close(predicted.grad, -latents.grad)


def test_objective_sends_prediction_gradient_into_the_target_latents(clips):
    z = clips.z.requires_grad_()
    objective(clips._replace(z=z), ObjectiveConfig()).total.backward()
    assert (z.grad[:, 0] == 0).all()  # the first frame is nobody's target
    assert (z.grad[:, 1:] != 0).all()


def test_total_is_the_weighted_sum_of_unweighted_terms(clips):
    total, terms = objective(clips, EVERYTHING, make_rng(1))
    assert set(terms) == {"prediction", "wemreg", "sigreg", "relational"}
    expected = sum(getattr(EVERYTHING, name) * value for name, value in terms.items())
    torch.testing.assert_close(total, expected)
    doubled = objective(clips, replace(EVERYTHING, wemreg=4.0), make_rng(1))
    torch.testing.assert_close(doubled.terms, terms)
    torch.testing.assert_close(doubled.total - total, 2 * terms["wemreg"])


def test_regularisers_see_each_time_step_alone_and_the_relational_term_all_frames(clips):
    for name, loss in (("wemreg", wemreg), ("sigreg", sigreg)):
        config = ObjectiveConfig(**{name: 1.0}, directions=8)
        each = [loss(clips.z[:, t], 8, make_rng(1)) for t in range(4)]
        torch.testing.assert_close(objective(clips, config, make_rng(1)).terms[name], torch.stack(each).mean())
    value = objective(clips, ObjectiveConfig(relational=1.0)).terms["relational"]
    torch.testing.assert_close(value, relational(clips.z.reshape(24, 5), clips.anchor.reshape(24, 3)))


@pytest.mark.parametrize("absent", ["prediction", "wemreg", "sigreg", "relational"])
def test_a_term_of_weight_zero_is_not_computed(clips, absent, monkeypatch):
    def refuse(*_):
        raise AssertionError(f"{absent} was computed")

    monkeypatch.setitem(TERMS, absent, refuse)
    assert absent not in objective(clips, replace(EVERYTHING, **{absent: 0.0}), make_rng(1)).terms


def test_methods_are_the_two_by_two_ablation():
    weights = {
        name: (METHODS[name].objective.wemreg, METHODS[name].objective.sigreg, METHODS[name].objective.relational)
        for name in ABLATION
    }
    assert weights == {
        "atlas": (3.0, 0.0, 0.1),
        "wemreg": (3.0, 0.0, 0.0),
        "lewm+ood": (0.0, 0.09, 0.1),
        "lewm": (0.0, 0.09, 0.0),
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_runs_of_the_methods_differ_in_nothing_but_the_named_weights(recipe):
    runs = {name: RECIPES[recipe](name) for name in ABLATION}
    for name, run in runs.items():
        assert set(run.objective.weights) == set(METHODS[name].objective.weights)
    stripped = [replace(run, objective=replace(run.objective, **NO_WEIGHTS)) for run in runs.values()]
    assert all(run == stripped[0] for run in stripped)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("term", NO_WEIGHTS)
def test_a_term_has_the_same_weight_in_every_method_that_has_it(recipe, term):
    weights = {getattr(RECIPES[recipe](name).objective, term) for name in METHODS}
    assert len(weights - {0.0}) == 1
