"""One update of the weights: as plain PyTorch, or on a CUDA device as one captured graph."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from atlas_wm.config import RunConfig, TrainConfig
from atlas_wm.data.clips import Batch
from atlas_wm.losses.objective import ClipLatents, Losses, Progress, objective
from atlas_wm.losses.projections import random_directions
from atlas_wm.models.world_model import WorldModel
from atlas_wm.parallel.gradients import GradientSum
from atlas_wm.parallel.processes import gather_rows, has_nccl, several, shard_sizes, world_size
from atlas_wm.train.agreement import disagreement

log = logging.getLogger(__name__)
STEPS_WORTH_COMPILING = 60_000  # it takes about a minute and saves milliseconds per step without fused kernels
WARM_UP = 3  # updates before the capture: they compile kernels and fill the optimiser state


class Update(NamedTuple):
    losses: Losses  # detached
    norm: Tensor  # of the gradient, before clipping


class Step(Protocol):
    optimizer: Any  # a checkpoint restores its state before the first update
    progress: Progress  # of the last update: the step counts

    def __call__(self, batch: Batch, directions: torch.Generator, rate: float) -> Update:
        """Update the model with one batch. The generator draws the projection directions of the regularisers."""


def make_step(
    model: WorldModel,
    config: RunConfig,
    device: torch.device,
    steps: int,
    plain: bool = False,
    done: int = 0,
) -> Step:
    """``steps``: updates of the whole run, ``done`` of them before this process (a resumed run)."""
    if device.type == "cuda" and not plain:
        mixed = is_mixed(config.train, device)
        fused = mixed and not any(fusable(model).values())  # then little is left to compile
        worth = config.train.compile == "auto" and steps >= STEPS_WORTH_COMPILING and not fused
        compiled = worth or config.train.compile == "always"
        if compiled and several():
            log.info("not compiled: torch.compile is for one process")
            compiled = False
        return CapturedStep(model, config, device, steps, done, compiled=compiled)
    return PlainStep(model, config, device, steps, done)


class PlainStep:
    """The update as plain PyTorch, on any device and in any number of processes."""

    def __init__(self, model: WorldModel, config: RunConfig, device: torch.device, steps: int = 1, done: int = 0):
        self.model, self.config = model, config
        self.mixed = is_mixed(config.train, device)
        self.progress = Progress.at(done, steps, device)
        self.optimizer: Any = adamw(model, config.train)
        self.gradients = GradientSum(model.parameters(), averaged=model.terms.parameters())

    def __call__(self, batch: Batch, directions: torch.Generator, rate: float) -> Update:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.progress.step.add_(1)
        clips = whole_batch(clip_latents(self.model, batch, self.mixed), self.config.train.batch)
        losses = objective(clips, self.config.objective, directions, self.progress, self.model.terms)
        self.gradients.backward(losses.total)
        norm = clip_grad_norm_(self.model.parameters(), self.config.train.clip)
        self.optimizer.step()
        self.model.update_target()
        self.optimizer.zero_grad()
        return Update(detached(losses), norm)


def clip_latents(model: nn.Module, batch: Batch, mixed: bool) -> ClipLatents:
    """What the model makes of a batch, in float32. ``mixed``: computed in bf16 where autocast allows it."""
    with torch.autocast(batch.frames.device.type, torch.bfloat16, enabled=mixed):
        clips = model(batch.frames, batch.actions)
    each = [None if t is None else t.float() for t in clips]  # torch 2.11 cannot compile a generator here
    return ClipLatents(*each)  # type: ignore[arg-type]


def whole_batch(clips: ClipLatents, count: int | None = None) -> ClipLatents:
    """The latents of all processes' clips. Every process computes the same losses from them. ``count``: of the
    clips, where it is known; asking the others takes time."""
    return ClipLatents(*gather_rows(clips, shard_sizes(count) if count else None))  # type: ignore[arg-type]


class CapturedStep:
    """The same update as one CUDA graph: launching its thousands of kernels one by one takes longer than running
    them.

    The graph reads its inputs from fixed tensors. The first updates run outside of it; all do where capture fails.
    Of several processes each has a graph, and NCCL's messages are part of it. Other messages cannot be: then the
    kernels are fused, but launched one by one.
    """

    def __init__(
        self,
        model: WorldModel,
        config: RunConfig,
        device: torch.device,
        steps: int = 1,
        done: int = 0,
        *,
        compiled: bool,
    ):
        self.model, self.config, self.device = model, config, device
        self.progress = Progress.at(done, steps, device)  # tensors, as the rate is
        self.rate = torch.tensor(config.train.lr, device=device)  # a tensor, so that the graph sees it change
        self.optimizer = adamw(model, config.train, lr=self.rate, fused=True, capturable=True)
        self.mixed = is_mixed(config.train, device)
        parts = agreeing(model, fusable(model)) if self.mixed else {}
        self._fuse([part for part, missing in parts.items() if not missing])
        self.losses = torch.compile(self._losses) if compiled else self._losses
        self.gradients = GradientSum(model.parameters(), averaged=model.terms.parameters())
        self.inputs: list[Tensor] = []
        self.updates, self.fast = 0, True
        self.captures = not several() or has_nccl()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.aside = torch.cuda.Stream(device)
        how = {"a CUDA graph": self.captures, "fused": not all(parts.values()), "compiled": compiled}
        how |= {f"{world_size()} processes": several()}
        log.info("fast path: training step as %s", ", ".join(name for name, on in how.items() if on))

    def __call__(self, batch: Batch, directions: torch.Generator, rate: float) -> Update:
        size, count = self.model.config.latent, self.config.objective.directions
        drawn = random_directions(size, count, device=self.device, generator=directions)
        given = [batch.frames, batch.actions, drawn]
        self.inputs = self.inputs or [t.clone() for t in given]
        for fixed, new in zip(self.inputs, given, strict=True):
            fixed.copy_(new)
        self.rate.fill_(rate)
        self.progress.step.add_(1)
        self.updates += 1
        try:
            if self.updates < WARM_UP or not (self.fast and self.captures):
                return self._outside()
            if self.updates == WARM_UP:
                with _no_waiting(self.device):
                    return self._outside()
            if self.graph is None:
                graph = torch.cuda.CUDAGraph()
                # The loader's pinning thread keeps calling CUDA: the capture must check this thread only.
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self.result = self._update()
                self.graph = graph
        except Exception as error:  # for example an own loss term that cannot be compiled or captured
            if not self.fast:
                raise
            log.warning("fast path: off (%s: %s)", type(error).__name__, str(error).partition("\n")[0])
            self.fast, self.losses = False, self._losses
            self._fuse([])
            return self._outside()
        self.graph.replay()
        return _copied(self.result)

    def _fuse(self, parts: Sequence[str]) -> None:
        self.model.encoder.fused = "encoder" in parts
        if self.model.target is not None:  # a copy: what agrees for the encoder agrees for it
            self.model.target.encoder.fused = "encoder" in parts  # type: ignore[assignment]
        self.model.predictor.fused = "predictor" in parts

    def _outside(self) -> Update:
        self.aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.aside):  # the stream that the capture expects earlier work on
            update = self._update()
        torch.cuda.current_stream().wait_stream(self.aside)
        return _copied(update)

    def _update(self) -> Update:
        self.optimizer.zero_grad()
        losses = self.losses(*self.inputs)
        self.gradients.backward(losses.total)
        norm = clip_grad_norm_(self.model.parameters(), self.config.train.clip)
        self.optimizer.step()
        self.model.update_target()
        return Update(detached(losses), norm)

    def _losses(self, frames: Tensor, actions: Tensor, directions: Tensor) -> Losses:
        clips = whole_batch(clip_latents(self.model, Batch(frames, actions), self.mixed), self.config.train.batch)
        return objective(clips, self.config.objective, directions, self.progress, self.model.terms)


@contextmanager
def _no_waiting(device: torch.device) -> Iterator[None]:
    """Within, an operation that waits for the device (such as ``.item()``) is an error. A capture would raise it
    too, but would leave torch's generators in a state in which they cannot draw."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def fusable(model: WorldModel) -> dict[str, str]:
    """Why fused kernels cannot train a part of the model; "" where they can."""
    parts: dict[str, Any] = {"encoder": model.encoder, "predictor": model.predictor}
    return {
        name: part.fused_obstacle() if hasattr(part, "fused_obstacle") else f"{type(part).__name__} offers none"
        for name, part in parts.items()
    }


