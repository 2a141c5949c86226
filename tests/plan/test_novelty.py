"""How unknown a frame, a goal and an imagined end are, and the bank of training frames that tells it."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from atlas_wm.cli.app import main
from atlas_wm.config import EncoderConfig, ModelConfig, PlanConfig, PredictorConfig
from atlas_wm.data.clips import held_out_episodes
from atlas_wm.data.training_set import BANK_FRAMES, open_training_set
from atlas_wm.errors import UserError
from atlas_wm.models.bank import LatentBank
from atlas_wm.models.world_model import WorldModel
from atlas_wm.plan.planner import LatentNovelty, Novelty, Planner
from atlas_wm.plan.retrieval import NONE
from atlas_wm.rng import make_rng
from atlas_wm.runs.model import load_model, save_model

QUICK = PlanConfig(candidates=20, iterations=2, elites=5)


@pytest.fixture(scope="module")
def ready(dataset_path, task, tiny_config):
    return open_training_set(dataset_path, task, tiny_config)


@pytest.fixture
def model(run_folder):
    return load_model(run_folder)


@pytest.fixture
def copy(run_folder, tmp_path):
    shutil.copytree(run_folder, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def images(task, tmp_path):
    """Flags of `atlas plan`: two images of TwoRoom."""
    for name, state in (("frame", [60, 60]), ("goal", [80, 70])):
        drawn = task.draw(np.array([state], np.float32), 224)[0].permute(1, 2, 0).numpy()
        Image.fromarray(drawn).save(tmp_path / f"{name}.png")
    return ["--frame", str(tmp_path / "frame.png"), "--goal", str(tmp_path / "goal.png"), "--device", "cpu"]


def noise(count, seed=0, side=32):
    return torch.randint(0, 256, (count, 3, side, side), generator=make_rng(seed), dtype=torch.uint8)


def cloud(n, m, seed=0):
    return torch.randn(n, m, generator=make_rng(seed)) * torch.linspace(0.1, 30, m) + 5


def brute_force(queries, bank, k):
    """Percentiles, pair by pair: d over coordinates in units of their deviation, the mean of the k smallest."""

    def novelty(q, others):
        return np.mean(sorted(np.sqrt((((q - x) / deviations) ** 2).sum()) for x in others)[:k])

    queries, bank = queries.double().numpy(), bank.double().numpy()
    deviations = bank.std(axis=0) + 1e-6
    own = [novelty(x, np.delete(bank, i, axis=0)) for i, x in enumerate(bank)]
    return [100 * np.mean([o < novelty(q, bank) for o in own]) for q in queries]


@pytest.mark.parametrize(("n", "k"), [(2, 1), (12, 11), (70, 50)])
def test_percentiles_are_those_of_a_search_pair_by_pair(n, k):
    bank, queries = cloud(n, 3), cloud(40, 3, seed=1)
    found = LatentBank.of(bank.split(5)).percentiles(queries)
    assert found.tolist() == pytest.approx(brute_force(queries, bank, k))
    assert n == 2 or len(found.unique()) > 5


def test_training_frames_spread_evenly_from_0_to_100(model, ready):
    """Those not in the bank. One that is has itself for a neighbour, so it counts as a little better known."""
    other = torch.cat(list(ready.sample_frames(2 * BANK_FRAMES)))[BANK_FRAMES:]
    with torch.no_grad():
        ranks = model.bank.percentiles(model.encode(other))
    assert len(ranks) == BANK_FRAMES
    assert ranks.quantile(torch.linspace(0.1, 0.9, 9)).tolist() == pytest.approx(range(10, 100, 10), abs=6)
    members = model.bank.percentiles(model.bank.points)
    assert 40 < members.mean() < 50 and members.min() < 5 and members.max() > 95


def test_what_is_unlike_training_is_at_100(model, ready):
    shifted = model.bank.points[:9] + 10 * model.bank.points.std(dim=0)
    with torch.no_grad():
        unlike = torch.cat([model.encode(noise(9)), shifted, torch.full((1, 32), torch.nan)])
    assert model.bank.percentiles(unlike).tolist() == [100.0] * 19


def test_the_bank_holds_different_frames_of_the_training_part(ready, model, tiny_config):
    frames = torch.cat(list(ready.sample_frames()))
    assert frames.shape == (BANK_FRAMES, 3, 32, 32)
    assert torch.equal(frames[:70], torch.cat(list(ready.sample_frames(70))))
    with torch.no_grad():
        torch.testing.assert_close(model.bank.points[:50], model.encode(frames[:50]))
    everything, held_out = [], held_out_episodes(60, tiny_config.train)
    ready.data.frames, real = lambda e, s, n: everything.append((e, s)) or torch.zeros(1, 1), ready.data.frames
    try:
        list(ready.sample_frames(10**6))
    finally:
        ready.data.frames = real
    episode, start = (np.concatenate(part) for part in zip(*everything, strict=True))
    drawn = set(zip(episode.tolist(), start.tolist(), strict=True))
    training = [(e, n) for e, n in enumerate(ready.data.lengths.tolist()) if not held_out[e]]
    assert len(drawn) == len(episode)
    assert drawn == {(e, start + 5 * frame) for e, n in training for start in range(n - 15) for frame in range(4)}


def test_a_plan_tells_how_novel_frame_goal_and_end_are(model, ready):
    frame, goal = next(ready.sample_frames(1)), noise(1)
    (plan,) = Planner(model, QUICK).plan_batch(frame, goal, [make_rng(0)])
    with torch.no_grad():
        points = torch.cat([model.encode(frame), model.encode(goal), torch.from_numpy(plan.latents[-1:])])
    images = model.bank.images.percentiles(torch.cat([frame, goal])).tolist()
    assert plan.novelty == Novelty(*model.bank.percentiles(points).tolist(), *images)
    assert plan.novelty.frame < 100 and plan.novelty.goal == plan.novelty.goal_image == 100


def test_a_batch_is_one_query_and_tells_what_single_plans_tell(model, ready, monkeypatch):
    frames, goals = next(ready.sample_frames(6)), torch.cat([next(ready.sample_frames(9))[6:], noise(3)])
    planner, rngs = Planner(model, QUICK), lambda: [make_rng(0, e) for e in range(6)]
    single = [planner.plan_batch(frames[e : e + 1], goals[e : e + 1], [s])[0] for e, s in enumerate(rngs())]
    assert [p.novelty for p in planner.plan_batch(frames, goals, rngs())] == [p.novelty for p in single]
    queries, percentiles = [], LatentBank.percentiles
    monkeypatch.setattr(LatentBank, "percentiles", lambda bank, z: queries.append(len(z)) or percentiles(bank, z))
    with torch.inference_mode():
        start, nothing = torch.zeros(6, QUICK.horizon, 10), torch.full((6,), NONE)
        together = planner._solve(frames, goals, rngs(), start, nothing)  # as on a GPU
    assert queries == [18]
    for a, b in zip(together, single, strict=True):
        assert tuple(a.novelty) == pytest.approx(tuple(b.novelty), abs=150 / BANK_FRAMES)  # a rank may differ


def test_of_patch_tokens_the_bank_holds_the_mean():
    encoder = EncoderConfig(kind="dinov2", image_size=8, patch_size=4, width=12, heads=3, depth=1)
    model = WorldModel(ModelConfig(encoder, PredictorConfig(kind="patch", depth=1, heads=2, head_dim=4, mlp=16)), 2)
    frames = noise(60, side=8)
    model.build_bank(frames.split(25))
    assert not model.training and model.bank is not None
    with torch.no_grad():
        tokens = model.encode(frames)  # (60, 4, 12)
    torch.testing.assert_close(model.bank.points, tokens.mean(dim=1))
    assert torch.equal(model.bank.percentiles(tokens), model.bank.percentiles(tokens.mean(dim=1)))
    (plan,) = Planner(model, QUICK).plan_batch(frames[:1], frames[1:2], [make_rng(0)])
    assert plan.novelty is not None and 0 <= min(plan.novelty) <= max(plan.novelty) <= 100


def test_the_bank_travels_with_the_model_and_goes_with_it(model, demo_model, tmp_path):
    save_model(model, tmp_path)
    again = load_model(tmp_path).bank
    assert torch.equal(again.points, model.bank.points) and torch.equal(again.novelty, model.bank.novelty)
    for part in ("colours", "novelty"):
        assert torch.equal(getattr(again.images, part), getattr(model.bank.images, part))
    demo_model.run = model.run
    save_model(demo_model, tmp_path)  # a model without one, over a model with one
    assert load_model(tmp_path).bank is None


def test_a_run_without_a_bank_plans_and_says_how_to_make_one(copy, run_folder, images, capsys):
    (copy / "bank.safetensors").unlink()
    plan = ["plan", str(copy), *images]
    main(plan)
    shown = capsys.readouterr()
    assert json.loads(shown.out)["novelty"] is None and f"`atlas bank {copy}`" in shown.err
    main(["bank", str(copy), "--device", "cpu"])
    assert capsys.readouterr().out.strip() == str(copy / "bank.safetensors")
    made, trained = (load_model(run).bank for run in (copy, run_folder))
    torch.testing.assert_close(made.points, trained.points)
    main(plan)
    shown = capsys.readouterr()
    novelty = json.loads(shown.out)["novelty"]
    assert set(novelty) == {"frame", "goal", "end", "frame_image", "goal_image"}
    assert novelty["frame"] < 100 and not shown.err


def test_a_run_of_an_older_version_tells_the_novelty_of_latents_only(copy, ready):
    frames, goals = next(ready.sample_frames(1)), noise(1)
    path = copy / "bank.safetensors"
    (plan,) = Planner(load_model(copy), QUICK).plan_batch(frames, goals, [make_rng(0)])
    stored = load_file(path)
    save_file({name: stored[name] for name in ("points", "novelty")}, path)
    (older,) = Planner(load_model(copy), QUICK).plan_batch(frames, goals, [make_rng(0)])
    assert older.novelty == LatentNovelty(*plan.novelty[:3]) and max(older.novelty) == 100
    assert np.array_equal(older.actions, plan.actions) and older.cost == plan.cost


def test_novelty_does_not_change_a_plan(model, ready):
    frames, goals = next(ready.sample_frames(1)), noise(1)
    plans = []
    for bank in (model.bank, None):
        model.bank = bank
        plans += Planner(model, QUICK).plan_batch(frames, goals, [make_rng(0)])
    assert plans[1].novelty is None and plans[0].cost == plans[1].cost
    assert all(np.array_equal(getattr(plans[0], f), getattr(plans[1], f)) for f in ("actions", "latents", "rest"))


def test_images_are_judged_on_frames_that_training_did_not_see(ready, tiny_config):
    fitted, judged = (torch.cat(list(some)) for some in ready.image_frames())
    held_out = held_out_episodes(60, tiny_config.train)
    rows = [ready.data.locate(part)[0] for part in ready.probe_rows(4000, 2000)]
    assert not held_out[rows[0]].any() and held_out[rows[1]].all()
    assert len(fitted) > len(judged) > 100


def test_a_bank_is_made_of_the_data_the_run_was_trained_on(copy):
    info = json.loads((copy / "config.json").read_text())
    info["data"]["hash"] = "0" * 16
    (copy / "config.json").write_text(json.dumps(info))
    with pytest.raises(
        SystemExit, match=r"trained on data with hash 0{16}, .*tworoom\.h5 has \w+: pass the --data"
    ):
        main(["bank", str(copy), "--device", "cpu"])


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        (None, "is damaged"),
        ({"points": (9, 16), "novelty": (9,)}, r"does not fit the model, .* 32 coordinates .*\(9, 16\)"),
        ({"points": (9, 32), "novelty": (8,)}, "does not fit"),
        ({"points": (1, 32), "novelty": (1,)}, "does not fit"),
        ({"points": (9, 32)}, "does not fit"),
        ({"points": (9, 32), "novelty": ()}, "does not fit"),
        ({"points": (9, 32), "novelty": (9,), "image_novelty": (5,)}, "does not fit"),
        ({"points": (9, 32), "novelty": (9,), "image_colours": (256, 32, 3)}, "does not fit"),
    ],
)
def test_a_bank_that_is_damaged_or_another_models_is_refused_in_one_line(copy, stored, said):
    path = copy / "bank.safetensors"
    if stored is None:
        path.write_bytes(path.read_bytes()[:1000])
    else:
        save_file({name: torch.zeros(shape) for name, shape in stored.items()}, path)
    with pytest.raises(UserError, match=rf"bank\.safetensors {said}.*delete it .*`atlas bank") as refused:
        load_model(copy)
    assert "\n" not in str(refused.value)
