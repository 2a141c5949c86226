"""Searches that start from demonstrations: what is retrieved, and what the search makes of it."""

import logging
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from atlas_wm.cli.app import main
from atlas_wm.config import EncoderConfig, ModelConfig, PlanConfig, PredictorConfig
from atlas_wm.data.clips import held_out_episodes
from atlas_wm.data.collect import collect
from atlas_wm.data.training_set import DEMONSTRATION_FRAMES, open_training_set
from atlas_wm.errors import UserError
from atlas_wm.models.demonstrations import Demonstrations
from atlas_wm.models.world_model import WorldModel
from atlas_wm.plan import retrieval as module
from atlas_wm.plan.bounds import clip_limits
from atlas_wm.plan.cem import CEM
from atlas_wm.plan.planner import Planner
from atlas_wm.plan.retrieval import NONE, Retrieval
from atlas_wm.plan.solver import Solution, Solver
from atlas_wm.rng import make_rng
from atlas_wm.runs.folder import DEMONSTRATIONS
from atlas_wm.runs.model import load_model

QUICK = PlanConfig(candidates=20, iterations=2, elites=5, horizon=3, execute=1, start="retrieval")
EPISODES, LENGTH = 8, 7  # demonstrations of made-up models, and their frames


def images(count, seed=0, side=32):
    return torch.randint(0, 256, (count, 3, side, side), generator=make_rng(seed), dtype=torch.uint8)


def demonstrate(model):
    """Random demonstrations. Returns their frames and actions, (E, L, …)."""
    frames = images(EPISODES * LENGTH, 7, model.config.encoder.image_size).unflatten(0, (EPISODES, LENGTH))
    actions = torch.randn(EPISODES, LENGTH, 5 * model.action_size, generator=make_rng(8))
    model.build_demonstrations(zip(frames, actions, range(EPISODES), strict=True))
    return frames, actions


@pytest.fixture
def model(demo_model):
    demo_model.shown = demonstrate(demo_model)
    return demo_model


def encode(model, frames):
    with torch.inference_mode():
        return model.encode(frames)


@pytest.mark.parametrize("later", [1, 2, 3])
def test_the_demonstration_itself_is_retrieved_where_start_and_goal_are_its_frames(model, later):
    frames, actions = model.shown
    for start in range(LENGTH - 3):
        found = Retrieval(model, QUICK, later == 3)(
            encode(model, frames[:, start]), encode(model, frames[:, start + later])
        )
        assert torch.equal(found[:, 0], actions[:, start : start + 3])


