"""Settings: JSON and back without loss, and nothing slips through unchecked."""

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_wm.config import EncoderConfig, ObjectiveConfig, PlanConfig, RunConfig, TrainConfig, from_dict, to_dict
from atlas_wm.errors import UserError
from atlas_wm.methods import METHODS
from atlas_wm.recipes import DEMO_WEIGHTS, RECIPES, get_recipe


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("method", METHODS)
def test_every_recipe_survives_json(recipe, method):
    config = get_recipe(recipe)(method)
    assert from_dict(RunConfig, json.loads(json.dumps(to_dict(config)))) == config


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    ),
    st.sampled_from(["model", "train", "plan", "objective"]),
)
@settings(max_examples=150, deadline=None)
def test_any_json_gives_a_config_or_a_clear_error(value, part):
    with suppress(UserError):  # anything else fails the test
        assert isinstance(from_dict(RunConfig, {part: value}), RunConfig)


def test_errors_say_where_and_what():
    with pytest.raises(UserError, match=r"unknown setting in config\.train 'learning_rate'"):
        from_dict(RunConfig, {"train": {"learning_rate": 1}})
    with pytest.raises(UserError, match=r"config\.train\.batch must be int, not '64'"):
        from_dict(RunConfig, {"train": {"batch": "64"}})
    with pytest.raises(UserError, match=r"config\.model\.encoder\.pixel_mean"):
        from_dict(RunConfig, {"model": {"encoder": {"pixel_mean": [1, 2]}}})


@pytest.mark.parametrize(
    "make",
    [
        lambda: EncoderConfig(image_size=225),
        lambda: EncoderConfig(width=190),
        lambda: EncoderConfig(pixel_std=(1.0, 0.0, 1.0)),
        lambda: ObjectiveConfig(wemreg=-1),
        lambda: ObjectiveConfig(prediction=0),
        lambda: TrainConfig(batch=1),
        lambda: TrainConfig(holdout=1.5),
        lambda: TrainConfig(steps=0),
        lambda: PlanConfig(elites=400),
        lambda: PlanConfig(execute=6),
    ],
)
def test_impossible_settings_are_refused(make):
    with pytest.raises(UserError):
        make()


def test_the_paper_recipe_is_the_papers_table():
    config = get_recipe("paper")("atlas")
    assert config.objective == ObjectiveConfig(prediction=1.0, wemreg=3.0, relational=0.1, directions=1024)
    assert get_recipe("paper")("lewm").objective == ObjectiveConfig(sigreg=0.09)
    t, p = config.train, config.plan
    assert (t.epochs, t.batch, t.lr, t.weight_decay, t.clip, t.seed) == (10, 128, 5e-5, 1e-3, 1.0, 3072)
    assert (p.candidates, p.iterations, p.elites, p.horizon, p.execute) == (300, 30, 30, 5, 5)
    assert not p.clip_actions
    m = config.model
    assert (m.latent, m.history, m.frameskip, m.clip_rows) == (192, 3, 5, 16)


def test_the_demo_gives_each_method_the_weights_tuned_for_the_size():
    for method, row in METHODS.items():
        weights = get_recipe("demo")(method).objective
        for name, value in DEMO_WEIGHTS.items():
            assert getattr(weights, name) == (value if getattr(row.objective, name) else 0)
