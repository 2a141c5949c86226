"""docs/guides/own-model.md, executed as written, and what is promised to your own parts of a model and planner."""

import json
import logging
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from atlas_wm import load_model, save_model
from atlas_wm.cli.app import main
from atlas_wm.cli.plan import PlanFlags
from atlas_wm.config import DataInfo, EncoderConfig, PlanConfig, PredictorConfig, RunInfo
from atlas_wm.errors import UserError
from atlas_wm.evaluate import evaluate
from atlas_wm.evaluate.worker import Worker
from atlas_wm.methods import get_method
from atlas_wm.models.encoders import Encoder, Tokens
from atlas_wm.models.predictors import Predictor
from atlas_wm.models.world_model import WorldModel
from atlas_wm.plan.costs import Cost, candidate_costs
from atlas_wm.plan.planner import Planner
from atlas_wm.plan.solver import Solution, Solver
from atlas_wm.plugins import import_plugin
from atlas_wm.recipes import demo
from atlas_wm.rng import make_rng
from atlas_wm.runs.folder import BANK, DEMONSTRATIONS, read_run

TUTORIAL = Path(__file__).parent.parent / "docs" / "guides" / "own-model.md"
BLOCKS = re.findall(r"```(python|sh)\n(.*?)```", TUTORIAL.read_text(), re.DOTALL)
HERE = __name__
QUICK = PlanConfig(candidates=20, iterations=3, elites=5, horizon=4, execute=3)


