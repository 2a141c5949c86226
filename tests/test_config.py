"""Settings: JSON and back without loss, and nothing slips through unchecked."""

import json
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_wm.config import EncoderConfig, ObjectiveConfig, PlanConfig, RunConfig, TrainConfig
from atlas_wm.errors import UserError
from atlas_wm.methods import METHODS
from atlas_wm.recipes import DEMO_WEIGHTS, RECIPES, TUNED, get_recipe, recipe_config
from atlas_wm.settings import from_dict, to_dict


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("method", METHODS)
def test_every_recipe_survives_json(recipe, method):
    config = get_recipe(recipe)(method)
    assert from_dict(RunConfig, json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize(("task", "method"), TUNED)
def test_tuned_runs_survive_json(task, method):
    config = recipe_config("tuned", method, task)
    assert from_dict(RunConfig, json.loads(json.dumps(to_dict(config)))) == config
    assert set(METHODS[method].objective.weights) <= set(config.objective.weights)


def test_a_recipe_that_does_not_exist_is_refused():
    with pytest.raises(UserError, match="unknown recipe 'smal'"):
        recipe_config("smal", "atlas", "pusht")
    with pytest.raises(UserError, match="no --recipe tuned for lewm on pusht, only for atlas on tworoom"):
        recipe_config("tuned", "lewm", "pusht")
    with pytest.raises(UserError, match="name it first"):
        recipe_config("tuned", "atlas", None)


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


def test_a_word_that_is_no_choice_is_refused_where_the_config_is_built():
    with pytest.raises(UserError) as refused:
        TrainConfig(split="episode")
    said = "train.split must be 'clips' or 'episodes' or 'groups', not 'episode'. Did you mean 'episodes'?"
    assert str(refused.value) == said


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: EncoderConfig(kind="dino"),
            "encoder.kind must be 'vit' or 'dinov2', or your own as module:Class, not 'dino'.",
        ),
        (lambda: PlanConfig(cost=None), "plan.cost must be str, not None"),
        (
            lambda: PlanConfig(cost="nearst"),
            "plan.cost must be 'terminal' or 'nearest' or 'temporal', or your own as module:Class",
        ),
        (lambda: PlanConfig(options={"k": 1}), "plan.options are for your own plan.cost or plan.solver"),
        (lambda: EncoderConfig(kind="my:E", options={"k": True}), "encoder.options.'k' must be int | float | str"),
        (lambda: TrainConfig(batch=64.0), "train.batch must be int, not 64.0"),
        (lambda: TrainConfig(batch=True), "train.batch must be int, not True"),
        (lambda: TrainConfig(steps="100"), "train.steps must be int, not '100'"),
        (lambda: TrainConfig(lr=float("nan")), "train.lr must be float, not nan"),
        (lambda: ObjectiveConfig(extra={"mine:term": "1"}), "objective.extra.'mine:term' must be float, not '1'"),
        (lambda: EncoderConfig(pixel_mean=(0.5, 0.5)), "encoder.pixel_mean must be"),
        (lambda: RunConfig(train=3), "train must be an object, not int"),
    ],
)
def test_types_are_checked_where_the_config_is_built(make, said):
    with pytest.raises(UserError) as refused:
        make()
    assert str(refused.value).startswith(said)


def test_a_config_built_in_python_is_what_its_file_gives_back():
    config = RunConfig(train=TrainConfig(lr=1), objective=ObjectiveConfig(wemreg=3))
    config = replace(config, model=replace(config.model, encoder=EncoderConfig(pixel_mean=[0, 0, 0])))
    again = from_dict(RunConfig, json.loads(json.dumps(to_dict(config))))
    assert again == config and json.dumps(to_dict(again)) == json.dumps(to_dict(config))


def test_impossible_settings_in_a_file_name_the_file():
    with pytest.raises(UserError, match=r"^run/config\.json\.train: train\.batch must be at least 2"):
        from_dict(RunConfig, {"train": {"batch": 1}}, "run/config.json")
