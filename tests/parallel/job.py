"""What one process of a job computes, alone or with others. ``python job.py DATASET FOLDER``: with 1, 2 and 4.

A part of the batch for each process; what comes out is put together again, so that results can be compared between
numbers of processes. There is no dropout: its masks differ between them. Models are trained by SGD: Adam takes
rounding for a direction wherever the gradient is nearly 0, and runs drift apart.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from forked import fork
from torch import Tensor, nn

from atlas_wm.config import BUILT_IN_TERMS, ModelConfig, ObjectiveConfig, RunConfig, TrainConfig
from atlas_wm.data.clips import Batch
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.data.stream import HELD_OUT
from atlas_wm.data.training_set import open_training_set
from atlas_wm.losses.objective import ClipLatents, objective
from atlas_wm.models.layers import BatchNorm
from atlas_wm.models.world_model import WorldModel
from atlas_wm.parallel import gradients as gradients_module
from atlas_wm.parallel.gradients import GradientSum
from atlas_wm.parallel.launch import processes
from atlas_wm.parallel.processes import from_all, gather_rows, is_main, shard
from atlas_wm.recipes import demo
from atlas_wm.rng import make_rng
from atlas_wm.tasks import get_task
from atlas_wm.train import step as step_module
from atlas_wm.train.loop import fit
from atlas_wm.train.monitors import CollapseMonitor
from atlas_wm.train.step import PlainStep, whole_batch
from atlas_wm.train.validation import measure_batchnorm, validate

CLIPS = 7  # divisible neither by 2 nor by 4
METHODS = ("atlas", "lewm", "pldm", "fast-wm", "own", "ema")


def own_term(clips: ClipLatents) -> Tensor:
    """No mean of anything over clips: the largest distance of two latents."""
    return torch.cdist(clips.z.flatten(0, 1), clips.z.flatten(0, 1)).max() + clips.anchor.std()


class OwnModule(nn.Module):
    """A term with parameters and BatchNorm: every process sees the whole batch."""

    def __init__(self, config: ModelConfig, action_size: int):
        super().__init__()
        self.norm = nn.BatchNorm1d(config.latent)
        self.head = nn.Linear(config.latent, config.frameskip * action_size)

    def forward(self, clips: ClipLatents) -> Tensor:
        guess = self.head(self.norm(clips.z[:, 1:].flatten(0, 1))).view_as(clips.actions)
        return (guess - clips.actions).square().mean()


def draw(*shape: int, key: int = 0) -> Tensor:
    return torch.randn(*shape, generator=make_rng(7, key))


def mine(x: Tensor) -> Tensor:
    """This process's rows, as the start of a graph."""
    return x[torch.tensor(shard(list(range(len(x)))), dtype=torch.int64)].clone()


def whole(x: Tensor | None) -> Tensor:
    """The rows of all processes."""
    (gathered,) = gather_rows([x])
    assert gathered is not None
    return gathered


def terms() -> dict[str, Any]:
    """Each loss term with its gradient by latents, anchors, predictions and inverse predictions."""
    shapes = ((CLIPS, 4, 16), (CLIPS, 4, 12), (CLIPS, 3, 16), (CLIPS, 3, 10), (CLIPS, 3, 10))
    found: dict[str, Any] = {}
    nothing = ObjectiveConfig(prediction=0, extra={"job:own_term": 1.0})
    for name in (*BUILT_IN_TERMS, "own"):
        parts = [mine(draw(*shape, key=i)).requires_grad_() for i, shape in enumerate(shapes)]
        config = nothing if name == "own" else replace(nothing, extra={}, **{name: 1.0})
        losses = objective(whole_batch(ClipLatents(*parts)), config, make_rng(1))
        losses.total.backward()
        grads = [whole(torch.zeros_like(p) if p.grad is None else p.grad) for p in parts]
        found[name] = [losses.total.detach(), *grads]
    return found