@pytest.fixture
def my_model(tmp_path, monkeypatch):
    """The tutorial's module in the working directory, forgotten afterwards."""
    Path(tmp_path, "my_model.py").write_text(BLOCKS[0][1] + BLOCKS[3][1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("my_model", None)


def image(seed):
    return np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)


@pytest.fixture
def new_worker(monkeypatch):
    """Evaluation without worker processes, which take seconds to start, but as little imported as in one."""

    def here(setup, data, jobs, workers):
        sys.modules.pop("my_model")
        yield from map(Worker(setup).run, jobs)

    monkeypatch.setattr(evaluate, "run_in_workers", here)


@pytest.mark.slow
def test_the_tutorial_works_as_written(my_model, new_worker):
    assert [kind for kind, _ in BLOCKS] == ["python", "sh", "python", "python", "sh"]
    assert sum(bool(line.strip()) for line in BLOCKS[0][1].splitlines()) < 60
    for kind, text in (BLOCKS[1], BLOCKS[2], BLOCKS[4]):
        if kind == "python":
            exec(text, {})
            continue
        for command in text.splitlines():
            atlas, *arguments = shlex.split(command)
            assert atlas == "atlas"
            sys.modules.pop("my_model", None)  # each command is a program of its own
            main(arguments)
    (result,) = Path("runs/cnn/evaluation").glob("heldout_offset10_budget35_MPPI-*.json")
    plan = json.loads(result.read_text())["plan"]
    assert plan["solver"] == "my_model:MPPI" and plan["options"] == {"temperature": 0.5}
    (result,) = Path("runs/tworoom-ATLAS_GRU-demo/evaluation").glob("heldout_offset10_budget35_Gentle-*.json")
    assert json.loads(result.read_text())["plan"]["options"] == {"effort": 0.05}


def atlas(*arguments):
    """Each command is a program of its own."""
    sys.modules.pop("my_model", None)
    main([*map(str, arguments), "--device", "cpu"])


@pytest.mark.slow
def test_head_bank_and_demonstrations_work_with_own_parts(my_model, dataset_path, few_frames_in_banks, capsys):
    run, own = "runs/own", ("--plugin", "my_model")
    small = ("--recipe", "demo", "--data", dataset_path, "--train.steps", 4, "--train.batch", 8, "--out", run)
    atlas("train", "tworoom", "--method", "my_model:ATLAS_GRU", "--model.encoder.kind", "my_model:CNN", *small)
    stored = [Path(run, name) for name in (BANK, DEMONSTRATIONS)]
    for file in stored:
        file.unlink()
    atlas("bank", run, *own)
    atlas("head", run, *own, "--frames", 300, "--steps", 5)
    for seed, name in enumerate(("frame", "goal")):
        Image.fromarray(image(seed)).save(f"{name}.png")
    capsys.readouterr()
    search = ("--cost", "temporal", "--start", "retrieval", "--iterations", 1, "--candidates", 20, "--elites", 5)
    atlas("plan", run, *own, "--frame", "frame.png", "--goal", "goal.png", *search)
    told = json.loads(capsys.readouterr().out)
    assert len(told["actions"]) == 25 and told["start_cost"] > 0

    model = load_model(run)
    assert isinstance(model.encoder, sys.modules["my_model"].CNN) and model.bank is not None
    planner = Planner(model, replace(QUICK, cost="temporal", start="retrieval", clip_actions=False))
    known, first = model.demonstrations, int(planner.retrieval.starts[0])
    z, z_goal = known.points[[first, first + 4], None].float().unbind()
    assert torch.equal(planner.retrieval(z, z_goal)[0, 0], known.actions[first : first + 4])
    plan = planner.plan(image(0), image(1))
    frames = [planner.prepare(torch.from_numpy(image(seed)).permute(2, 0, 1)[None]) for seed in (0, 1)]
    with torch.no_grad():
        z, z_goal = (model.encode(frame) for frame in frames)
        proposals = planner.retrieval.proposals(torch.zeros(1, 4, 10), z, z_goal)
        costs = candidate_costs(planner.cost, model, model, z, proposals, z_goal)
        steps = model.temporal_head.distance(z, z_goal)
    assert plan.cost <= float(costs.min()) * (1 + 1e-4) and steps > 0
    assert 0 <= plan.risk <= 1 and 0 <= plan.novelty.end <= 100


def test_the_row_carries_its_parts_and_the_recipe_leaves_them(my_model):
    config = demo("my_model:ATLAS_GRU")
    assert config.own_parts == {"predictor": "my_model:GRU", "cost": "my_model:Gentle"}
    assert config.model.predictor.options == {"width": 96} and config.plan.iterations == 10
    assert config.objective == demo("atlas").objective
    model = WorldModel(config.model, 2)
    assert model.predictor.gru.hidden_size == 96
    path = Path("my_model.py")
    path.write_text(path.read_text().replace("my_model:Gentle", "my_model:Rough"))
    del sys.modules["my_model"]
    with pytest.raises(UserError, match="cost 'my_model:Rough' cannot be imported"):
        get_method("my_model:ATLAS_GRU")


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ((), {"width": 96}),
        (("--model.predictor.options.width", "64"), {"width": 64}),
        (("--model.predictor.options", "width", "64", "rate", "0.5", "act", "relu"), None),
    ],
)
def test_flags_set_options(my_model, monkeypatch, flags, options):
    asked = []
    monkeypatch.setattr("atlas_wm.cli.train.train_with_progress", lambda *given, **_: asked.append(given))
    command = ["train", "tworoom", "--method", "my_model:ATLAS_GRU", "--recipe", "demo", *flags]
    if options is None:  # a row without options takes any
        command[3:4] = ["lewm", "--model.predictor.kind", "my_model:GRU"]
        options = {"width": 64, "rate": 0.5, "act": "relu"}
    main(command)
    assert asked[0][0].model.predictor.options == options


def saved_run(config):
    """A run folder of a model with random weights."""
    model = WorldModel(config.model, 2)
    data = DataInfo("nowhere", "0" * 16, 1, 1, 1, 1)
    model.run = RunInfo("tworoom", "mine", "demo", 2, config, data, "cpu")
    save_model(model, "run")
    return Path("run")


def test_a_name_in_a_file_is_not_imported(my_model):
    run = saved_run(demo("my_model:ATLAS_GRU"))
    assert isinstance(load_model(run).predictor, sys.modules["my_model"].GRU)
    del sys.modules["my_model"]
    Path("my_model.py").write_text("raise SystemExit('this was run')")
    said = r"predictor 'my_model:GRU' is not part of .* pass --plugin my_model \(in Python: import my_model first\)"
    with pytest.raises(UserError, match=said):
        load_model(run)
    assert "my_model" not in sys.modules


@pytest.mark.parametrize("name", ["subprocess:Popen", "os:system", "torch.nn:Linear", "sys:nothing"])
def test_a_file_cannot_name_just_any_code_that_is_loaded(my_model, name):
    run = saved_run(demo("lewm"))
    config = json.loads((run / "config.json").read_text())
    config["config"]["model"]["predictor"]["kind"] = config["config"]["plan"]["cost"] = name
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UserError, match=r"(is not a Predictor|does not exist): derive a class from atlas_wm\.models"
    ):
        load_model(run)
    with pytest.raises(UserError, match=r"(is not a Cost|does not exist): derive a class from atlas_wm\.plan"):
        Planner(WorldModel(demo("lewm").model, 2), PlanConfig(cost=name))


