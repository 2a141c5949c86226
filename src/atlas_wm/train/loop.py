"""Training: from a dataset and a configuration to a run folder."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from lightning.fabric import Fabric
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from atlas_wm.config import RunConfig, TrainConfig
from atlas_wm.data.clips import Batch, ClipDataset, clip_index, fit_normalizer, split_clips
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.data.loader import EpochBatches, make_loader
from atlas_wm.device import pick_device
from atlas_wm.errors import UserError
from atlas_wm.losses.objective import Losses, objective
from atlas_wm.models.world_model import WorldModel
from atlas_wm.run_folder import WEIGHTS, DataInfo, RunInfo, new_run_folder, write_info
from atlas_wm.streams import stream
from atlas_wm.tasks import Task, task_id
from atlas_wm.train.metrics import MetricsLog
from atlas_wm.train.schedule import warmup_cosine
from atlas_wm.versions import versions

VALIDATION_BATCHES = 4


class Progress(NamedTuple):
    """What the user sees while it trains."""

    step: int
    steps: int
    terms: dict[str, float]  # unweighted, means since the last report
    total: float
    clips_per_second: float
    seconds_left: float


def train(
    config: RunConfig,
    task: Task,
    data_path: str | Path,
    out: str | Path,
    *,
    method: str,
    recipe: str,
    device: str = "auto",
    overwrite: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Path:
    """Train on the dataset and leave a complete run folder at ``out``."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("training runs in one process so far: start `atlas train` without torchrun")
    out = Path(out)
    with new_run_folder(out, overwrite) as folder:
        data = EpisodeData(data_path, task, config.model.encoder.image_size, config.model.frameskip)
        clips = clip_index(data.lengths, config.model.clip_rows, data.path)
        training, validation = split_clips(clips, len(data.lengths), config.train)
        normalizer = fit_normalizer(data, training, config.model)
        where = pick_device(device)
        info = RunInfo(
            task=task_id(task),
            method=method,
            recipe=recipe,
            action_size=task.action_size,
            config=config,
            data=DataInfo(
                path=str(data_path),
                hash=data.content_hash(),
                episodes=len(data.lengths),
                rows=len(data.actions),
                training_clips=len(training),
                validation_clips=len(validation),
            ),
            device=torch.cuda.get_device_name(where) if where.type == "cuda" else where.type,
            versions=versions(),
        )
        write_info(folder, info, normalizer)
        torch.manual_seed(config.train.seed)
        model = WorldModel(config.model, task.action_size, normalizer)
        with MetricsLog(folder, metric_names(config)) as log:
            fit(
                model,
                ClipDataset(data, training, normalizer, config.model),
                ClipDataset(data, validation, normalizer, config.model),
                config,
                where,
                log.write,
                on_progress,
            )
        save_file({name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}, folder / WEIGHTS)
    return out


def metric_names(config: RunConfig) -> list[str]:
    losses = ["total", *config.objective.weights]
    return ["epoch", *losses, "lr", "grad_norm", "clips_per_second", *(f"val_{name}" for name in losses)]


