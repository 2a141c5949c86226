"""Training: from a dataset and a configuration to a run folder."""

import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from atlas_wm.config import RunConfig
from atlas_wm.data.render_check import check_rendering
from atlas_wm.data.stream import BATCHNORM, HELD_OUT
from atlas_wm.data.training_set import TrainingSet, open_training_set
from atlas_wm.models.image_bank import ImageBank
from atlas_wm.models.world_model import WorldModel
from atlas_wm.parallel.devices import pick_device
from atlas_wm.parallel.launch import processes
from atlas_wm.parallel.processes import from_main, is_main, rank, same_weights, world_size
from atlas_wm.rng import TrainRng, make_rng
from atlas_wm.runs.card import write_card
from atlas_wm.runs.files import saving
from atlas_wm.runs.folder import CHECKPOINTS
from atlas_wm.runs.model import save_model
from atlas_wm.tasks import Task
from atlas_wm.train.checkpointer import Checkpointer
from atlas_wm.train.metrics import MetricsLog, NoMetrics, OnMetrics
from atlas_wm.train.monitors import HEALTH, CollapseMonitor, LossBuffer, StopSignals, name_dead_loaders
from atlas_wm.train.schedule import warmup_cosine
from atlas_wm.train.score import PlanningScore, SaturationMonitor
from atlas_wm.train.start import (
    check_disk,
    check_memory,
    make_model,
    run_info,
    shared_folder,
    start_or_resume,
    token_encoder,
)
from atlas_wm.train.step import is_mixed, make_step
from atlas_wm.train.temporal_head import head_of
from atlas_wm.train.validation import StateProbe, measure_batchnorm, validate


class Progress(NamedTuple):
    """What the user sees during training."""

    step: int
    steps: int
    terms: dict[str, float]  # unweighted, means since the last report
    total: float
    clips_per_second: float
    seconds_left: float
    score: float | None = None  # planning score of the last validation


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
    init: str | Path | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_encoded: Callable[[int, int], None] = lambda done, total: None,
    on_metrics: OnMetrics = lambda step, row: None,
    on_head: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Train on the dataset and write a complete run folder to ``out``.

    An interrupted run leaves its state in ``out.partial``; the same call resumes it and reaches the same weights.
    ``init``: a run folder or hub id to load the first weights from. Tensors of another shape, such as the action
    layers of another task, keep their random start. ``plain``: no captured graphs, also on a GPU.

    ``on_encoded(done, total)`` counts the frames that are read into a cache. ``on_metrics(step, row)`` gets every
    row of metrics.csv; if it raises, training logs a warning and goes on. ``on_head(done, total)`` counts the steps
    that fit the temporal head, where the run plans with it. Of several processes (torchrun, srun) the main one
    writes, and calls ``on_metrics`` and ``on_head``.
    """
    out, where = Path(out), pick_device(device)
    with shared_folder(out, overwrite) as folder:
        training_set = open_training_set(data_path, task, config)
        check_memory(config, where)
        check_rendering(training_set.data)
        each = [StateProbe(training_set) if config.train.probe else None, PlanningScore.of(training_set)]
        probes = [probe for probe in each if probe is not None]
        info = run_info(config, task, training_set, where, method, recipe, init)
        saved = start_or_resume(folder, info, training_set, overwrite)
        model = make_model(info, training_set, resumed=saved is not None)
        encode, tokens = token_encoder(model, config, where), saved.notes["tokens"] if saved else None
        with name_dead_loaders():
            training_set.build_cache(where, folder, encode=encode, tokens=tokens, on_read=on_encoded)
        if saved is None:
            check_disk(folder, model, training_set)
        first = saved.step if saved else 0
        log = MetricsLog(folder, metric_names(config, probes), first, on_metrics) if is_main() else NoMetrics()
        with StopSignals() as stop, log as metrics, name_dead_loaders():
            agree = from_main if world_size() > 1 else None
            notes = {"tokens": training_set.caches_tokens}
            saver = Checkpointer(folder, config.train, saved, stop, metrics.flush, rank(), agree, **notes)
            fit(
                model,
                training_set,
                where,
                metrics.write,
                on_progress,
                plain=plain,
                checkpointer=saver,
                probes=probes,
            )
        if is_main():
            finish(model, training_set, folder, on_head)
    if is_main():
        shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)  # only now: until the rename, the run can be resumed
    return out


def finish(
    model: WorldModel,
    training_set: TrainingSet,
    folder: Path,
    on_head: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Complete the run folder: latent bank, demonstrations, temporal head (if the run plans with it), final weights
    and model card."""
    model.build_bank(training_set.sample_frames(), ImageBank.of(*training_set.image_frames()))
    model.build_demonstrations(training_set.demonstrations())
    if model.run is not None and model.run.config.plan.cost == "temporal":
        model.temporal_head = head_of(model, training_set, on_step=on_head)
    with saving(folder):
        save_model(model, folder)
        write_card(folder)
    training_set.remove_cache()