def test_plugin_is_a_flag_of_every_command(my_model, tmp_path):
    environment = {"PATH": "/usr/bin", "PYTHONPATH": ":".join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "atlas_wm", "methods", "--recipe", "nonsense", "--plugin", "nowhere"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("atlas: module 'nowhere' cannot be imported: no module nowhere in ")


class Twice(Predictor):
    """The mean of the latents and actions so far, twice: easy to roll out by hand."""

    def predict(self, z, actions):
        count = torch.arange(1, z.shape[1] + 1)[:, None]
        return 2 * (z + actions[..., :1]).cumsum(dim=1) / count


def test_a_predictor_needs_predict_only(caplog):
    config = demo("lewm").model
    config = replace(config, predictor=replace(config.predictor, kind=f"{HERE}:Twice"))
    model = WorldModel(config, 2).eval()
    z, actions = torch.randn(2, 32, generator=make_rng(0)), torch.randn(2, 3, 5, 10, generator=make_rng(1))
    found = model.rollout(z, actions)
    for b in range(2):
        for s in range(3):
            latents = [z[b]]
            for step in range(5):
                window = range(max(0, step + 1 - config.history), step + 1)
                latents.append(2 * torch.stack([latents[i] + actions[b, s, i, 0] for i in window]).mean(dim=0))
            torch.testing.assert_close(found[b, s], torch.stack(latents[1:]))
    assert torch.equal(model.terminal(z, actions), found[:, :, -1])
    with caplog.at_level(logging.INFO):
        Planner(model, QUICK).plan(image(0), image(1))
    said = [(record.levelname, record.message) for record in caplog.records if "fast path" in record.message]
    assert said == [("INFO", "fast path: off (Twice has no fast rollout)")]


def test_the_rollout_of_the_base_class_is_that_of_the_causal_predictor(demo_model):
    z, actions = torch.randn(2, 32, generator=make_rng(0)), torch.randn(2, 3, 5, 10, generator=make_rng(1))
    with torch.no_grad():
        found, expected = Predictor.rollout(demo_model.predictor, z, actions), demo_model.rollout(z, actions)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


class Broken(Predictor):
    def __init__(self, config, action_chunk):
        super().__init__(config, action_chunk)
        self.width = config.predictor.options["width"]

    def predict(self, z, actions):
        return z


def test_a_class_that_cannot_be_built_is_named_with_its_lines():
    config = replace(demo("lewm").model, predictor=PredictorConfig(kind=f"{HERE}:Broken"))
    said = rf"predictor {HERE}:Broken cannot be built, it failed at .*test_own_model\.py:\d+: KeyError: 'width'"
    with pytest.raises(UserError, match=said):
        WorldModel(config, 2)


class End(Cost):
    ends_only = True
    seen: ClassVar[list] = []

    def __call__(self, imagined):
        self.seen.append((imagined.latents.shape, imagined.actions.shape))
        return (imagined.latents[:, :, -1] - imagined.goal[:, None]).square().sum(dim=-1)


class Path_(End):
    ends_only = False


class Flat(Cost):
    def __call__(self, imagined):
        return imagined.distances.mean()


@pytest.mark.parametrize(("name", "steps"), [("End", 1), ("Path_", 4)])
def test_an_own_cost_like_the_papers_finds_the_papers_plan(demo_model, name, steps):
    End.seen.clear()
    expected = Planner(demo_model, QUICK).plan(image(0), image(1))
    found = Planner(demo_model, replace(QUICK, cost=f"{HERE}:{name}")).plan(image(0), image(1))
    np.testing.assert_allclose(found.actions, expected.actions, atol=1e-4)
    assert found.cost == pytest.approx(expected.cost, rel=1e-4)
    assert End.seen[0] == ((1, 20, steps, 32), (1, 20, 4, 10)) and End.seen[-1] == (
        (1, 1, steps, 32),
        (1, 1, 4, 10),
    )


def test_the_tutorials_cost_makes_gentle_plans(my_model, demo_model):
    import_plugin("my_model")

    plans = [
        Planner(demo_model, replace(QUICK, iterations=8, cost="my_model:Gentle", options={"effort": effort})).plan(
            image(0), image(1)
        )
        for effort in (0.0, 1e6)
    ]
    strong, gentle = (demo_model.normalizer.apply(torch.as_tensor(p.actions)).square().mean() for p in plans)
    assert gentle < 0.1 * strong


def test_a_cost_of_a_wrong_shape_is_refused(demo_model):
    said = r"planning cost Flat returned shape \(\), not \(episodes, candidates\) = \(1, 20\)"
    with pytest.raises(UserError, match=said):
        Planner(demo_model, replace(QUICK, cost=f"{HERE}:Flat")).plan(image(0), image(1))


class Descent(Solver):
    needs_gradients = True

    def __call__(self, cost, start, rngs):
        actions, costs = start.clone(), []
        for _ in range(self.config.iterations):
            with torch.enable_grad():
                actions.requires_grad_()
                value = cost(actions[:, None])[:, 0]
                (gradient,) = torch.autograd.grad(value.sum(), actions)
            actions = actions.detach() - self.config.options["rate"] * gradient
            costs.append(value.detach())
        return Solution(actions, torch.stack(costs))


def test_a_solver_may_follow_the_gradient_of_the_cost(demo_model):
    config = replace(QUICK, solver=f"{HERE}:Descent", options={"rate": 3.0}, iterations=20)
    planner = Planner(demo_model, config)
    plan = planner.plan(image(0), image(1))
    still = Planner(demo_model, replace(config, options={"rate": 0.0})).plan(image(0), image(1))
    assert plan.cost < 0.9 * still.cost and planner.plain
    assert all(p.grad is None for p in demo_model.parameters())


def test_the_tutorials_solver_finds_cheaper_plans_with_more_iterations(my_model, demo_model):
    import_plugin("my_model")

    config = replace(QUICK, solver="my_model:MPPI", candidates=50)
    few, many = (Planner(demo_model, replace(config, iterations=i)).plan(image(0), image(1)).cost for i in (1, 12))
    assert many < few


class Narrow(Encoder):
    def __init__(self, config):
        super().__init__(config)
        self.linear = nn.Linear(3, 20)

    def forward(self, frames, blocks=()):
        token = self.linear(self.pixels(frames).mean(dim=(2, 3)))
        return Tokens(token, token[:, None], [])


def test_an_encoder_may_be_no_transformer(my_model):
    module = import_plugin("my_model")
    config = demo("lewm").model
    cnn = replace(config, encoder=replace(config.encoder, kind="my_model:CNN"))
    model = WorldModel(cnn, 2).eval()
    frames = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8, generator=make_rng(0))
    seen = model.features(frames)
    assert isinstance(model.encoder, module.CNN) and (model.encoder.depth, model.encoder.fused) == (0, False)
    assert seen.z.shape == (5, 32) and seen.patch.shape == seen.cls.shape == (5, 48) and seen.blocks == []
    assert model.encoder.fused_obstacle() == "CNN offers none"
    narrow = WorldModel(replace(config, encoder=EncoderConfig(kind=f"{HERE}:Narrow", image_size=32)), 2)
    with pytest.raises(UserError, match=r"Narrow returned tokens of 20 numbers, not of encoder\.width 192"):
        narrow.encode(frames)


def test_flags_that_replace_own_parts_leave_their_options_behind(my_model):
    plan = PlanConfig(cost="my_model:Gentle", options={"effort": 0.1})
    assert PlanFlags().applied_to(plan) == plan
    assert "my_model" not in sys.modules  # named by a file alone
    assert PlanFlags(cost="terminal").applied_to(plan) == PlanConfig()
    assert PlanFlags(solver="my_model:MPPI").applied_to(plan).options == {"effort": 0.1}
    assert "my_model" in sys.modules
    with pytest.raises(UserError, match="cost 'my_model:Rough' cannot be imported"):
        PlanFlags(cost="my_model:Rough").applied_to(plan)


def test_settings_of_format_2_are_read_under_their_present_names(my_model):
    run = saved_run(demo("lewm"))
    stored = json.loads((run / "config.json").read_text())
    plan, train = stored["config"]["plan"], stored["config"]["train"]
    del plan["cost"], plan["solver"], plan["options"], train["save_every"]
    stored["format"], plan["rule"], train["keep_every"] = 2, "nearest", 7
    (run / "config.json").write_text(json.dumps(stored))
    config = read_run(run)[0].config
    assert (config.plan.cost, config.plan.solver, config.train.save_every) == ("nearest", "cem", 7)