def batchnorm() -> dict[str, Any]:
    """Two batches forward and back, once with the usual momentum and once with a cumulative average."""
    found: dict[str, Any] = {}
    for momentum in (0.1, None):
        norm = BatchNorm(5, momentum=momentum)
        nn.init.normal_(norm.weight, generator=make_rng(2))
        gradients = GradientSum(norm.parameters())
        for key in (3, 4):
            x = mine(2 + 3 * draw(CLIPS, 5, key=key)).requires_grad_()
            y = norm(x)
            gradients.backward((y * mine(draw(CLIPS, 5, key=key + 10))).sum())
            found[f"{momentum} {key}"] = [whole(y.detach()), whole(x.grad), norm.weight.grad.clone()]
            norm.zero_grad()
        found[f"{momentum}"] = [t.clone() for t in norm.state_dict().values()]
    return found


def config_of(method: str, **settings: Any) -> RunConfig:
    config = demo("atlas" if method in ("own", "ema") else method)
    model = replace(config.model, predictor=replace(config.model.predictor, dropout=0.0))
    objective = config.objective
    if method == "own":
        objective = replace(objective, extra={"job:OwnModule": 1.0})
    if method == "ema":
        objective = replace(objective, target="ema", ema_decay=0.5)
    if method == "pldm":
        model = replace(model, inverse_hidden=16)
        objective = replace(objective, inverse=1.0, cov_t=0.3)
    return replace(config, model=model, objective=objective, train=replace(config.train, **settings))


def steps() -> dict[str, Any]:
    """One batch through the whole step: losses, the norm before clipping and the gradient that the update used."""
    found: dict[str, Any] = {}
    for method in METHODS:
        config = config_of(method, clip=0.01, batch=CLIPS)
        torch.manual_seed(0)
        model = WorldModel(config.model, 2).train()
        model.prepare_training(config.objective)
        step = PlainStep(model, config, torch.device("cpu"))
        used: dict[str, Tensor] = {}
        step.optimizer.zero_grad = lambda model=model, used=used: used.update(  # instead of forgetting them
            {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        )
        frames = torch.randint(0, 255, (CLIPS, 4, 3, 32, 32), dtype=torch.uint8, generator=make_rng(5))
        update = step(Batch(mine(frames), mine(draw(CLIPS, 3, 10))), make_rng(3), 1e-3)
        found[method] = {"total": update.losses.total, **update.losses.terms, "norm": update.norm, **used}
        if model.target is not None:
            found[method] |= {f"target {name}": p.clone() for name, p in model.target.named_parameters()}
    return found


def training(path: str) -> dict[str, Any]:
    """Eight steps on real data, with validation and measured statistics; then on three clips only."""
    config = config_of("atlas", steps=8, lr=0.01, batch=15, log_every=2, validate_every=4, batchnorm_batches=3)
    training_set = open_training_set(path, get_task("tworoom"), config)
    torch.manual_seed(0)
    model = WorldModel(config.model, 2, training_set.normalizer)
    rows: list[dict[str, float]] = []
    cpu = torch.device("cpu")
    fit(model, training_set, cpu, lambda step, row: rows.append(row))
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    training_set.validation = training_set.validation.take(torch.arange(3).numpy())
    before, after = (training_set.batches(7, cpu) for _ in range(2))
    for stream in (before, after):
        next(stream)  # of the last step
    on_few = validate(model, before.samples(HELD_OUT), config, CollapseMonitor())
    measure_batchnorm(model, after.samples(HELD_OUT))
    statistics = {name: t for name, t in model.state_dict().items() if "running" in name}
    for row in rows:
        del row["clips_per_second"]
    return {"rows": rows, "weights": weights, "few": on_few, "statistics": statistics}


def sgd(model: nn.Module, settings: TrainConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=settings.lr)


def measure(path: str, file: Path) -> None:
    """What each process found, by rank."""
    with processes():
        gradients_module.MESSAGE_BYTES = 40_000  # several messages for each step
        found = {"terms": terms(), "batchnorm": batchnorm()}
        step_module.adamw = sgd
        found |= {"steps": steps(), "training": training(path)}
        results = from_all(found)
        if is_main():
            torch.save(results, file)


if __name__ == "__main__":
    torch.set_num_threads(1)
    EpisodeData(sys.argv[1], get_task("tworoom"), 32, 5)  # imports what it needs, before the others are forked
    for size in (1, 2, 4):
        if any(fork(size, lambda size=size: measure(sys.argv[1], Path(sys.argv[2], f"{size}.pt")))):
            sys.exit(f"{size} processes failed")
