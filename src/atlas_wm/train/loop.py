"""Training: from a dataset and a configuration to a run folder."""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import Tensor, nn

from atlas_wm.config import RunConfig, TrainConfig
from atlas_wm.data.clips import ClipDataset
from atlas_wm.data.loader import EpochBatches, make_loader
from atlas_wm.data.tokens import TokenFile, worth_keeping, write_tokens
from atlas_wm.data.training_set import TrainingSet, open_training_set
from atlas_wm.device import pick_device
from atlas_wm.distributed import alone, from_main, is_main, rank, same_weights, shard, wait_for_all, world_size
from atlas_wm.errors import UserError
from atlas_wm.launch import processes
from atlas_wm.losses.objective import ClipLatents, Losses, objective
from atlas_wm.models.pretrained import load_dinov2
from atlas_wm.models.world_model import WorldModel
from atlas_wm.run_folder import RunInfo, new_run_folder, write_info
from atlas_wm.streams import stream
from atlas_wm.tasks import Task, task_id
from atlas_wm.train.metrics import MetricsLog
from atlas_wm.train.schedule import warmup_cosine
from atlas_wm.train.step import make_step, precision_of, whole_batch
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


@processes()
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
    plain: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_encoded: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Train on the dataset and leave a complete run folder at ``out``.

    ``plain``: every step as it is written, also on a GPU. ``on_encoded(done, total)`` follows the frames that a
    frozen encoder reads beforehand. In several processes (torchrun, srun) the main one writes.
    """
    out = Path(out)
    with new_run_folder(out, overwrite) if is_main() else nullcontext(out) as mine:
        folder = from_main(mine)
        ready = open_training_set(data_path, task, config)
        where = pick_device(device)
        info = RunInfo(
            task=task_id(task),
            method=method,
            recipe=recipe,
            action_size=task.action_size,
            config=config,
            data=ready.info,
            device=torch.cuda.get_device_name(where) if where.type == "cuda" else where.type,
            versions=versions(),
        )
        if is_main():
            write_info(folder, info, ready.normalizer)
        torch.manual_seed(config.train.seed)
        model = WorldModel(config.model, task.action_size, ready.normalizer)
        model.run = info
        tokens = None
        if config.model.encoder.kind == "dinov2":
            load_dinov2(model.encoder, config.model.encoder.weights)
            tokens = keep_tokens(model, ready, where, folder / "tokens.f16", on_encoded)
        training, validation = (
            ClipDataset(ready.data, clips, ready.normalizer, config.model, tokens)
            for clips in (ready.training, ready.validation)
        )
        with MetricsLog(folder, metric_names(config)) if is_main() else nullcontext() as log:
            write = log.write if log else lambda step, row: None
            fit(model, training, validation, config, where, write, on_progress, plain=plain)
        if is_main():
            if tokens is not None:
                tokens.path.unlink()
            model.remember(ready.some_frames())
            model.save_pretrained(folder)
    return out


def keep_tokens(
    model: WorldModel,
    ready: TrainingSet,
    device: torch.device,
    path: Path,
    on_encoded: Callable[[int, int], None],
) -> TokenFile | None:
    """The tokens of every frame in a file, where that is cheaper than to encode frames at every step."""
    assert model.run is not None
    settings = model.run.config.train
    shape = (ready.info.rows, *model.config.latent_shape)
    frames = steps_of(settings, len(ready.training)) * settings.batch * model.config.clip_frames
    if settings.keep_tokens == "never" or (
        settings.keep_tokens == "auto" and not from_main(is_main() and worth_keeping(shape, frames, path.parent))
    ):
        return None
    model.to(device)

    @torch.inference_mode()
    def encode(frames: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision_of(settings, device) == "bf16-mixed"):
            return model.encode(frames.to(device)).float()

    if is_main():
        write_tokens(ready.data, encode, shape, path, on_encoded)
    wait_for_all()
    if not path.exists():
        raise UserError(
            f"{path} is not on this machine: put --out on a disk that all machines share, "
            f"or use --train.keep-tokens never"
        )
    return TokenFile(path, shape)


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
    *,
    plain: bool = False,
) -> None:
    """The loop itself. The model is trained in place and left in eval mode. ``plain``: no captured steps."""
    settings = config.train
    fabric = Fabric(
        accelerator=device.type,
        devices=[device.index or 0] if device.type == "cuda" else 1,
        precision=precision_of(settings, device),
        plugins=LightningEnvironment(),  # one process to Fabric, whatever it finds around it: see launch.py
    )
    batches = EpochBatches(len(training), settings.batch, steps_of(settings, len(training)), settings.seed)
    loader = make_loader(training, batches, settings.workers, pin=device.type == "cuda")
    wrapped = fabric.setup_module(model)
    same_weights(model)
    if rank():  # the main process goes on with its stream; in the others dropout takes one of their own
        torch.manual_seed(stream(settings.seed, 5, rank()).initial_seed())
    update = make_step(fabric, model, wrapped, config, len(batches), plain)
    factor = warmup_cosine(len(batches), settings.warmup)

    model.train()
    window: list[Losses] = []
    started = mark = time.perf_counter()
    for step, batch in enumerate(fabric.setup_dataloaders(loader), start=1):
        rate = settings.lr * factor(step - 1)
        losses, norm = update(batch, stream(settings.seed, 2, step, device=device), rate)
        window.append(losses)

        last = step == len(batches)
        if step % settings.log_every and not last:
            continue
        values = mean_losses(window)
        now = time.perf_counter()
        speed, mark = settings.batch * len(window) / (now - mark), now
        window = []
        row: dict[str, float] = {"epoch": step / batches.steps_per_epoch, **values, "lr": rate}
        row["grad_norm"] = float(norm)
        if not math.isfinite(row["grad_norm"]):
            raise UserError(f"the gradient is not finite at step {step}: lower --train.lr")
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


def steps_of(settings: TrainConfig, clips: int) -> int:
    return settings.steps or settings.epochs * (clips // settings.batch)


def mean_losses(window: list[Losses]) -> dict[str, float]:
    """Means over a list of losses, with one transfer from the device for each name."""
    means = {"total": torch.stack([losses.total for losses in window]).mean()}
    for name in window[0].terms:
        means[name] = torch.stack([losses.terms[name] for losses in window]).mean()
    return {name: float(value) for name, value in means.items()}


def _some_batches(dataset: ClipDataset, config: RunConfig, count: int) -> list[list[int]]:
    """The first ``count`` batches of a fixed shuffle, as clip numbers; fewer where the data ends."""
    order = np.random.default_rng([config.train.seed, 3]).permutation(len(dataset))
    parts = [order[i : i + config.train.batch].tolist() for i in range(0, len(order), config.train.batch)]
    return [part for part in parts[:count] if len(part) > 1]


def _latents(fabric: Fabric, model: nn.Module, dataset: ClipDataset, which: list[int]) -> ClipLatents:
    """What the model makes of a batch. Where some processes would have no clip of it, each looks at all of them."""
    with nullcontext() if len(which) >= world_size() else alone():
        batch = fabric.to_device(dataset.__getitems__(shard(which)))
        return whole_batch(model(batch.frames, batch.actions))


@torch.no_grad()
def validate(fabric: Fabric, model: nn.Module, dataset: ClipDataset, config: RunConfig) -> dict[str, float]:
    """The losses on some fixed validation clips, in eval mode."""
    model.eval()
    generator = stream(config.train.seed, 4, device=fabric.device)
    losses = [
        objective(_latents(fabric, model, dataset, which), config.objective, generator)
        for which in _some_batches(dataset, config, VALIDATION_BATCHES)
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
    for which in _some_batches(dataset, config, config.train.batchnorm_batches):
        _latents(fabric, model, dataset, which)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    model.train()