def fit(
    model: WorldModel,
    training_set: TrainingSet,
    device: torch.device,
    write: OnMetrics,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    *,
    plain: bool = False,
    checkpointer: Checkpointer | None = None,
    probes: Sequence[StateProbe | PlanningScore] = (),
) -> None:
    """The training loop. Trains the model in place and leaves it in eval mode.

    ``write`` gets every row of metrics. ``checkpointer``: the state to resume from, and how to save. ``probes``:
    measured at each validation.
    """
    config, steps, start = training_set.config, training_set.steps, checkpointer.step if checkpointer else 0
    settings, mixed = config.train, is_mixed(config.train, device)
    batches = training_set.batches(start, device)
    prepare(model, device, settings.seed)
    update = make_step(model, config, device, steps, plain, start)
    rate_factor = warmup_cosine(steps, settings.warmup)
    staging = checkpointer.staging if checkpointer and is_main() else None
    losses = LossBuffer(list(config.objective.weights), training_set.clips_of_step, staging)
    collapse, saturation, clock = CollapseMonitor(), SaturationMonitor(config), Clock(start, steps, settings.batch)
    score: float | None = None
    if checkpointer:
        losses.restore(checkpointer.restore(model, update.optimizer), device)

    model.train()
    for step, batch in enumerate(batches, start=start + 1):
        if checkpointer and step == start + 1:
            checkpointer.restore_random(device)
        rate = settings.lr * rate_factor(step - 1)
        losses.add(update(batch, make_rng(settings.seed, TrainRng.LOSS, step, device=device), rate))

        last, row = step == steps, dict[str, float]()
        if last or step % settings.log_every == 0:
            means, norm = losses.report(step)
            speed, seconds_left = clock.report(step)
            row = {"epoch": step / training_set.steps_per_epoch, **means, "lr": rate}
            row |= {"grad_norm": norm, "clips_per_second": speed}
            total = means.pop("total")
            on_progress(Progress(step, steps, means, total, speed, seconds_left, score))
            if training_set.validates_after(step):
                bf16 = mixed and not last  # the final statistics are those of the model in float32, as it is used
                if settings.batchnorm_batches:
                    measure_batchnorm(model, batches.samples(BATCHNORM), mixed=bf16)
                held_out = batches.samples(HELD_OUT)
                found = validate(model, held_out, config, collapse, update.progress, mixed=bf16)
                for probe in probes if is_main() else ():
                    found |= probe.measure(model, device, mixed=bf16)
                score = found.get("score")
                saturation.check(found)
                row |= {f"val_{name}": value for name, value in found.items()}
                clock.skip()
            write(step, row)
        if checkpointer:
            read = partial(losses.read, step)
            checkpointer.after(step, steps, model, update.optimizer, losses=read, row=row)
    model.eval()


def prepare(model: WorldModel, device: torch.device, seed: int) -> None:
    """Move the model to the device. All processes get the main one's weights, and each its own dropout masks."""
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # Triton and graph capture use the current device
    model.to(device)
    same_weights(model)
    if rank():  # the main process continues its own stream
        torch.manual_seed(make_rng(seed, TrainRng.DROPOUT, rank()).initial_seed())


class Clock:
    """Speed and remaining time of training, without the time of validations in the speed."""

    def __init__(self, start: int, steps: int, batch: int):
        self.start, self.steps, self.batch = start, steps, batch
        self.reported = start
        self.started = self.resumed = time.perf_counter()

    def report(self, step: int) -> tuple[float, float]:
        """Clips per second since the last report, and the seconds left."""
        now = time.perf_counter()
        speed = self.batch * (step - self.reported) / (now - self.resumed)
        self.reported, self.resumed = step, now
        return speed, (now - self.started) / (step - self.start) * (self.steps - step)

    def skip(self) -> None:
        """Do not count the time since the last report."""
        self.resumed = time.perf_counter()


def metric_names(config: RunConfig, probes: Sequence[StateProbe | PlanningScore] = ()) -> list[str]:
    losses = ["total", *config.objective.weights]
    validated = [*losses, *(() if config.model.encoder.frozen else HEALTH)]
    validated += [name for probe in probes for name in probe.names]
    return ["epoch", *losses, "lr", "grad_norm", "clips_per_second", *(f"val_{name}" for name in validated)]
