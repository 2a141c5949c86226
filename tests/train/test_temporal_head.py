"""The temporal head: a quasimetric by construction, fitted to the order of frames in training episodes."""

import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from atlas_wm.cli.app import main
from atlas_wm.config import EncoderConfig, ModelConfig, PredictorConfig
from atlas_wm.data.clips import held_out_episodes
from atlas_wm.data.training_set import TrainingSet, open_training_set
from atlas_wm.errors import UserError
from atlas_wm.models.temporal_head import TemporalHead
from atlas_wm.models.world_model import WorldModel
from atlas_wm.rng import make_rng
from atlas_wm.runs.folder import TEMPORAL_HEAD
from atlas_wm.runs.model import load_model, save_model
from atlas_wm.train import loop
from atlas_wm.train import temporal_head as module
from atlas_wm.train.loop import train
from atlas_wm.train.temporal_head import Paths, fit_temporal_head


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), width=st.sampled_from([1, 32, 65]), spread=st.sampled_from([0.1, 1.0, 30.0]))
def test_any_head_is_a_quasimetric(seed, width, spread):
    rng = make_rng(seed)
    points = torch.randn(12, width, generator=rng)
    head = TemporalHead.initial(points, rng, step=spread)
    for weights in head.fitted:
        weights.add_(torch.randn(weights.shape, generator=rng), alpha=spread * weights.shape[-1] ** -0.5)
    for d in (head(points[:, None], points[None]), head.distance(points[:, None], points[None])):
        assert torch.equal(d.diagonal(), torch.zeros(12)) and (d >= 0).all() and d.isfinite().all()
        detours = (d[:, :, None] + d[None]).amin(dim=1)  # (x, y): over all w
        assert (d <= detours * (1 + 1e-5) + 1e-5).all()
        assert not torch.allclose(d, d.T)


def test_its_width_follows_the_latents():
    assert TemporalHead.shapes(64)["second"] == (64, 64) and TemporalHead.shapes(65)["second"] == (256, 256)


def walks(places, step, count, length, seed=0):
    """Points of ``count`` walks over a few places, one ``step(place, rng)`` each, and a model that is right."""
    rng = np.random.default_rng(seed)
    where = torch.randn(places, 8, generator=make_rng(seed))
    visited = []
    for _ in range(count):
        place = int(rng.integers(places))
        for left in range(length - 1, -1, -1):
            visited.append((place, left))
            place = step(place, rng)
    order, left = torch.tensor(visited).T
    later = torch.arange(len(order))[:, None] + torch.arange(1, 4)
    return Paths(where[order], left, where[order[later.clamp_max(len(order) - 1)]]), where


def distances(head, where):
    return head(where[:, None], where[None])


def test_it_learns_the_steps_along_a_chain_from_walks_that_see_a_part_of_it(monkeypatch):
    monkeypatch.setattr(module, "BATCH", 128)

    def step(place, rng):
        return int(np.clip(place + rng.choice([-1, 1]), 0, 9))

    paths, where = walks(10, step, 200, 6)
    found = distances(fit_temporal_head(paths, steps=400), where)
    places = torch.arange(10)
    error = (found - (places[:, None] - places).abs()).abs()
    assert error.mean() < 0.4 and error.max() < 1.2


def test_it_learns_that_a_ring_has_a_direction(monkeypatch):
    monkeypatch.setattr(module, "BATCH", 128)
    paths, where = walks(6, lambda place, rng: (place + 1) % 6, 200, 4)
    found = distances(fit_temporal_head(paths, steps=400), where)
    places = torch.arange(6)
    error = (found - (places - places[:, None]) % 6).abs()
    assert error.mean() < 0.4
    assert found[0, 5] > 3 * found[5, 0]


def test_the_straight_way_counts_mean_steps_within_episodes():
    points, left = torch.tensor([[0.0], [3.0], [2.0], [50.0], [55.0]]), torch.tensor([2, 1, 0, 1, 0])
    head = fit_temporal_head(Paths(points, left, torch.zeros(5, 2, 1)), steps=1)
    assert head.step == pytest.approx((3 + 1 + 5) / 3)
    one, other = torch.tensor([[10.0]]), torch.tensor([[16.0]])
    expected = (head(one, other) + 6 / head.step) / 2
    torch.testing.assert_close(head.distance(one, other), expected)