def fit(
    model: WorldModel,
    training: ClipDataset,
    validation: ClipDataset,
    config: RunConfig,
    device: torch.device,
    write: Callable[[int, dict[str, float]], None],
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> None:
    """The loop itself. The model is trained in place and left in eval mode."""
    settings = config.train
    precision = settings.precision
    if precision == "auto":
        precision = "bf16-mixed" if device.type == "cuda" else "32-true"
    fabric = Fabric(
        accelerator=device.type,
        devices=[device.index or 0] if device.type == "cuda" else 1,
        precision=precision,
    )
    batches = EpochBatches(len(training), settings.batch, steps_of(settings, len(training)), settings.seed)
    loader = make_loader(training, batches, settings.workers, pin=device.type == "cuda")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=settings.lr, weight_decay=settings.weight_decay)
    wrapped, optimizer = fabric.setup(model, optimizer)
    schedule = LambdaLR(optimizer, warmup_cosine(len(batches), settings.warmup))

    model.train()
    window: list[Losses] = []
    started = mark = time.perf_counter()
    for step, batch in enumerate(fabric.setup_dataloaders(loader), start=1):
        directions = stream(settings.seed, 2, step, device=device)
        losses, norm = train_step(fabric, wrapped, optimizer, batch, config, directions)
        window.append(losses)
        rate = float(schedule.get_last_lr()[0])
        schedule.step()

        last = step == len(batches)
        if step % settings.log_every and not last:
            continue
        values = mean_losses(window)
        now = time.perf_counter()
        speed, mark = settings.batch * len(window) / (now - mark), now
        window = []
        row: dict[str, float] = {"epoch": step / batches.steps_per_epoch, **values, "lr": rate}
        row["grad_norm"] = float(norm)
        row["clips_per_second"] = speed
        total = values.pop("total")
        left = (now - started) / step * (len(batches) - step)
        on_progress(Progress(step, len(batches), values, total, speed, left))
        if last or step % settings.validate_every < settings.log_every:
            if settings.batchnorm_batches:
                measure_batchnorm(fabric, wrapped, training, config)
            row |= {f"val_{name}": value for name, value in validate(fabric, wrapped, validation, config).items()}
            mark = time.perf_counter()
        write(step, row)
    model.eval()


def train_step(
    fabric: Fabric,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    config: RunConfig,
    directions: torch.Generator,
) -> tuple[Losses, Tensor]:
    """One update. Returns the losses, detached, and the gradient norm before clipping."""
    losses = objective(model(batch.frames, batch.actions), config.objective, directions)
    fabric.backward(losses.total)
    norm = fabric.clip_gradients(model, optimizer, max_norm=config.train.clip)
    assert norm is not None  # it is for max_norm
    optimizer.step()
    optimizer.zero_grad()
    return Losses(losses.total.detach(), {name: t.detach() for name, t in losses.terms.items()}), norm


def steps_of(settings: TrainConfig, clips: int) -> int:
    return settings.steps or settings.epochs * (clips // settings.batch)


def mean_losses(window: list[Losses]) -> dict[str, float]:
    """Means over a list of losses, with one transfer from the device for each name."""
    means = {"total": torch.stack([losses.total for losses in window]).mean()}
    for name in window[0].terms:
        means[name] = torch.stack([losses.terms[name] for losses in window]).mean()
    return {name: float(value) for name, value in means.items()}


def _batches(fabric: Fabric, dataset: ClipDataset, config: RunConfig, count: int) -> list[Batch]:
    """The first ``count`` batches of a fixed shuffle, fewer where the data ends."""
    order = np.random.default_rng([config.train.seed, 3]).permutation(len(dataset))
    parts = [order[i : i + config.train.batch].tolist() for i in range(0, len(order), config.train.batch)]
    return [fabric.to_device(dataset.__getitems__(part)) for part in parts[:count] if len(part) > 1]


@torch.no_grad()
def validate(fabric: Fabric, model: nn.Module, dataset: ClipDataset, config: RunConfig) -> dict[str, float]:
    """The losses on some fixed validation clips, in eval mode."""
    model.eval()
    generator = stream(config.train.seed, 4, device=fabric.device)
    losses = [
        objective(model(batch.frames, batch.actions), config.objective, generator)
        for batch in _batches(fabric, dataset, config, VALIDATION_BATCHES)
    ]
    model.train()
    return mean_losses(losses) if losses else {}


@torch.no_grad()
def measure_batchnorm(fabric: Fabric, model: nn.Module, dataset: ClipDataset, config: RunConfig) -> None:
    """Replace BatchNorm's running averages, which trail the weights, by plain means over fresh batches."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]
    momenta = [norm.momentum for norm in norms]
    model.eval()  # no dropout: the statistics of the model as it will be used
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a cumulative average
        norm.train()
    for batch in _batches(fabric, dataset, config, config.train.batchnorm_batches):
        model(batch.frames, batch.actions)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    model.train()
