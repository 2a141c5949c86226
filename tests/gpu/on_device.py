"""Models, batches and training steps on the device, for the tests of this folder."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atlas_wm.config import RunConfig
from atlas_wm.data.clips import Batch
from atlas_wm.models.world_model import WorldModel
from atlas_wm.recipes import get_recipe
from atlas_wm.rng import make_rng
from atlas_wm.train.step import PlainStep, Step, Update, make_step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # a CPU only while tests are collected
BF16, FLOAT32 = "bf16-mixed", "32-true"


def config_of(
    precision: str, *, recipe: str = "demo", method: str = "atlas", dropout: float = 0.0, **settings: Any
) -> RunConfig:
    config = get_recipe(recipe)(method)
    predictor = replace(config.model.predictor, dropout=dropout)
    train = replace(config.train, precision=precision, **{"compile": "never", **settings})
    return replace(config, model=replace(config.model, predictor=predictor), train=train)


def with_term(config: RunConfig, name: str) -> RunConfig:
    return replace(config, objective=replace(config.objective, extra={name: 0.1}))


def random_model(config: RunConfig) -> WorldModel:
    """The same weights every time; the modulation too, 0 at the start, so that actions and dropout matter."""
    torch.manual_seed(0)
    model = WorldModel(config.model, 2)
    model.prepare_training(config.objective)
    for block in model.predictor.blocks:
        torch.nn.init.normal_(block.modulation[-1].weight, std=0.1)
        torch.nn.init.normal_(block.modulation[-1].bias, std=0.3)
    return model.to(DEVICE)


def images(count: int, size: int, seed: int = 0) -> Tensor:
    """(count, 3, size, size) uint8 on the device: a few large fields of colour each."""
    fields = torch.randint(0, 256, (count, 3, 4, 4), generator=make_rng(9, seed)).float()
    return torch.nn.functional.interpolate(fields, size=size).to(torch.uint8).to(DEVICE)


def clips(config: RunConfig, count: int, batch: int = 16) -> list[Batch]:
    model, found = config.model, []
    for i in range(count):
        frames = images(batch * model.clip_frames, model.encoder.image_size, i).unflatten(0, (batch, -1))
        actions = torch.randn(batch, model.clip_frames - 1, 2 * model.frameskip, generator=make_rng(8, i))
        found.append(Batch(frames, actions.to(DEVICE)))
    return found


def step_of(model: WorldModel, config: RunConfig, *, plain: bool = False, steps: int = 1000) -> Step:
    """As training makes it."""
    model.train()
    return make_step(model.to(DEVICE), config, DEVICE, steps, plain)


class StepResult(NamedTuple):
    update: Update
    gradients: dict[str, Tensor]  # that the update used, so clipped

    @property
    def numbers(self) -> list[float]:
        losses = self.update.losses
        return [float(losses.total), *map(float, losses.terms.values()), float(self.update.norm)]


def updates(step: Step, model: WorldModel, batches: list[Batch], rate: float, same_directions: bool = False):
    """The update with each batch."""
    for i, batch in enumerate(batches):
        if isinstance(step, PlainStep):  # which forgets them after the update; the other does before it
            model.zero_grad()
            step.optimizer.zero_grad = lambda: None
        update = step(batch, make_rng(3, 0 if same_directions else i, device=DEVICE), rate)
        yield StepResult(
            update, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        )


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of all gradients together, by their norm."""
    assert found.keys() == expected.keys()
    gap, whole = (
        torch.cat([t.flatten().double() for t in some])
        for some in ([found[n] - expected[n] for n in expected], expected.values())
    )
    return float(gap.norm() / whole.norm())
