"""Training: from a dataset and a configuration to a run folder."""

import logging
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import Tensor, nn

from atlas_wm.config import RunConfig, RunInfo, TrainConfig
from atlas_wm.convert.dinov2 import load_dinov2
from atlas_wm.data.clips import ClipDataset
from atlas_wm.data.frame_cache import FrameCache, cache_on_device
from atlas_wm.data.loader import EpochBatches, make_loader
from atlas_wm.data.render_check import check_rendering
from atlas_wm.data.states import save_states
from atlas_wm.data.token_cache import TokenCache, token_bytes, worth_keeping, write_tokens
from atlas_wm.data.training_set import TrainingSet, open_training_set
from atlas_wm.errors import UserError
from atlas_wm.losses.objective import ClipLatents, Losses, objective
from atlas_wm.losses.objective import Progress as TermProgress
from atlas_wm.models.world_model import WorldModel
from atlas_wm.parallel.devices import pick_device
from atlas_wm.parallel.launch import processes
from atlas_wm.parallel.processes import (
    alone,
    from_main,
    is_main,
    rank,
    same_weights,
    shard,
    wait_for_all,
    world_size,
)
from atlas_wm.rng import TrainRng, make_rng
from atlas_wm.runs.card import write_card
from atlas_wm.runs.files import saving
from atlas_wm.runs.folder import CHECKPOINTS, NOT_FINITE, training_folder, write_info
from atlas_wm.runs.model import save_model
from atlas_wm.runs.versions import versions
from atlas_wm.tasks import Task, task_id
from atlas_wm.train.checkpointer import Checkpointer, bytes_needed, check_room, previous
from atlas_wm.train.metrics import MetricsLog
from atlas_wm.train.monitors import HEALTH, CollapseWatch, Recent, StopSignals, dead_loaders_named
from atlas_wm.train.schedule import warmup_cosine
from atlas_wm.train.step import make_step, precision_of, whole_batch