def test_the_seed_alone_decides():
    paths, _ = walks(6, lambda place, rng: (place + 1) % 6, 20, 4)
    one, same, other = (fit_temporal_head(paths, seed, steps=5) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(vars(one).values(), vars(same).values(), strict=True))
    assert not torch.equal(one.first, other.first)


def test_frames_without_a_successor_are_refused():
    alone = Paths(torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64), torch.zeros(3, 5, 4))
    with pytest.raises(UserError, match="at least two frames"):
        fit_temporal_head(alone)


def pieces(model, lengths=(4, 9), seed=0):
    for episode, length in enumerate(lengths):
        rng, side = make_rng(seed, episode), model.config.encoder.image_size
        frames = torch.randint(0, 256, (length, 3, side, side), generator=rng, dtype=torch.uint8)
        actions = torch.randn(length, 10, generator=rng)
        actions[-1] = 0
        yield frames, actions, episode


def test_imagined_latents_are_the_models_rollouts_of_the_recorded_actions(demo_model):
    paths = Paths.of(demo_model, pieces(demo_model))
    assert paths.left.tolist() == [3, 2, 1, 0, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    _, (frames, actions, _) = pieces(demo_model)
    with torch.no_grad():
        z = demo_model.encode(frames)
        torch.testing.assert_close(paths.points[4:], z)
        for i in range(9):
            count = min(5, 8 - i)
            if count:
                expected = demo_model.rollout(z[i : i + 1], actions[None, None, i : i + count])[0, 0]
                torch.testing.assert_close(paths.imagined[4 + i, :count], expected, atol=1e-5, rtol=1e-4)


def test_patch_tokens_count_by_their_mean():
    sizes = EncoderConfig(kind="dinov2", image_size=8, patch_size=4, width=12, heads=3, depth=1)
    config = ModelConfig(sizes, PredictorConfig(kind="patch", depth=1, heads=2, head_dim=4, mlp=16))
    model = WorldModel(config, action_size=2).eval()
    paths = Paths.of(model, pieces(model))
    assert paths.points.shape == (13, 12) and paths.imagined.shape == (13, 5, 12)
    assert fit_temporal_head(paths, steps=2).first.shape == (64, 12)


def test_atlas_head_takes_training_episodes_alone_and_atlas_plan_uses_it(
    run_folder, dataset_path, task, tiny_config, tmp_path, monkeypatch, capsys
):
    from PIL import Image

    ready = open_training_set(dataset_path, task, tiny_config)
    held_out = held_out_episodes(60, tiny_config.train)
    run = shutil.copytree(run_folder, tmp_path / "run")
    for name, row in (("frame", 0), ("goal", 20)):
        Image.fromarray(ready.data.frame(row)[0].permute(1, 2, 0).numpy()).save(tmp_path / f"{name}.png")
    plan = ["plan", str(run), "--frame", f"{tmp_path}/frame.png", "--goal", f"{tmp_path}/goal.png"]
    plan += ["--device", "cpu", "--cost", "temporal", "--replan-every", "1"]
    with pytest.raises(SystemExit, match=r"plan\.cost temporal needs a temporal head.*`atlas head RUN`"):
        main(plan)

    read, demonstrations = [], TrainingSet.demonstrations

    def spied(self, most):
        for piece in demonstrations(self, most):
            read.append(piece[2])
            assert most == 100
            yield piece

    monkeypatch.setattr(TrainingSet, "demonstrations", spied)
    head = ["head", str(run), "--device", "cpu", "--frames", "100", "--steps", "20"]
    main(head)
    assert held_out.any() and read and not held_out[read].any()
    out, err = capsys.readouterr()
    assert str(run / TEMPORAL_HEAD) in out and "20/20 steps" in err and "ETA 0 s" in err
    first = load_file(run / TEMPORAL_HEAD)
    main(head)
    again = load_file(run / TEMPORAL_HEAD)
    assert all(torch.equal(again[name], first[name]) for name in first)
    with pytest.raises(SystemExit, match="--frames must be at least 2"):
        main([*head, "--frames", "1"])
    main(plan)
    assert '"actions"' in capsys.readouterr().out


def test_a_run_that_plans_by_time_is_trained_with_the_head_that_atlas_head_fits(
    dataset_path, task, tiny_config, tmp_path, monkeypatch
):
    monkeypatch.setattr(loop, "head_of", partial(loop.head_of, frames=100, steps=20))
    config = replace(tiny_config, plan=replace(tiny_config.plan, cost="temporal", execute=1))
    run = train(config, task, dataset_path, tmp_path / "run", method="atlas", recipe="demo", device="cpu")
    trained = load_file(run / TEMPORAL_HEAD)
    assert load_model(run).temporal_head is not None
    (run / TEMPORAL_HEAD).unlink()
    main(["head", str(run), "--device", "cpu", "--frames", "100", "--steps", "20"])
    again = load_file(run / TEMPORAL_HEAD)
    assert trained.keys() == again.keys() and all(torch.equal(again[name], trained[name]) for name in again)


def test_a_head_of_other_data_or_of_other_weights_is_refused(run_folder, tmp_path):
    from atlas_wm.data.collect import collect
    from atlas_wm.plan.planner import Planner
    from atlas_wm.tasks import get_task

    run = shutil.copytree(run_folder, tmp_path / "run")
    collect(get_task("tworoom"), tmp_path / "other.h5", 3, seed=9, pixels=False, workers=1)
    with pytest.raises(SystemExit, match="pass the --data it was trained on"):
        main(["head", str(run), "--device", "cpu", "--data", str(tmp_path / "other.h5")])
    model = load_model(run)
    model.temporal_head = TemporalHead.initial(model.bank.points, make_rng(0))
    save_model(model, run)
    assert load_model(run).temporal_head is not None
    weights = run / "weights"
    weights.mkdir(exist_ok=True)
    shutil.copy(run / "model.safetensors", weights / "step-1.safetensors")
    other = load_model(run, weights="step-1")
    assert other.temporal_head is None
    with pytest.raises(UserError, match="for its final weights"):
        Planner(other, replace(other.run.config.plan, cost="temporal"))
    model.temporal_head = None
    save_model(model, run)
    assert not (run / TEMPORAL_HEAD).exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t | {"mean": t["mean"][:3].contiguous()}, "does not fit the model"),
        (lambda t: {"mean": t["mean"]}, "does not fit the model"),
        (lambda t: t | {"scale": t["scale"] * torch.nan}, "not finite"),
        (lambda t: t | {"step": t["step"] * 0}, "no length"),
    ],
)
def test_files_that_do_not_fit_are_refused(run_folder, tmp_path, change, message):
    run = shutil.copytree(run_folder, tmp_path / "run")
    head = TemporalHead.initial(load_model(run).bank.points, make_rng(0))
    save_file(change(vars(head)), run / TEMPORAL_HEAD)
    with pytest.raises(UserError, match=rf"{TEMPORAL_HEAD} .*{message}.*`atlas head"):
        load_model(run)


def test_a_head_of_an_older_version_is_told_of_and_not_used(run_folder, tmp_path, caplog):
    run = shutil.copytree(run_folder, tmp_path / "run")
    head = vars(TemporalHead.initial(load_model(run).bank.points, make_rng(0)))
    save_file({name: tensor for name, tensor in head.items() if name != "step"}, run / TEMPORAL_HEAD)
    with caplog.at_level("WARNING", "atlas_wm"):
        assert load_model(run).temporal_head is None
    assert f"{TEMPORAL_HEAD} is of an older version" in caplog.text and "`atlas head" in caplog.text


def test_a_saved_head_is_the_head_bit_for_bit(run_folder, tmp_path):
    model = load_model(run_folder)
    model.temporal_head = TemporalHead.initial(model.bank.points, make_rng(1))
    save_model(model, tmp_path / "again")
    for name, tensor in vars(load_model(tmp_path / "again").temporal_head).items():
        assert torch.equal(tensor, getattr(model.temporal_head, name)) and tensor.dtype == torch.float32
