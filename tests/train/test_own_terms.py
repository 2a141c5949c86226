"""A loss term that is an nn.Module class: its parameters are trained, saved and resumed with the model's."""

import sys
from dataclasses import replace

import pytest
import torch
from recorded_graph import record_graphs
from safetensors.torch import load_file
from short_runs import same_result, short_config, short_train
from test_step import clips, plain

from atlas_wm.config import ModelConfig, ObjectiveConfig
from atlas_wm.errors import Interrupted, UserError
from atlas_wm.losses import ClipLatents, Progress, objective
from atlas_wm.models.world_model import WorldModel
from atlas_wm.recipes import demo
from atlas_wm.rng import make_rng
from atlas_wm.runs.model import load_model
from atlas_wm.train.step import WARM_UP, CapturedStep

pytestmark = pytest.mark.usefixtures("one_thread")
MODULE = """
import torch
from torch import nn

class Critic(nn.Module):
    '''Predicts the first action coordinate from a latent; with a BatchNorm and a buffer of its own.'''
    def __init__(self, config, action_size):
        super().__init__()
        self.norm = nn.BatchNorm1d(config.latent)
        self.head = nn.Linear(config.latent, config.frameskip * action_size)
        self.unused = nn.Linear(2, 2)

    def forward(self, clips, progress):
        z = clips.z[:, :-1]
        guess = self.head(self.norm(z.flatten(0, 1))).view_as(clips.actions)
        return progress.step / progress.total * (guess - clips.actions).square().mean()

class NoModule:
    def __init__(self, config, action_size): ...

class Broken(nn.Module):
    def __init__(self, config, action_size):
        super().__init__()
        self.head = nn.Linear(config.nothing, 1)

instance = nn.Identity()
"""
NAME = "own_module.critic:Critic"  # in a package: a ModuleDict accepts no dots


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    package = tmp_path / "code" / "own_module"
    package.mkdir(parents=True)
    (package / "critic.py").write_text(MODULE)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(package.parent)
        yield
    forget()


def forget():
    for name in [name for name in sys.modules if name.partition(".")[0] == "own_module"]:
        del sys.modules[name]


def with_critic(config, weight=0.5):
    return replace(config, objective=replace(config.objective, extra={NAME: weight}))


def model_of(config):
    torch.manual_seed(0)
    model = WorldModel(config.model, 2)
    model.prepare_training(config.objective)
    return model.train()


def test_its_parameters_take_the_step_of_the_optimiser(own_module):
    config = with_critic(demo("atlas"))
    model = model_of(config)
    before = {name: p.detach().clone() for name, p in model.terms.named_parameters()}
    step = plain(model, config)
    for i, batch in enumerate(clips(3)):
        step(batch, make_rng(3, i), 1e-3)
    changed = {n.partition(".")[2] for n, p in model.terms.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {"norm.weight", "norm.bias", "head.weight", "head.bias"}  # unused parameters stay
    assert float(model.terms[NAME.replace(".", "/")].norm.num_batches_tracked) == 3


def test_the_gradient_norm_that_is_clipped_includes_them(own_module):
    config = with_critic(demo("atlas"), weight=1e3)
    model = model_of(config)
    step = plain(model, config)
    step.optimizer.zero_grad = lambda: None
    batch = next(clips(1))
    norm = step(batch, make_rng(3), 0.0).norm
    own, rest = (
        torch.stack([p.grad.norm() for n, p in model.named_parameters() if p.grad is not None and mine(n)]).norm()
        for mine in (lambda n: n.startswith("terms."), lambda n: not n.startswith("terms."))
    )
    torch.testing.assert_close((own**2 + rest**2).sqrt(), torch.tensor(config.train.clip), rtol=1e-4, atol=0)
    assert own * norm > 1 and norm > 10  # they were clipped with the others


def test_the_captured_step_trains_them_as_the_plain_one_does(own_module, monkeypatch):
    record_graphs(monkeypatch)
    config = with_critic(demo("atlas"))
    weights = []
    for captured in (True, False):
        model = model_of(config)
        if captured:
            step = CapturedStep(model, config, torch.device("cpu"), steps=20, compiled=False)
        else:
            step = plain(model, config, steps=20)
        for i, batch in enumerate(clips(WARM_UP + 3)):
            step(batch, make_rng(3, i), 1e-3)
        assert not captured or step.graph is not None
        weights.append({name: t.clone() for name, t in model.terms.state_dict().items()})
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-5)  # the fused AdamW rounds differently


def test_a_run_resumes_bit_for_bit_and_is_loaded_without_the_users_code(
    own_module, dataset_path, tmp_path, monkeypatch
):
    config = with_critic(short_config(steps=20, log_every=5, validate_every=10))
    whole = short_train(config, dataset_path, tmp_path / "whole")

    def stop(progress):
        if progress.step == 10:
            raise Interrupted("here", 143)

    with pytest.raises(Interrupted):
        short_train(config, dataset_path, tmp_path / "run", on_progress=stop)
    run = short_train(config, dataset_path, tmp_path / "run")
    assert same_result(whole, run)
    terms = [load_file(folder / "terms.safetensors") for folder in (whole, run)]
    assert terms[0].keys() == terms[1].keys() and f"{NAME}.head.weight" in terms[0]
    assert all(torch.equal(terms[0][name], terms[1][name]) for name in terms[0])
    assert int(terms[0][f"{NAME}.norm.num_batches_tracked"]) == 20  # not measured again as the model's own are
    assert not any("terms" in name or "Critic" in name for name in load_file(run / "model.safetensors"))
    best = load_file(next((whole / "weights").glob("*.safetensors"), run / "model.safetensors"))
    assert best.keys() == load_file(run / "model.safetensors").keys()

    forget()
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "code" not in p])
    model = load_model(run)
    assert not model.terms and model.run.config.objective.extra == {NAME: 0.5}
    assert "own_module" not in sys.modules


def latents():
    z = torch.randn(6, 4, 8, generator=make_rng(0))
    return ClipLatents(z, z, z[:, 1:], torch.zeros(6, 3, 10))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoModule", "NoModule is a class, but not an nn.Module: make it one, or a function"),
        ("Broken", r"Broken failed at .*critic\.py:\d+: AttributeError: .*nothing"),
        ("absent", "cannot be imported"),
    ],
)
def test_a_class_that_cannot_be_constructed_gets_one_clear_line(own_module, name, message):
    with pytest.raises(UserError, match=message):
        WorldModel(ModelConfig(), 2).prepare_training(ObjectiveConfig(extra={f"own_module.critic:{name}": 1.0}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Critic", r"was not constructed: call model\.prepare_training"),
        ("instance", "is an instance, whose parameters are not trained: name its class"),
    ],
)
def test_the_objective_alone_refuses_what_would_not_be_trained(own_module, name, message):
    config = ObjectiveConfig(extra={f"own_module.critic:{name}": 1.0})
    with pytest.raises(UserError, match=message):
        objective(latents(), config, progress=Progress.at(1, 2))


def test_a_term_of_weight_zero_is_neither_imported_nor_constructed():
    model = WorldModel(demo("atlas").model, 2)
    model.prepare_training(ObjectiveConfig(extra={"nowhere:Class": 0.0}))
    assert not model.terms
