"""The captured step updates as the plain one does; where a graph cannot be captured it says so and goes on."""

import logging
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from recorded_graph import NoStream, record_graphs

from atlas_wm.data.clips import Batch
from atlas_wm.losses import objective
from atlas_wm.losses.objective import ClipLatents
from atlas_wm.losses.projections import random_directions
from atlas_wm.models.world_model import WorldModel
from atlas_wm.recipes import demo, paper
from atlas_wm.rng import make_rng
from atlas_wm.train import step as step_module
from atlas_wm.train.step import STEPS_WORTH_COMPILING, WARM_UP, CapturedStep, PlainStep, make_step


def clips(count):
    draw = make_rng(1)
    for _ in range(count):
        frames = torch.randint(0, 256, (8, 4, 3, 32, 32), dtype=torch.uint8, generator=draw)
        yield Batch(frames, torch.randn(8, 3, 10, generator=draw))


@pytest.fixture
def no_cuda(monkeypatch):
    """Streams that do nothing; capturing a graph stays impossible."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: NoStream())
    monkeypatch.setattr(torch.cuda, "current_stream", NoStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())


def updates(make_step, method, steps):
    """Losses and gradient norms of some updates at rising rates: each tells of the updates before it."""
    config = demo(method)
    torch.manual_seed(0)
    model = WorldModel(config.model, 2).train()
    step = make_step(model, config)
    torch.manual_seed(5)  # dropout
    found = [step(batch, make_rng(3, i), 1e-4 * i) for i, batch in enumerate(clips(steps), start=1)]
    return [[float(u.losses.total), *map(float, u.losses.terms.values()), float(u.norm)] for u in found]


def plain(model, config, steps=1):
    return PlainStep(model, config, torch.device("cpu"), steps)


def captured(model, config):
    return CapturedStep(model, config, torch.device("cpu"), compiled=False)


@pytest.mark.parametrize("method", ["atlas", "lewm", "pldm"])
def test_replays_update_as_the_plain_step_does(method, monkeypatch):
    """Other frames, actions, directions and another rate at each of them."""
    record_graphs(monkeypatch)
    count, steps = WARM_UP + 4, []
    numbers = updates(lambda *given: steps.append(captured(*given)) or steps[0], method, count)
    assert steps[0].graph.replays == count - WARM_UP
    expected = updates(plain, method, count)
    assert expected[-1][0] < expected[0][0]
    assert numbers == [pytest.approx(row, rel=1e-3) for row in expected]  # the fused AdamW rounds differently


def test_where_nothing_can_be_captured_it_says_so_and_updates_as_the_plain_step_does(no_cuda, caplog):
    with caplog.at_level(logging.WARNING):
        numbers = updates(captured, "atlas", WARM_UP + 2)
    assert len(caplog.records) == 1 and "fast path: off" in caplog.text  # no graph on a CPU
    assert numbers == [pytest.approx(row, rel=1e-3) for row in updates(plain, "atlas", WARM_UP + 2)]


@pytest.mark.parametrize(
    ("head_dim", "steps", "choice", "compiled"),
    [
        (64, STEPS_WORTH_COMPILING, "auto", False),  # all of it has kernels
        (48, STEPS_WORTH_COMPILING, "auto", True),
        (48, STEPS_WORTH_COMPILING - 1, "auto", False),
        (48, STEPS_WORTH_COMPILING, "never", False),
        (64, 1, "always", True),
    ],
)
def test_what_has_no_fused_kernels_is_compiled_in_long_runs(monkeypatch, head_dim, steps, choice, compiled):
    made = []
    monkeypatch.setattr(step_module, "CapturedStep", lambda *given, **options: made.append(options))
    config = paper("atlas")
    model = replace(config.model, predictor=replace(config.model.predictor, head_dim=head_dim))
    config = replace(config, model=model, train=replace(config.train, compile=choice))
    with torch.device("meta"):
        model = WorldModel(config.model, 2)
    make_step(model, config, torch.device("cuda"), steps)
    assert made == [{"compiled": compiled}]


def step_in_bf16(model, caplog):
    """Made where bf16 asks for fused kernels, and what it said of them."""
    config = demo("atlas")
    config = replace(config, train=replace(config.train, precision="bf16-mixed"))
    with caplog.at_level(logging.INFO):
        CapturedStep(model, config, torch.device("cpu"), compiled=False)
    return [(record.levelname, record.message) for record in caplog.records]


def test_only_what_agrees_with_the_plain_model_is_fused(no_cuda, monkeypatch, caplog):
    pytest.importorskip("triton")
    model, found = WorldModel(demo("atlas").model, 2), {"encoder": "it differs by 0.7", "predictor": ""}
    monkeypatch.setattr(step_module, "disagreement", lambda model, part: found[part])
    said = step_in_bf16(model, caplog)
    assert said == [
        ("WARNING", "the encoder is not fused: it differs by 0.7"),
        ("INFO", "fast path: training step as a CUDA graph, fused"),
    ]
    assert model.predictor.fused and not model.encoder.fused


def test_what_is_built_in_another_way_is_not_fused(no_cuda, monkeypatch, caplog):
    """The kernels would train another network than validation evaluates."""
    pytest.importorskip("triton")
    model = WorldModel(demo("atlas").model, 2)
    model.encoder.vit.blocks[1].attn.q_norm = torch.nn.LayerNorm(16)
    model.predictor.blocks[0].mlp.activation = torch.nn.ReLU()
    said = step_in_bf16(model, caplog)
    assert said == [
        ("INFO", "the encoder is not fused: vit.blocks.1.attn.q_norm is LayerNorm, not Identity"),
        ("INFO", "the predictor is not fused: blocks.0.mlp.activation is ReLU, not GELU"),
        ("INFO", "fast path: training step as a CUDA graph"),
    ]
    assert not model.predictor.fused and not model.encoder.fused


def test_a_failing_loss_term_of_ones_own_is_told_as_in_the_plain_step(no_cuda):
    config = demo("atlas")
    config = replace(config, objective=replace(config.objective, extra={"math:sqrt": 1.0}))
    step = CapturedStep(WorldModel(config.model, 2), config, torch.device("cpu"), compiled=False)
    with pytest.raises(Exception, match="loss term math:sqrt failed"):
        step(next(clips(1)), make_rng(0), 1e-4)


def test_directions_drawn_beforehand_are_those_the_losses_draw():
    z, draw = torch.randn(16, 4, 32, generator=make_rng(0)), torch.randn(16, 3, 32, generator=make_rng(1))
    latents = ClipLatents(z, z, draw, draw[..., :10])
    for method in ("atlas", "lewm"):
        config = demo(method).objective
        drawn = random_directions(32, config.directions, generator=make_rng(2))
        assert torch.equal(objective(latents, config, make_rng(2)).total, objective(latents, config, drawn).total)
