"""Training that cannot fit the memory of a machine without a GPU is refused before frames are read."""

from dataclasses import replace

import pytest
import torch
from short_runs import short_config

from atlas_wm.config import RunConfig
from atlas_wm.data.clips import Batch
from atlas_wm.errors import UserError
from atlas_wm.models.world_model import WorldModel
from atlas_wm.recipes import recipe_config
from atlas_wm.rng import make_rng
from atlas_wm.tasks import get_task
from atlas_wm.train import start
from atlas_wm.train.loop import train
from atlas_wm.train.start import check_memory, step_bytes
from atlas_wm.train.step import clip_latents

CPU, GB = torch.device("cpu"), 10**9


def of_recipe(recipe: str, batch: int | None = None) -> RunConfig:
    config = recipe_config(recipe, "atlas", "tworoom")
    return replace(config, train=replace(config.train, batch=batch or config.train.batch))


def test_a_step_that_does_not_fit_is_refused_with_the_remedies(tmp_path, monkeypatch, dataset_path):
    monkeypatch.setattr(start, "free_memory", lambda device: 14 * GB)
    refused = (
        r"128 clips needs about 20\.6 GB of memory, of which 14\.0 are free: use --recipe demo, a smaller --tr"
    )
    config = of_recipe("paper")
    task, out = get_task("tworoom"), tmp_path / "run"
    with pytest.raises(UserError, match=refused):
        train(config, task, dataset_path, out, method="atlas", recipe="paper", device="cpu")
    assert not out.exists()
    check_memory(of_recipe("paper"), torch.device("cuda"))


def test_a_step_that_may_not_fit_is_warned_of(monkeypatch, caplog):
    monkeypatch.setattr(start, "free_memory", lambda device: 25 * GB)
    check_memory(of_recipe("paper"), CPU)
    assert "about 20.6 GB of memory, of which 25.0 are free" in caplog.text
    caplog.clear()
    monkeypatch.setattr(start, "free_memory", lambda device: 40 * GB)
    check_memory(of_recipe("paper"), CPU)
    assert not caplog.text


def test_runs_that_fit_are_not_refused(monkeypatch):
    monkeypatch.setattr(start, "free_memory", lambda device: 2 * GB)
    for config in (of_recipe("demo"), of_recipe("paper", batch=4), short_config()):
        check_memory(config, CPU)
    frozen = recipe_config("paper", "dino-wm", "tworoom")
    check_memory(frozen, CPU)  # its tokens are computed without a backward pass


@pytest.mark.parametrize("recipe", ["demo", "small"])
def test_a_step_stores_at_least_what_is_estimated_and_at_most_half_as_much_again(recipe):
    """If it were less, a run that fits would be refused. What it needs for a moment comes on top."""
    config, stored = of_recipe(recipe, batch=4), {}
    model = WorldModel(config.model, 2).train()
    model.prepare_training(config.objective)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def count(tensor):
        storage = tensor.untyped_storage()
        stored[storage.data_ptr()] = 0 if storage.data_ptr() in weights else storage.nbytes()
        return tensor

    size, frames = config.model.encoder.image_size, config.model.clip_frames
    batch = Batch(
        torch.randint(0, 255, (4, frames, 3, size, size), dtype=torch.uint8, generator=make_rng(0)),
        torch.zeros(4, frames - 1, 10),
    )
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        kept = clip_latents(model, batch, mixed=False)
    assert kept.z.requires_grad
    assert 0.99 < sum(stored.values()) / step_bytes(config, CPU) < 1.5