def agreeing(model: WorldModel, parts: dict[str, str]) -> dict[str, str]:
    """The same after comparing the results with the plain model. Logs which parts are not fused."""
    found = {part: why or disagreement(model, part) for part, why in parts.items()}
    for part, why in found.items():
        if why:
            log.log(logging.INFO if parts[part] else logging.WARNING, "the %s is not fused: %s", part, why)
    return found


def adamw(model: nn.Module, settings: TrainConfig, **options: Any) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, **{"lr": settings.lr, "weight_decay": settings.weight_decay, **options})


def precision_of(settings: TrainConfig, device: torch.device) -> Literal["32-true", "bf16-mixed"]:
    if settings.precision == "auto":
        return "bf16-mixed" if device.type == "cuda" else "32-true"
    return settings.precision


def is_mixed(settings: TrainConfig, device: torch.device) -> bool:
    return precision_of(settings, device) == "bf16-mixed"


def detached(losses: Losses) -> Losses:
    return Losses(losses.total.detach(), {name: t.detach() for name, t in losses.terms.items()})


def _copied(update: Update) -> Update:
    """The next replay overwrites the tensors of this one."""
    losses, norm = update
    return Update(Losses(losses.total.clone(), {k: t.clone() for k, t in losses.terms.items()}), norm.clone())