log = logging.getLogger(__name__)

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

    Interrupted, the state stays in ``out.partial``, and the same call goes on from there to the same weights.
    ``plain``: every step as it is written, also on a GPU. ``on_encoded(done, total)`` follows the frames that are
    read beforehand, by a frozen encoder or to be kept on a GPU. In several processes (torchrun, srun) the main one
    writes.
    """
    out = Path(out)
    with training_folder(out, overwrite) if is_main() else nullcontext(out) as mine:
        folder = from_main(mine)
        ready = open_training_set(data_path, task, config)
        check_rendering(ready.data)
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
        saved = previous(folder, info, overwrite) if is_main() else None
        if is_main():
            with saving(folder):
                write_info(folder, info, ready.normalizer)
                save_states(folder, ready.data, info)
                (folder / NOT_FINITE).unlink(missing_ok=True)
        saved = from_main(saved)
        torch.manual_seed(config.train.seed)
        model = WorldModel(config.model, task.action_size, ready.normalizer)
        model.run = info
        tokens: TokenCache | None = None
        kept: TokenCache | FrameCache | None = None
        if config.model.encoder.kind == "dinov2":
            load_dinov2(model.encoder, config.model.encoder.weights)
            written = saved.notes["tokens"] if saved else None
            kept = tokens = cache_tokens(model, ready, where, folder / "tokens.f16", on_encoded, written)
        elif where.type == "cuda":
            kept = cache_frames(ready, config.train, where, on_encoded)
        training, validation = (
            ClipDataset(ready.data, clips, ready.normalizer, config.model, kept)
            for clips in (ready.training, ready.validation)
        )
        steps = steps_of(config.train, len(training))
        if saved is not None:
            log.info("going on from step %d of %d in %s", saved.step, steps, folder)
        elif is_main():
            check_room(folder, bytes_needed(model, config.train, steps), "this run")
        start = saved.step if saved else 0
        with (
            StopSignals() as stop,
            MetricsLog(folder, metric_names(config), after=start) if is_main() else nullcontext() as metrics,
            dead_loaders_named(),
        ):
            write, flush = (metrics.write, metrics.flush) if metrics else (lambda step, row: None, lambda: None)
            agree = from_main if world_size() > 1 else None
            checkpointer = Checkpointer(
                *(folder, config.train, saved, stop, flush, rank(), agree),
                tokens=tokens is not None,
            )
            fit(
                *(model, training, validation, config, where, write, on_progress),
                plain=plain,
                checkpointer=checkpointer,
            )
        if is_main():
            model.build_bank(ready.sample_frames())
            with saving(folder):
                save_model(model, folder)
                write_card(folder)
            if tokens is not None:
                tokens.path.unlink()
    if is_main():
        shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)  # only now: until it has its name it can be resumed
    return out


def cache_tokens(
    model: WorldModel,
    ready: TrainingSet,
    device: torch.device,
    path: Path,
    on_encoded: Callable[[int, int], None],
    kept: bool | None = None,
) -> TokenCache | None:
    """The tokens of every frame in a file, where that is cheaper than to encode frames at every step.

    kept: what an interrupted run decided, whose file may still be there.
    """
    assert model.run is not None
    settings = model.run.config.train
    shape = (ready.info.rows, *model.config.latent_shape)
    frames = steps_of(settings, len(ready.training)) * settings.batch * model.config.clip_frames
    if kept is None:
        kept = settings.cache_tokens == "always" or (
            settings.cache_tokens == "auto" and from_main(is_main() and worth_keeping(shape, frames, path.parent))
        )
    if not kept:
        return None
    model.to(device)

    @torch.inference_mode()
    def encode(frames: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision_of(settings, device) == "bf16-mixed"):
            return model.encode(frames.to(device)).float()

    if is_main() and not (path.exists() and path.stat().st_size == token_bytes(shape)):
        write_tokens(ready.data, encode, shape, path, on_encoded)
    wait_for_all()
    if not path.exists():
        raise UserError(
            f"{path} is not on this machine: put --out on a disk that all machines share, "
            f"or use --train.cache-tokens never"
        )
    return TokenCache(path, shape)


def cache_frames(
    ready: TrainingSet, settings: TrainConfig, device: torch.device, on_read: Callable[[int, int], None]
) -> FrameCache | None:
    """Every frame on the device, where training would read most of them more than once."""
    needed = steps_of(settings, len(ready.training)) * settings.batch * ready.clip_frames
    always = settings.cache_frames == "always"
    if settings.cache_frames == "never" or (not always and needed < ready.info.rows):
        return None
    return cache_on_device(ready.data, device, settings.workers, whatever=always, on_progress=on_read)


def metric_names(config: RunConfig) -> list[str]:
    losses = ["total", *config.objective.weights]
    validated = [*losses, *(HEALTH if config.model.encoder.kind == "vit" else ())]
    return ["epoch", *losses, "lr", "grad_norm", "clips_per_second", *(f"val_{name}" for name in validated)]


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
    checkpointer: Checkpointer | None = None,
) -> None:
    """The loop itself. The model is trained in place and left in eval mode. ``plain``: no captured steps.
    ``checkpointer``: where to go on from, and how to save."""
    settings = config.train
    precision = precision_of(settings, device)
    mixed = precision == "bf16-mixed"
    fabric = Fabric(
        accelerator=device.type,
        devices=[device.index or 0] if device.type == "cuda" else 1,
        precision=precision,
        plugins=LightningEnvironment(),  # one process to Fabric, whatever it finds around it: see launch.py
    )
    done = checkpointer.step if checkpointer else 0
    batches = EpochBatches(len(training), settings.batch, steps_of(settings, len(training)), settings.seed, done)
    there = isinstance(training.kept, FrameCache)  # frames are on the device already
    workers = 0 if there else settings.workers
    loader = make_loader(training, batches, workers, pin=device.type == "cuda" and not there)
    wrapped = fabric.setup_module(model)
    same_weights(model)
    if rank():  # the main process goes on with its stream; in the others dropout takes one of their own
        torch.manual_seed(make_rng(settings.seed, TrainRng.DROPOUT, rank()).initial_seed())
    update = make_step(fabric, model, wrapped, config, len(batches), plain, done)
    factor = warmup_cosine(len(batches), settings.warmup)
    recent = Recent(
        list(config.objective.weights),
        training,
        batches,
        checkpointer.staging if checkpointer and is_main() else None,
    )
    collapse = CollapseWatch()
    if checkpointer:
        recent.resume(checkpointer.restore(model, update.optimizer), fabric.device)

    model.train()
    started = mark = time.perf_counter()
    reported = done
    for step, batch in enumerate(fabric.setup_dataloaders(loader), start=done + 1):
        if checkpointer and step == done + 1:
            checkpointer.restore_random(device)
        rate = settings.lr * factor(step - 1)
        recent.add(update(batch, make_rng(settings.seed, TrainRng.LOSS, step, device=device), rate))

        last, row = step == len(batches), dict[str, float]()
        if last or step % settings.log_every == 0:
            values, norm = recent.report(step)
            now = time.perf_counter()
            speed, mark, reported = settings.batch * (step - reported) / (now - mark), now, step
            row = {"epoch": step / batches.steps_per_epoch, **values, "lr": rate}
            row |= {"grad_norm": norm, "clips_per_second": speed}
            total = values.pop("total")
            left = (now - started) / (step - done) * (len(batches) - step)
            on_progress(Progress(step, len(batches), values, total, speed, left))
            if last or step % settings.validate_every < settings.log_every:
                used = model if last and mixed else wrapped  # in the end as it will be used, in float32
                measure_batchnorm(fabric, used, training, config)
                found = validate(fabric, used, validation, config, collapse, update.progress)
                row |= {f"val_{name}": value for name, value in found.items()}
                mark = time.perf_counter()
            write(step, row)
        if checkpointer:
            checkpointer.after(
                *(step, len(batches), model, update.optimizer),
                losses=partial(recent.read, step),
                validation=row.get("val_total"),
            )
    model.eval()


def steps_of(settings: TrainConfig, clips: int) -> int:
    return settings.steps or settings.epochs * (clips // settings.batch)


def mean_losses(some: list[Losses]) -> dict[str, float]:
    """Means over a list of losses, with one transfer from the device for each name."""
    means = {"total": torch.stack([losses.total for losses in some]).mean()}
    for name in some[0].terms:
        means[name] = torch.stack([losses.terms[name] for losses in some]).mean()
    return {name: float(value) for name, value in means.items()}


def _some_batches(dataset: ClipDataset, config: RunConfig, count: int) -> list[list[int]]:
    """The first ``count`` batches of a fixed shuffle, as clip numbers; fewer where the data ends."""
    order = np.random.default_rng([config.train.seed, TrainRng.VALIDATION_CLIPS]).permutation(len(dataset))
    parts = [order[i : i + config.train.batch].tolist() for i in range(0, len(order), config.train.batch)]
    return [part for part in parts[:count] if len(part) > 1]


def _latents(fabric: Fabric, model: nn.Module, dataset: ClipDataset, which: list[int]) -> ClipLatents:
    """What the model makes of a batch. Where some processes would have no clip of it, each looks at all of them."""
    with nullcontext() if len(which) >= world_size() else alone():
        batch = fabric.to_device(dataset.__getitems__(shard(which)))
        return whole_batch(model(batch.frames, batch.actions))


@torch.no_grad()
def validate(
    fabric: Fabric,
    model: nn.Module,
    dataset: ClipDataset,
    config: RunConfig,
    collapse: CollapseWatch,
    progress: TermProgress | None = None,
) -> dict[str, float]:
    """The losses on some fixed validation clips, in eval mode, and how much of the latent space they fill."""
    model.eval()
    generator = make_rng(config.train.seed, TrainRng.VALIDATION_LOSS, device=fabric.device)
    losses, latents = [], []
    for which in _some_batches(dataset, config, VALIDATION_BATCHES):
        clips = _latents(fabric, model, dataset, which)
        losses.append(objective(clips, config.objective, generator, progress))
        if config.model.encoder.kind == "vit":  # a frozen encoder cannot collapse
            latents.append(clips.z)
    model.train()
    return (mean_losses(losses) if losses else {}) | (collapse.look(latents) if latents else {})


@torch.no_grad()
def measure_batchnorm(fabric: Fabric, model: nn.Module, dataset: ClipDataset, config: RunConfig) -> None:
    """Replace BatchNorm's running averages, which trail the weights, by plain means over fresh batches.

    Frames of one task look much alike: what they have in common is many times what tells them apart, so that a
    slight change of the weights moves all latents by the same large step.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]
    if not norms or not config.train.batchnorm_batches:
        return
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
