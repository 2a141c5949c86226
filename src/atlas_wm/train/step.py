"""One update of the weights: as it is written, or on a CUDA device as one captured graph."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from atlas_wm.config import RunConfig, TrainConfig
from atlas_wm.data.clips import Batch
from atlas_wm.losses.objective import ClipLatents, Losses, Progress, objective
from atlas_wm.losses.projections import random_directions
from atlas_wm.models.world_model import WorldModel
from atlas_wm.parallel.processes import gather_rows, sum_gradients, world_size
from atlas_wm.train.agreement import disagreement

if TYPE_CHECKING:
    from lightning.fabric import Fabric

log = logging.getLogger(__name__)
STEPS_WORTH_COMPILING = 60_000  # it takes about a minute, and saves milliseconds a step where kernels are not fused
WARM_UP = 3  # updates before the capture: kernels are compiled, the optimiser gets its state


class Update(NamedTuple):
    losses: Losses  # detached
    norm: Tensor  # of the gradient, before clipping


class Step(Protocol):
    optimizer: Any  # its state is saved and brought back before the first update
    progress: Progress  # of the last update: the step counts

    def __call__(self, batch: Batch, directions: torch.Generator, rate: float) -> Update:
        """Update the model for one batch; ``directions`` draws those of the regularisers."""


def make_step(
    fabric: "Fabric",
    model: WorldModel,
    wrapped: nn.Module,
    config: RunConfig,
    steps: int,
    plain: bool = False,
    done: int = 0,
) -> Step:
    """``steps``: updates in all, of which ``done`` were made before (a run that goes on)."""
    if world_size() > 1:
        log.info("%d processes share each batch: training step as it is written", world_size())
    elif fabric.device.type == "cuda" and not plain:
        bf16 = precision_of(config.train, fabric.device) == "bf16-mixed"
        fused = bf16 and not any(fusable(model).values())  # then next to nothing is left to compile
        worth = config.train.compile == "auto" and steps >= STEPS_WORTH_COMPILING and not fused
        compiled = worth or config.train.compile == "always"
        return CapturedStep(model, config, fabric.device, steps, done, compiled=compiled)
    return PlainStep(fabric, wrapped, config, steps, done)


class PlainStep:
    def __init__(self, fabric: "Fabric", wrapped: nn.Module, config: RunConfig, steps: int = 1, done: int = 0):
        self.fabric, self.model, self.config = fabric, wrapped, config
        self.progress = Progress.at(done, steps, fabric.device)
        self.optimizer: Any = fabric.setup_optimizers(adamw(wrapped, config.train))

    def __call__(self, batch: Batch, directions: torch.Generator, rate: float) -> Update:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.progress.step.add_(1)
        clips = whole_batch(self.model(batch.frames, batch.actions))
        losses = objective(clips, self.config.objective, directions, self.progress)
        self.fabric.backward(losses.total)
        sum_gradients(self.model.parameters())
        norm = self.fabric.clip_gradients(
            self.model, self.optimizer, max_norm=self.config.train.clip, error_if_nonfinite=False
        )
        assert norm is not None  # it is for max_norm
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Update(detached(losses), norm)


def whole_batch(clips: ClipLatents) -> ClipLatents:
    """The latents of all processes' clips, of which each computes the same losses."""
    return ClipLatents(*gather_rows(clips))  # type: ignore[arg-type]


class CapturedStep:
    """The same as one CUDA graph: launching its thousands of kernels one by one takes longer than running them.

    The graph reads its inputs from fixed places. The first updates run outside of it, and all do where it fails.
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
        self.bf16 = precision_of(config.train, device) == "bf16-mixed"
        parts = agreeing(model, fusable(model)) if self.bf16 else {}
        self._fuse([part for part, missing in parts.items() if not missing])
        self.losses = torch.compile(self._losses) if compiled else self._losses
        self.inputs: list[Tensor] = []
        self.updates, self.fast = 0, True
        self.graph: torch.cuda.CUDAGraph | None = None
        self.aside = torch.cuda.Stream(device)
        how = [name for name, on in {"fused": not all(parts.values()), "compiled": compiled}.items() if on]
        log.info("fast path: training step as a CUDA graph%s", "".join(f", {name}" for name in how))

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
            if self.updates < WARM_UP or not self.fast:
                return self._outside()
            if self.updates == WARM_UP:
                with _no_waiting(self.device):
                    return self._outside()
            if self.graph is None:
                graph = torch.cuda.CUDAGraph()
                # The loader's thread that pins memory goes on calling CUDA: only this one has to keep to the rules.
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self.result = self._update()
                self.graph = graph
        except Exception as error:  # a term of the user's own that cannot be compiled or captured, say
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
        self.model.predictor.fused = "predictor" in parts

    def _outside(self) -> Update:
        self.aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.aside):  # where a capture wants what came before it
            update = self._update()
        torch.cuda.current_stream().wait_stream(self.aside)
        return _copied(update)

    def _update(self) -> Update:
        self.optimizer.zero_grad()
        losses = self.losses(*self.inputs)
        losses.total.backward()
        norm = clip_grad_norm_(self.model.parameters(), self.config.train.clip)
        self.optimizer.step()
        return Update(detached(losses), norm)

    def _losses(self, frames: Tensor, actions: Tensor, directions: Tensor) -> Losses:
        with torch.autocast(frames.device.type, torch.bfloat16, enabled=self.bf16):
            clips = self.model(frames, actions)
        clips = ClipLatents._make(None if t is None else t.float() for t in clips)
        return objective(clips, self.config.objective, directions, self.progress)


@contextmanager
def _no_waiting(device: torch.device) -> Iterator[None]:
    """Within, what waits for the device (``.item()``, say) is an error. It would be one in a capture too, but that
    leaves torch's random generators in a state in which nothing can be drawn any more."""
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
    """Why a part of the model cannot be trained by fused kernels; "" where it can."""
    parts: dict[str, Any] = {"encoder": model.encoder, "predictor": model.predictor}
    return {
        name: part.fused_obstacle() if hasattr(part, "fused_obstacle") else f"{type(part).__name__} offers none"
        for name, part in parts.items()
    }


def agreeing(model: WorldModel, parts: dict[str, str]) -> dict[str, str]:
    """The same after a comparison with the plain model; says what is not fused."""
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


def detached(losses: Losses) -> Losses:
    return Losses(losses.total.detach(), {name: t.detach() for name, t in losses.terms.items()})


def _copied(update: Update) -> Update:
    """A replay writes to the same places again."""
    losses, norm = update
    return Update(Losses(losses.total.clone(), {k: t.clone() for k, t in losses.terms.items()}), norm.clone())