@pytest.mark.parametrize("ends_only", [True, False])
def test_it_finds_what_a_search_pair_by_pair_finds(model, monkeypatch, ends_only):
    monkeypatch.setattr(module, "NEAREST", 6)
    z, z_goal = encode(model, images(5, 1)), encode(model, images(5, 2))
    found = Retrieval(model, QUICK, ends_only)(z, z_goal)
    points, actions = model.demonstrations.points.double(), model.shown[1]
    assert found.shape == (5, 6, 3, 10)
    for b in range(5):
        starts = [e * LENGTH + i for e in range(EPISODES) for i in range(LENGTH - 3)]
        near = sorted(starts, key=lambda s: (points[s] - z[b]).square().sum())[:6]
        steps = [3] if ends_only else [1, 2, 3]
        gap = {
            s: (points[s] - z[b]).square().sum() + min((points[s + h] - z_goal[b]).square().sum() for h in steps)
            for s in near
        }
        best = sorted(near, key=gap.__getitem__)
        expected = [actions[s // LENGTH, s % LENGTH : s % LENGTH + 3] for s in best]
        assert torch.equal(found[b], torch.stack(expected))


def test_patch_tokens_are_found_by_their_mean():
    sizes = EncoderConfig(kind="dinov2", image_size=8, patch_size=4, width=12, heads=3, depth=1)
    config = ModelConfig(sizes, PredictorConfig(kind="patch", depth=1, heads=2, head_dim=4, mlp=16))
    torch.manual_seed(0)
    model = WorldModel(config, action_size=2).eval()
    frames, actions = demonstrate(model)
    assert model.demonstrations.points.shape == (EPISODES * LENGTH, 12)
    found = Retrieval(model, QUICK, True)(encode(model, frames[:, 1]), encode(model, frames[:, 4]))
    assert torch.equal(found[:, 0], actions[:, 1:4])
    assert Planner(model, QUICK).plan_batch(frames[0, :1], frames[0, 3:4], [make_rng(0)])[0].actions.shape == (5, 2)


def test_proposals_are_candidates_of_the_first_iteration_alone():
    seen, proposals = [], torch.randn(2, 4, 3, 10, generator=make_rng(1))

    def cost(candidates):
        seen.append(candidates.clone())
        return candidates.square().mean(dim=(-2, -1))

    rngs = [make_rng(0), make_rng(1)]
    CEM(QUICK)(cost, proposals[:, 1], rngs, proposals)
    assert torch.equal(seen[0][:, :4], proposals)
    noise = torch.stack([torch.randn(20, 3, 10, generator=make_rng(b)) for b in (0, 1)])
    torch.testing.assert_close(seen[0][:, 4:], proposals[:, 1:2] + noise[:, 4:])
    assert not any(torch.equal(seen[1][:, i], proposals[:, i]) for i in range(1, 4))


def proposed(planner, frames, goals, start):
    """What a search compares before its first iteration, and what it costs, clipped as a plan is."""
    model, limits = planner.model, clip_limits(planner.config, planner.model)
    z, z_goal = encode(model, frames), encode(model, goals)
    proposals = planner.retrieval.proposals(start, z, z_goal)
    clipped = proposals if limits is None else proposals.clamp(*limits)
    with torch.inference_mode():
        distances = model.distance(model.rollout(z, clipped), z_goal[:, None, None])
    return proposals, distances[..., -1] if planner.cost.ends_only else distances.amin(dim=-1)


class Bad(Solver):
    """Remembers its start and answers with something else."""

    def __call__(self, cost, start, rngs):
        self.start = start
        return Solution(start + 3, torch.zeros(1, len(rngs)))


@pytest.mark.parametrize("cost", ["terminal", "nearest"])
def test_a_plan_never_costs_more_than_the_cheapest_proposal(model, cost):
    """The rest of the last plan is one of them, also for a solver that knows nothing of proposals."""
    frames, goals, rest = images(4, 1), images(4, 2), torch.randn(4, 2, 10, generator=make_rng(3))
    planner = Planner(model, replace(QUICK, cost=cost))
    start = torch.zeros(4, 3, 10)
    if cost == "nearest":
        start[:, :2] = rest
    proposals, costs = proposed(planner, frames, goals, start)
    assert torch.equal(proposals[:, 0], start)
    rngs, rests = [make_rng(e) for e in range(4)], list(rest.numpy())
    plans = planner.plan_batch(frames, goals, rngs, rests)
    assert all(plan.cost <= best * (1 + 1e-5) for plan, best in zip(plans, costs.amin(dim=1), strict=True))
    planner.solver = Bad(planner.config)
    for e in range(4):
        one = slice(e, e + 1)
        (plan,) = planner.plan_batch(frames[one], goals[one], rngs[one], rests[one])
        assert torch.equal(planner.solver.start[0], proposals[e, costs[e].argmin()])
        assert plan.cost <= costs[e].min() * (1 + 1e-5)


def test_an_episode_alone_is_bit_for_bit_the_episode_among_eight(model):
    planner, frames, goals = Planner(model, QUICK), images(8, 1), images(8, 2)
    together = planner.plan_batch(frames, goals, [make_rng(0, e) for e in range(8)])
    for e in range(8):
        (alone,) = planner.plan_batch(frames[e : e + 1], goals[e : e + 1], [make_rng(0, e)])
        assert np.array_equal(alone.actions, together[e].actions) and alone.cost == together[e].cost


def test_without_retrieval_demonstrations_change_nothing(model):
    plain = replace(QUICK, start="zero")
    frames, goals = images(1, 1), images(1, 2)
    (one,) = Planner(model, plain).plan_batch(frames, goals, [make_rng(0)])
    (retrieved,) = Planner(model, QUICK).plan_batch(frames, goals, [make_rng(0)])
    model.demonstrations = None
    (other,) = Planner(model, plain).plan_batch(frames, goals, [make_rng(0)])
    assert np.array_equal(one.actions, other.actions) and one.cost == other.cost
    assert not np.array_equal(one.actions, retrieved.actions)


def test_few_candidates_leave_room_for_the_start(model):
    few = replace(QUICK, candidates=2, elites=2)
    assert Retrieval(model, few, True).count == 1
    Planner(model, few).plan_batch(images(1, 1), images(1, 2), [make_rng(0)])


def test_what_is_missing_is_named(model):
    with pytest.raises(UserError, match=r"no stored demonstration has plan\.horizon 7"):
        Planner(model, replace(QUICK, horizon=LENGTH))
    with pytest.raises(UserError, match=r"plan\.horizon 500"):
        Planner(model, replace(QUICK, horizon=500))
    model.demonstrations = None
    with pytest.raises(UserError, match=r"has none: `atlas bank RUN` adds them"):
        Planner(model, QUICK)


@pytest.fixture(scope="module")
def ready(dataset_path, task, tiny_config):
    return open_training_set(dataset_path, task, tiny_config)


def test_a_run_holds_demonstrations_of_training_episodes_alone(ready, run_folder, tiny_config):
    model = load_model(run_folder)
    known, data = model.demonstrations, ready.data
    held_out = held_out_episodes(60, tiny_config.train)
    expected = np.flatnonzero(~held_out & (data.lengths >= model.config.clip_rows))
    assert held_out.any() and known.episodes.unique().tolist() == expected.tolist()
    assert len(known.points) <= DEMONSTRATION_FRAMES and known.points.dtype == torch.float16
    for episode in known.episodes.unique().tolist():
        mine = known.episodes == episode
        first = data.offsets[episode] + np.arange((data.lengths[episode] - 1) % 5 + 1)
        taken = [data.actions[row : row + 5 * (int(mine.sum()) - 1)] for row in first]  # where it may have started
        steps = model.normalizer.invert(known.actions[mine][:-1].unflatten(1, (5, 2)).flatten(0, 1)).numpy()
        same = [np.allclose(steps, some, atol=1e-5) for some in taken]
        assert sum(same) == 1 and (known.actions[mine][-1] == 0).all()
        if episode == known.episodes[0]:
            rows = first[same.index(True)] + 5 * np.arange(int(mine.sum()))
            z = encode(model, data.frames_of(rows))
            torch.testing.assert_close(known.points[mine].float(), z, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("most", [2, 3, 29, 300])
def test_their_number_is_bounded(ready, most):
    sizes = [(len(frames), len(actions)) for frames, actions, _ in ready.demonstrations(most)]
    assert most - 1 <= sum(n for n, _ in sizes) <= most and all(n == m for n, m in sizes)


def test_a_long_episode_comes_in_pieces(ready, monkeypatch):
    whole = list(ready.demonstrations(40))
    monkeypatch.setattr("atlas_wm.data.training_set.FRAMES_AT_ONCE", 4)
    pieces = list(ready.demonstrations(40))
    assert len(pieces) > len(whole)
    for part in (0, 1):
        assert torch.equal(torch.cat([p[part] for p in pieces]), torch.cat([w[part] for w in whole]))


def test_atlas_bank_adds_them_to_an_older_run_and_atlas_plan_uses_them(run_folder, ready, tmp_path, capsys):
    from PIL import Image

    run = shutil.copytree(run_folder, tmp_path / "run")
    for name, row in (("frame", 0), ("goal", 20)):
        Image.fromarray(ready.data.frame(row)[0].permute(1, 2, 0).numpy()).save(tmp_path / f"{name}.png")
    plan = ["plan", str(run), "--frame", f"{tmp_path}/frame.png", "--goal", f"{tmp_path}/goal.png"]
    plan += ["--device", "cpu", "--start", "retrieval"]
    (run / DEMONSTRATIONS).unlink()
    with pytest.raises(SystemExit, match="`atlas bank RUN` adds them"):
        main(plan)
    main(["bank", str(run), "--device", "cpu"])
    again, before = (load_file(folder / DEMONSTRATIONS) for folder in (run, run_folder))
    assert all(torch.equal(again[name], before[name]) for name in before)
    main(plan)
    assert '"actions"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t | {"points": t["points"][:, :3].contiguous()}, "does not fit the model"),
        (lambda t: {"points": t["points"]}, "does not fit the model"),
        (lambda t: t | {"actions": t["actions"] * torch.nan}, "not finite"),
    ],
)
def test_files_that_do_not_fit_are_refused(run_folder, tmp_path, change, message):
    run = shutil.copytree(run_folder, tmp_path / "run")
    save_file(change(load_file(run / DEMONSTRATIONS)), run / DEMONSTRATIONS)
    with pytest.raises(UserError, match=rf"{DEMONSTRATIONS} .*{message}.*`atlas bank"):
        load_model(run)


@pytest.fixture
def retrieved(monkeypatch):
    """Of each plan of an evaluation on a CPU: the group that was left out, and the sequences found."""
    calls, retrieve = [], Retrieval.__call__

    def record(self, z, z_goal, left_out):
        found = retrieve(self, z, z_goal, left_out)
        calls.append((int(left_out), found[0]))
        return found

    monkeypatch.setattr(Retrieval, "__call__", record)
    return calls


def evaluated(run, episodes, part="all", **options):
    from atlas_wm.evaluate.evaluate import evaluate
    from atlas_wm.evaluate.protocol import Protocol

    plan = PlanConfig(candidates=20, iterations=1, elites=5, start="retrieval")
    options |= {"plan": plan, "policies": ("model",), "films": 0, "device": "cpu"}
    (result,) = evaluate(run, [Protocol(5, 10, episodes, (42,), part)], **options)
    assert "retrieval" in result.name
    return [episode.episode for episode in result.model.episodes["42"]]


def test_no_evaluated_episode_retrieves_its_own_demonstration(run_folder, in_this_process, retrieved, caplog):
    caplog.set_level(logging.INFO)
    known = load_file(run_folder / DEMONSTRATIONS)
    assert not set(evaluated(run_folder, 2, "heldout")) & set(known["episodes"].tolist())
    assert retrieved and "demonstrations" not in caplog.text
    retrieved.clear()
    episodes = evaluated(run_folder, 4)
    mine = set(episodes) & set(known["episodes"].tolist())
    assert f"{sum(e in mine for e in episodes)} of 4 evaluated episodes, or variants" in caplog.text
    assert mine and {group for group, _ in retrieved} == set(episodes)  # no episode here has variants
    for group, found in retrieved:
        own = known["actions"][known["episodes"] == group]
        assert (found != 0).any() and not (found[:, None, 0] == own).all(dim=-1).any()


def test_episodes_of_other_data_leave_nothing_out(run_folder, in_this_process, retrieved, task, tmp_path):
    collect(task, tmp_path / "others.h5", 3, seed=6, pixels=False, workers=1)
    evaluated(run_folder, 2, data_path=tmp_path / "others.h5")
    assert {group for group, _ in retrieved} == {NONE}


def without(known, episode):
    keep = known.episodes != episode
    return Demonstrations(known.points[keep], known.actions[keep], known.episodes[keep])


@pytest.mark.parametrize("ends_only", [True, False])
def test_what_is_left_out_might_as_well_not_be_there(model, ends_only):
    frames, actions = model.shown
    z, z_goal = encode(model, frames[:, 1]), encode(model, frames[:, 4])  # of each episode, its own
    retrieval = Retrieval(model, QUICK, ends_only)
    all_of_them, found = retrieval(z, z_goal), retrieval(z, z_goal, torch.arange(EPISODES))
    assert torch.equal(all_of_them[:, 0], actions[:, 1:4])
    known = model.demonstrations
    for e in range(EPISODES):
        model.demonstrations = without(known, e)
        assert torch.equal(Retrieval(model, QUICK, ends_only)(z[e : e + 1], z_goal[e : e + 1])[0], found[e])


def test_who_leaves_nothing_out_retrieves_the_same_to_the_bit(model):
    z, z_goal = encode(model, images(4, 1)), encode(model, images(4, 2))
    retrieval = Retrieval(model, QUICK, False)
    before = retrieval(z, z_goal)
    after = retrieval(z, z_goal, torch.tensor([NONE, EPISODES, 3, NONE]))
    assert torch.equal(after[[0, 1, 3]], before[[0, 1, 3]])


def test_groups_are_left_out_together_and_zero_stands_where_nothing_remains(model):
    frames, actions = model.shown
    retrieval = Retrieval(model, QUICK, True)
    retrieval.group_by(torch.tensor([0, 0, 0, 0, 0, 0, 0, 1]))
    z, z_goal = encode(model, frames[:1, 1]), encode(model, frames[:1, 4])
    (found,) = retrieval(z, z_goal, torch.tensor([0]))
    there = [bool((one == actions[7, i : i + 3]).all()) for one in found for i in range(LENGTH - 3)]
    assert sum(there) == LENGTH - 3 and (found[LENGTH - 3 :] == 0).all() and len(found) > LENGTH - 3
    with pytest.raises(UserError, match="name episodes that the dataset, of 7, does not have"):
        retrieval.group_by(torch.arange(7))


def test_each_plan_of_a_batch_leaves_out_its_own(model, retrieved):
    planner, (frames, _) = Planner(model, QUICK), model.shown
    rngs = [make_rng(e) for e in range(3)]
    planner.plan_batch(frames[:3, 1], frames[:3, 4], rngs, left_out=[4, NONE, 2])
    planner.plan_batch(frames[:3, 1], frames[:3, 4], rngs)
    planner.plan_batch(frames[:1, 1], frames[:1, 4], rngs[:1], left_out=np.array([0]))
    assert [group for group, _ in retrieved] == [4, NONE, 2] + 3 * [NONE] + [0]
