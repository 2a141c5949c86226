"""objective.target: what predictions are compared with. An EMA target has closed forms for decays of 0, 1 and m."""

from dataclasses import replace

import pytest
import torch
from recorded_graph import record_graphs
from safetensors.torch import load_file
from short_runs import same_result, short_config, short_train
from test_step import clips, plain

from atlas_wm.config import ObjectiveConfig, RunConfig
from atlas_wm.errors import Interrupted, SettingError, UserError
from atlas_wm.losses import ClipLatents, objective
from atlas_wm.models.world_model import WorldModel
from atlas_wm.recipes import demo
from atlas_wm.rng import make_rng
from atlas_wm.runs.model import load_model
from atlas_wm.train.checkpointer import checkpoints_in, read_saved
from atlas_wm.train.step import WARM_UP, CapturedStep

pytestmark = pytest.mark.usefixtures("one_thread")


def with_target(config: RunConfig, target: str, decay: float = 0.996) -> RunConfig:
    return replace(config, objective=replace(config.objective, target=target, ema_decay=decay))


def model_of(config: RunConfig) -> WorldModel:
    torch.manual_seed(0)
    model = WorldModel(config.model, 2)
    model.prepare_training(config.objective)
    return model.train()


def online(model: WorldModel) -> dict[str, torch.Tensor]:
    parts = {"encoder": model.encoder, "projector": model.projector}
    return {f"{part}.{n}": p.detach().clone() for part, m in parts.items() for n, p in m.named_parameters()}


def averaged(model: WorldModel) -> dict[str, torch.Tensor]:
    return {name: p.clone() for name, p in model.target.named_parameters()}


def trained(config: RunConfig, count: int, captured: bool = False):
    """The model, the updates, and the online weights before the first and after each of them."""
    model = model_of(config)
    step = CapturedStep(model, config, torch.device("cpu"), compiled=False) if captured else plain(model, config)
    torch.manual_seed(5)  # dropout
    weights, updates = [online(model)], []
    for i, batch in enumerate(clips(count)):
        updates.append(step(batch, make_rng(3, i), 1e-3))
        weights.append(online(model))
    assert not captured or step.graph.replays == count - WARM_UP
    return model, updates, weights


def test_with_decay_0_the_target_is_the_online_network_without_gradient():
    found = [trained(with_target(demo("atlas"), *t), 4) for t in (("ema", 0.0), ("stop_gradient",))]
    (model, updates, weights), (_, expected, others) = found
    assert all(torch.equal(u.losses.total, e.losses.total) for u, e in zip(updates, expected, strict=True))
    assert all(torch.equal(weights[-1][name], others[-1][name]) for name in others[-1])
    assert all(torch.equal(p, weights[-1][name]) for name, p in averaged(model).items())
    buffers = dict(model.projector.named_buffers())
    assert all(torch.equal(b, buffers[name]) for name, b in model.target.projector.named_buffers())


def test_with_decay_1_the_target_stays_at_the_start():
    model, _, weights = trained(with_target(demo("atlas"), "ema", 1.0), 3)
    assert all(torch.equal(p, weights[0][name]) for name, p in averaged(model).items())
    assert not any(torch.equal(weights[0][name], weights[-1][name]) for name in weights[0])


@pytest.mark.parametrize("captured", [False, True])
def test_after_k_updates_it_is_the_weighted_sum_of_all_weights(captured, monkeypatch):
    """θ'_k = m^k θ_0 + (1 − m) Σ_i m^(k−i) θ_i"""
    record_graphs(monkeypatch)
    m, k = 0.7, WARM_UP + 3
    model, _, weights = trained(with_target(demo("atlas"), "ema", m), k, captured)
    for name, p in averaged(model).items():
        wide = [w[name].double() for w in weights]
        expected = m**k * wide[0] + (1 - m) * sum(m ** (k - i) * wide[i] for i in range(1, k + 1))
        torch.testing.assert_close(p.double(), expected, rtol=1e-6, atol=1e-7)


def latents() -> ClipLatents:
    """With a target that is neither the latents nor the predictions."""
    z, predicted, target = (torch.randn(6, n, 5, generator=make_rng(0, n)) for n in (4, 3, 3))
    return ClipLatents(z.requires_grad_(), z, predicted.requires_grad_(), torch.zeros(6, 3, 2), target=target)


@pytest.mark.parametrize("target", ["online", "stop_gradient", "ema"])
def test_the_gradient_of_prediction(target):
    """2 (ẑ − target) / n for the prediction; for the latents its negative, or nothing."""
    some = latents()
    losses = objective(some, ObjectiveConfig(target=target))
    losses.total.backward()
    goal = some.target if target == "ema" else some.z.detach()[:, 1:]
    expected = 2 * (some.predicted.detach() - goal) / goal.numel()
    torch.testing.assert_close(losses.total.detach(), (some.predicted.detach() - goal).square().mean())
    torch.testing.assert_close(some.predicted.grad, expected)
    if target == "online":
        torch.testing.assert_close(some.z.grad[:, 1:], -expected)
    else:
        assert some.z.grad is None


@pytest.mark.parametrize("method", ["atlas", "lewm", "pldm"])
def test_regularisers_act_on_the_online_latents_whatever_the_target(method):
    values = {
        target: objective(latents(), replace(demo(method).objective, target=target), make_rng(1)).terms
        for target in ("online", "ema")
    }
    for name, value in values["online"].items():
        assert torch.equal(value, values["ema"][name]) == (name != "prediction")


def test_no_gradient_reaches_the_target():
    model, _, _ = trained(with_target(demo("atlas"), "ema"), 1)
    assert not any(p.requires_grad or p.grad is not None for p in model.target.parameters())


def test_a_run_resumes_bit_for_bit_and_keeps_the_online_weights(dataset_path, tmp_path):
    config = with_target(short_config(steps=20, log_every=5, validate_every=10), "ema", 0.9)
    whole = short_train(config, dataset_path, tmp_path / "whole")

    def stop(progress):
        if progress.step == 15:
            raise Interrupted("here", 143)

    with pytest.raises(Interrupted):
        short_train(config, dataset_path, tmp_path / "run", on_progress=stop)
    saved = read_saved(checkpoints_in(tmp_path / "run.partial")[0]).part("model")
    name = "encoder.vit.patch_embed.proj.weight"
    assert not torch.equal(saved[name], saved[f"target.{name}"])
    run = short_train(config, dataset_path, tmp_path / "run")
    assert same_result(whole, run)
    weights = load_file(run / "model.safetensors")
    assert not any(name.startswith("target") for name in weights)
    assert load_model(run).target is None


def test_a_frozen_encoder_refuses_another_target():
    for target in ("ema", "stop_gradient"):
        with pytest.raises(SettingError, match=f"objective.target {target} needs an encoder that is trained"):
            with_target(demo("dino-wm"), target)


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
def test_a_decay_outside_of_0_and_1_is_refused(decay):
    with pytest.raises(SettingError, match=r"objective\.ema_decay"):
        ObjectiveConfig(ema_decay=decay)


def test_without_a_target_network_the_objective_says_what_to_call():
    with pytest.raises(UserError, match=r"call model\.prepare_training"):
        objective(latents()._replace(target=None), ObjectiveConfig(target="ema"))
