"""A loss term of your own gets the step and the total, as tensors that every update fills anew."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from recorded_graph import record_graphs
from short_runs import metrics, short_config, short_train
from test_step import clips

from atlas_wm.config import ObjectiveConfig
from atlas_wm.errors import Interrupted, UserError
from atlas_wm.losses import ClipLatents, Progress, objective
from atlas_wm.models.world_model import WorldModel
from atlas_wm.plan.captured import captured
from atlas_wm.recipes import demo
from atlas_wm.rng import make_rng
from atlas_wm.train.step import WARM_UP, CapturedStep, PlainStep, make_step

TERMS = "terms_of_the_test"


@pytest.fixture
def terms(monkeypatch):
    """A module of terms; those that ask for the progress leave it in ``seen``."""
    module = ModuleType(TERMS)
    module.seen = []

    def part(clips, progress):
        module.seen.append((progress, float(progress.step), float(progress.total)))
        return progress.step / progress.total + 0 * clips.z.mean()

    def alone(clips, margin=0.5):
        return clips.z.mean() + margin

    module.part, module.alone = part, alone
    monkeypatch.setitem(sys.modules, TERMS, module)
    return module


def with_term(config, name="part"):
    return replace(config, objective=replace(config.objective, extra={f"{TERMS}:{name}": 0.1}))


def updates(step, count):
    for i, batch in enumerate(clips(count)):
        yield step(batch, make_rng(3, i), 1e-4)


@pytest.mark.parametrize("kind", ["plain", "captured"])
def test_every_update_fills_the_same_two_tensors(terms, kind, monkeypatch):
    record_graphs(monkeypatch)
    config = with_term(demo("atlas"))
    torch.manual_seed(0)
    model = WorldModel(config.model, 2).train()
    if kind == "plain":
        step = make_step(model, config, torch.device("cpu"), steps=50, done=7)
        assert isinstance(step, PlainStep)
    else:
        step = CapturedStep(model, config, torch.device("cpu"), steps=50, done=7, compiled=False)
    count = WARM_UP + 3
    values = [float(update.losses.terms[f"{TERMS}:part"]) for update in updates(step, count)]
    assert values == pytest.approx([(8 + i) / 50 for i in range(count)])
    called = count if kind == "plain" else WARM_UP + 1  # no Python runs in a replay
    assert [(s, t) for _, s, t in terms.seen] == [(8 + i, 50) for i in range(called)]
    places = {(p.step.data_ptr(), p.total.data_ptr()) for p, _, _ in terms.seen}
    assert len(places) == 1 and all(t.ndim == 0 for t in terms.seen[0][0])
    assert (step.graph is not None) if kind == "captured" else True


def test_a_capture_minds_its_own_thread_alone(monkeypatch):
    """In the global mode whatever another thread does, such as to pin memory, would end it."""
    graphs = record_graphs(monkeypatch)
    config = demo("atlas")
    torch.manual_seed(0)
    step = CapturedStep(WorldModel(config.model, 2).train(), config, torch.device("cpu"), compiled=False)
    list(updates(step, WARM_UP + 1))
    captured(lambda: None, None)
    assert [options["capture_error_mode"] for options in graphs] == ["thread_local", "thread_local"]


def test_a_run_that_goes_on_counts_on(dataset_path, tmp_path, terms):
    config = with_term(short_config(steps=20, log_every=5, validate_every=10))

    def stop(progress):
        if progress.step == 10:
            raise Interrupted("here", 143)

    with pytest.raises(Interrupted):
        short_train(config, dataset_path, tmp_path / "run", on_progress=stop)
    assert terms.seen[-1][1:] == (10, 20)
    before = len(terms.seen)
    run = short_train(config, dataset_path, tmp_path / "run")
    assert terms.seen[before][1:] == (6, 20)  # the last checkpoint is of step 5
    rows = metrics(run)
    column = [float(row[f"{TERMS}:part"]) for row in rows]
    assert column == pytest.approx([0.15, 0.4, 0.65, 0.9])  # means of steps 1-5, 6-10, …
    assert [float(row[f"val_{TERMS}:part"]) for row in rows if row[f"val_{TERMS}:part"]] == pytest.approx([0.5, 1])


def test_who_does_not_ask_is_not_told(terms):
    z = torch.randn(6, 4, 5, generator=make_rng(0))
    latents = ClipLatents(z, z, z[:, 1:], torch.zeros(6, 3, 2))
    config = ObjectiveConfig(extra={f"{TERMS}:alone": 1.0})
    value = objective(latents, config, progress=Progress.at(1, 2)).terms[f"{TERMS}:alone"]
    torch.testing.assert_close(value, z.mean() + 0.5)
    with pytest.raises(UserError, match=r"takes progress: call objective\(…, progress=Progress\.at"):
        objective(latents, ObjectiveConfig(extra={f"{TERMS}:part": 1.0}))


def test_a_compiled_step_calls_terms_of_ones_own_as_they_are(terms):
    z = torch.randn(6, 4, 5, generator=make_rng(0))
    latents = ClipLatents(z, z, z[:, 1:], torch.zeros(6, 3, 2))
    config, progress = ObjectiveConfig(extra={f"{TERMS}:part": 1.0}), Progress.at(0, 10)
    compiled = torch.compile(lambda: objective(latents, config, None, progress).terms, backend="eager")
    for step in range(1, 4):
        progress.step.add_(1)
        assert float(compiled()[f"{TERMS}:part"]) == pytest.approx(step / 10)
