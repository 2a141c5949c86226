"""Our models inside stable-worldmodel, with its own solvers and its own World."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from atlas_wm.config import EncoderConfig, ModelConfig, PlanConfig, PredictorConfig
from atlas_wm.errors import UserError
from atlas_wm.models.world_model import WorldModel
from atlas_wm.plan.harness import SOLVERS, GoalCost, goal_cost, harness_policy
from atlas_wm.plan.planner import Planner
from atlas_wm.recipes import demo
from atlas_wm.rng import make_rng
from atlas_wm.runs.model import load_model
from atlas_wm.tasks.base import import_harness

import_harness()
from stable_worldmodel.data import get_format, load_dataset  # noqa: E402
from stable_worldmodel.policy import PlanConfig as TheirPlanConfig  # noqa: E402
from stable_worldmodel.protocols import Actionable  # noqa: E402
from stable_worldmodel.solver import CEMSolver, LagrangianSolver, PredictiveSamplingSolver  # noqa: E402

PLAN = PlanConfig(candidates=40, iterations=6, elites=8)
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "in-stable-worldmodel.md"

dino_wm = ModelConfig(
    EncoderConfig(kind="dinov2", image_size=8, patch_size=4, width=12, heads=3, depth=1),
    PredictorConfig(kind="patch", depth=1, heads=2, head_dim=4, mlp=16),
)


def images(count, seed=0, side=32):
    return torch.randint(0, 256, (count, 3, side, side), generator=make_rng(seed), dtype=torch.uint8)


def for_each_candidate(frames, candidates):
    """As solvers hand frames over: (B, 3, H, W) → (B, S, 1, 3, H, W)."""
    return frames[:, None, None].expand(-1, candidates, -1, -1, -1, -1)


def make_info(candidates=6, batch=2, side=32):
    frames, goals = (for_each_candidate(images(batch, seed, side), candidates) for seed in (0, 1))
    return {"pixels": frames, "goal": goals}


def environments(count, low=-1.0, high=1.0, size=2):
    """As far as a policy looks at them."""
    together, one = (gym.spaces.Box(low, high, shape) for shape in ((count, size), (size,)))
    return SimpleNamespace(num_envs=count, action_space=together, single_action_space=one)


def solver_for(model, name, plan=PLAN, count=1):
    policy = harness_policy(model, plan, name)
    policy.set_env(environments(count))
    return policy.solver


def solve(solver, frames, goals):
    return solver.solve({"pixels": frames[:, None], "goal": goals[:, None]})["actions"]


def cost_of(model, frames, goals, plans):
    with torch.no_grad():
        ends = model.terminal(model.encode(frames), plans[:, None])[:, 0]
        return model.distance(ends, model.encode(goals))


@pytest.fixture(params=["lewm", "fast-wm", "dino-wm"])
def any_model(request):
    """One for each kind of predictor, with weights that let actions matter."""
    torch.manual_seed(0)
    model = WorldModel(dino_wm if request.param == "dino-wm" else demo(request.param).model, action_size=2)
    for name, weights in model.predictor.named_parameters():
        if "modulation" in name:
            torch.nn.init.normal_(weights, std=0.5)
    return model.eval()


@pytest.fixture
def encoded(demo_model, monkeypatch):
    """How many frames each call of encode was given."""
    counts, encode = [], demo_model.encode
    monkeypatch.setattr(demo_model, "encode", lambda frames: (counts.append(len(frames)), encode(frames))[1])
    return counts


def test_costs_are_the_models_distances_of_the_ends_from_the_goal(any_model):
    info, candidates = make_info(), torch.randn(2, 6, 4, 10, generator=make_rng(2))
    size = any_model.config.encoder.image_size
    frames, goals = (info[key][:, 0, 0].unflatten(-1, (size, -1)) for key in ("pixels", "goal"))
    frames, goals = (f.unflatten(-3, (size, -1)).float().mean((-3, -1)).round().byte() for f in (frames, goals))
    with torch.no_grad():
        costs = GoalCost(any_model).get_cost(info, candidates)
        z, z_goal = any_model.encode(frames), any_model.encode(goals)
        for sample in range(6):
            end = any_model.rollout(z, candidates[:, sample : sample + 1])[:, 0, -1]
            torch.testing.assert_close(costs[:, sample], any_model.distance(end, z_goal), rtol=1e-4, atol=1e-5)
    assert costs.std() > 1e-4 * costs.mean()


def test_the_protocol_is_kept_and_nobody_asks_for_an_actor(demo_model):
    cost, info, candidates = GoalCost(demo_model), make_info(), torch.zeros(2, 6, 4, 10)
    assert torch.equal(cost.criterion(info, candidates), cost.get_cost(info, candidates))
    assert not isinstance(cost, Actionable)
    assert next(cost.parameters()).dtype == torch.float32


@pytest.mark.parametrize("chunk", [None, 1, 5, 1000])
def test_gradients_reach_the_candidates_and_not_the_model(any_model, chunk):
    info, candidates = make_info(), torch.randn(2, 6, 4, 10, generator=make_rng(2), requires_grad=True)
    trained = {name for name, p in any_model.named_parameters() if p.requires_grad}
    GoalCost(any_model, chunk).get_cost(info, candidates).sum().backward()
    assert (candidates.grad.abs().amax(dim=-1) > 0).all()  # each block of each candidate
    assert all(p.grad is None for p in any_model.parameters())
    assert {name for name, p in any_model.named_parameters() if p.requires_grad} == trained

    whole = candidates.detach().clone().requires_grad_()
    GoalCost(any_model).get_cost(info, whole).sum().backward()
    torch.testing.assert_close(candidates.grad, whole.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("with_gradient", [False, True])
def test_a_chunk_bounds_the_candidates_rolled_out_and_held_at_once(demo_model, monkeypatch, with_gradient):
    sizes, terminal = [], demo_model.terminal
    monkeypatch.setattr(demo_model, "terminal", lambda z, a: (sizes.append(a.shape[:2].numel()), terminal(z, a))[1])
    candidates = torch.randn(2, 6, 4, 10, requires_grad=with_gradient)
    costs = GoalCost(demo_model, candidate_chunk=5).get_cost(make_info(), candidates)
    assert sizes == [4, 4, 4]
    if with_gradient:  # nothing was kept: each chunk is computed again when its gradient is due
        costs.sum().backward()
        assert sizes == [4] * 6


@pytest.mark.parametrize("clip", [True, False])
def test_the_policy_acts_as_our_planner_plans_from_the_same_noise(demo_model, clip):
    demo_model.normalizer = replace(demo_model.normalizer, low=(2.9, -1.5), high=(3.2, -0.5))
    plan = replace(PLAN, execute=3, clip_actions=clip)  # the other two blocks are not a start for the next plan
    policy = harness_policy(demo_model, plan)
    policy.set_env(environments(1))
    for number in range(3):
        frame, goal = (images(1, seed, side=64)[0].permute(1, 2, 0).numpy() for seed in (number, 9))
        ours = Planner(demo_model, plan).plan(frame, goal, seed=number)
        policy.solver.torch_gen = make_rng(number)
        info = {"pixels": frame[None, None], "goal": goal[None, None], "action": np.full((1, 1, 2), np.nan)}
        theirs = [policy.get_action(info)[0] for _ in ours.actions]
        np.testing.assert_allclose(theirs, ours.actions, rtol=0, atol=1e-4)
        assert (demo_model.normalizer.outside(np.array(theirs)) == 0) == clip


@pytest.mark.parametrize(
    "solver",
    [
        *SOLVERS,
        lambda cost: PredictiveSamplingSolver(cost, num_samples=40),
        lambda cost: LagrangianSolver(
            cost, n_steps=3, n_outer_steps=2, num_samples=4, optimizer_kwargs={"lr": 0.1}
        ),
    ],
    ids=[*SOLVERS, "predictive sampling", "lagrangian"],
)
def test_every_solver_finds_better_plans_than_to_stand_still(any_model, solver):
    frames, goals = images(2), images(2, seed=1)
    size = any_model.config.encoder.image_size
    frames, goals = frames[..., :size, :size], goals[..., :size, :size]
    plans = solve(solver_for(any_model, solver, count=2), frames, goals)
    assert plans.shape == (2, PLAN.horizon, 10)
    found = cost_of(any_model, frames, goals, plans)
    assert (found < cost_of(any_model, frames, goals, torch.zeros_like(plans))).all()


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_solve_encodes_each_frame_once_and_the_next_solve_its_own(demo_model, encoded, solver):
    frames, goals = images(2), images(2, seed=1)
    solver = solver_for(demo_model, solver)
    plans = []
    for seen in (frames[:1], frames[1:], frames[:1]):
        solver.torch_gen.manual_seed(0)
        plans.append(solve(solver, seen, goals[:1]))
        assert encoded == [1, 1]
        encoded.clear()
    assert (plans[0] - plans[1]).abs().max() > 1e-2
    assert torch.equal(plans[0], plans[2])


def test_new_frames_and_new_weights_are_noticed(demo_model):
    cost, info, candidates = GoalCost(demo_model), make_info(), torch.zeros(2, 6, 4, 10)
    buffer = info["pixels"].clone()
    info["pixels"] = buffer
    with torch.inference_mode():
        costs = [cost.get_cost(info, candidates)]
        buffer.copy_(for_each_candidate(images(2, seed=5), 6))  # written over
        costs.append(cost.get_cost(info, candidates))
        info["goal"] = for_each_candidate(images(2, seed=6), 6)  # exchanged
        costs.append(cost.get_cost(info, candidates))
    torch.nn.init.normal_(demo_model.projector.down.bias)  # trained between two solves
    costs.append(cost.get_cost(make_info(), candidates))
    costs.append(GoalCost(demo_model).get_cost(make_info(), candidates))
    assert all((a - b).abs().max() > 1e-3 for a, b in pairwise(costs[:4]))
    assert torch.equal(costs[3], costs[4])


def test_latents_made_in_inference_mode_serve_gradients_too(any_model):
    cost, info, candidates = GoalCost(any_model), make_info(), torch.zeros(2, 6, 4, 10)
    with torch.inference_mode():
        cost.get_cost(info, candidates)
    cost.get_cost(info, candidates.requires_grad_()).sum().backward()
    assert candidates.grad.abs().max() > 0


@pytest.mark.parametrize("solver", SOLVERS)
def test_its_solvers_start_from_the_cheapest_demonstration(demo_model, solver, monkeypatch):
    frames, actions = images(12, seed=3), torch.randn(12, 10, generator=make_rng(4))
    demo_model.build_demonstrations([(frames, actions, 0)])
    policy = harness_policy(demo_model, replace(PLAN, start="retrieval"), solver)
    policy.set_env(environments(2))
    cost, starts = policy.solver.model, []
    assert isinstance(cost, Actionable)
    get_action = cost.get_action
    monkeypatch.setattr(
        type(cost),
        "get_action",
        lambda _, *given, **named: (starts.append(get_action(*given, **named)), starts[-1].clone())[1],
    )
    now, goals = images(2, seed=5), images(2, seed=6)
    found = solve(policy.solver, now, goals)
    proposals = torch.stack([torch.zeros(5, 10), *(actions[i : i + 5] for i in range(7))]).expand(2, -1, -1, -1)
    costs = torch.stack([cost_of(demo_model, now, goals, proposals[:, i]) for i in range(8)], dim=1)
    expected = torch.stack([proposals[b, costs[b].argmin()] for b in range(2)])
    assert torch.equal(starts[0], expected)
    assert found.shape == (2, 5, 10) and (cost_of(demo_model, now, goals, found) <= costs[:, 0]).all()


@pytest.mark.parametrize("settings", [{"start": "retrieval"}, {"cost": "nearest"}, {}])
def test_a_bare_cost_says_what_it_does_not_take_from_the_run(run_folder, settings, caplog):
    model = load_model(run_folder)
    plan = replace(model.run.config.plan, **settings)
    model.run = replace(model.run, config=replace(model.run.config, plan=plan))
    cost = goal_cost(model)
    assert isinstance(cost, Actionable) == (plan.start == "retrieval") and not caplog.records
    info, candidates = make_info(), torch.randn(2, 6, 5, 10, generator=make_rng(2))
    planned = cost.get_cost(info, candidates)
    bare = GoalCost(model).get_cost(info, candidates)
    assert torch.equal(planned, bare) == (plan.cost == "terminal")
    said = [record.message for record in caplog.records]
    assert len(said) == bool(settings)
    assert all(f"the run's cost {plan.cost} and start {plan.start}" in message for message in said)


@pytest.mark.filterwarnings("ignore:std")  # of one candidate
def test_a_solver_of_the_users_own_starts_from_demonstrations_too(demo_model):
    frames, actions = images(8, seed=3), torch.randn(8, 10, generator=make_rng(4))
    demo_model.build_demonstrations([(frames, actions, 0)])
    cost = goal_cost(demo_model, replace(PLAN, start="retrieval"))
    solver = CEMSolver(cost, num_samples=1, n_steps=1, topk=1)
    solver.configure(
        action_space=gym.spaces.Box(-1, 1, (1, 2)), n_envs=1, config=TheirPlanConfig(5, 5, action_block=5)
    )
    now, goals = images(1, seed=5), images(1, seed=6)
    (start,) = solve(solver, now, goals)
    assert any(torch.equal(start, one) for one in (torch.zeros(5, 10), *(actions[i : i + 5] for i in range(3))))
    assert (
        cost_of(demo_model, now, goals, start[None]) <= cost_of(demo_model, now, goals, actions[None, :5])
    ).all()
    with pytest.raises(
        UserError, match=r"5 action chunks \(plan.horizon\), but the solver asks for 3: .*warm_start=False"
    ):
        solver.solve({"pixels": now[:, None], "goal": goals[:, None]}, torch.zeros(1, 2, 10))


def test_icem_keeps_within_the_bounds_of_the_environment(demo_model):
    """Which are in its units; a normaliser of mean (3, -1) and deviation (0.5, 2) makes others of them."""
    policy = harness_policy(demo_model, PLAN, "icem")
    policy.set_env(environments(1, low=-1.0, high=2.0))
    plan = solve(policy.solver, images(1), images(1, seed=1)).reshape(-1, 2)
    actions = policy.process["action"].inverse_transform(plan.numpy())
    assert actions[:, 0].max() == pytest.approx(2.0, abs=0.3)  # standing still would be 3
    assert actions.min() > -1.5 and actions[:, 1].max() <= 2.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"goal": None}, "no 'goal' image"),
        ({"pixels": torch.zeros(2, 6, 1, 3, 64, 64)}, "must be uint8"),
        ({"goal": torch.zeros(2, 6, 1, 32, 32, 3, dtype=torch.uint8)}, r"shape \(N, 3, height, width\)"),
    ],
)
def test_frames_that_cannot_be_planned_with_are_refused(demo_model, change, message):
    info = {key: value for key, value in (make_info() | change).items() if value is not None}
    with pytest.raises(UserError, match=message):
        GoalCost(demo_model).get_cost(info, torch.zeros(2, 6, 4, 10))


def test_an_unknown_solver_and_a_foreign_environment_are_refused(demo_model):
    with pytest.raises(UserError, match=r"unknown solver 'cen'\. Did you mean 'cem'"):
        harness_policy(demo_model, PLAN, "cen")
    with pytest.raises(UserError, match="actions have 3 coordinates, the model was trained on 2"):
        harness_policy(demo_model, PLAN).set_env(environments(1, size=3))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*WARN")  # gymnasium's, about the library's environments
def test_the_page_works_as_written(run_folder, dataset_path, task, tmp_path, monkeypatch):
    """World.evaluate and all, with a run and a dataset where the page says they are."""
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/tworoom-atlas-demo").symlink_to(run_folder)
    stored = load_dataset(str(dataset_path), keys_to_load=["state", "action"])
    with get_format("hdf5").open_writer("data/tworoom-pixels.h5") as writer:
        for episode in range(5):
            columns = {key: value.numpy() for key, value in stored.load_episode(episode).items()}
            columns["pixels"] = task.draw(columns["state"], 224).permute(0, 2, 3, 1).numpy()
            writer.write_episode({key: list(column) for key, column in columns.items()})
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(code, names)
    assert names["result"]["episode_successes"].shape == (2,)
    assert names["result"]["success_rate"] == 50 * names["result"]["episode_successes"].sum()
    names["world"].set_policy(names["policy"])  # the other solver of the page
    names["world"].close()
