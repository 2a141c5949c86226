"""A validation: BatchNorm statistics are measured, then the losses on held-out clips, and state probes."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from atlas_wm.config import RunConfig
from atlas_wm.data.clips import Batch
from atlas_wm.data.training_set import TrainingSet
from atlas_wm.errors import UserError
from atlas_wm.losses.objective import Losses, Progress, objective
from atlas_wm.models.bank import flat
from atlas_wm.models.probes import explained, ridge_probe
from atlas_wm.models.world_model import WorldModel
from atlas_wm.parallel.processes import alone
from atlas_wm.rng import TrainRng, make_rng
from atlas_wm.train.monitors import CollapseMonitor
from atlas_wm.train.step import clip_latents, whole_batch

PROBE_BATCH = 250


@torch.no_grad()
def validate(
    model: WorldModel,
    batches: Iterable[Batch],
    config: RunConfig,
    collapse: CollapseMonitor,
    progress: Progress | None = None,
    *,
    mixed: bool = False,
) -> dict[str, float]:
    """Mean losses over the batches, in eval mode, and how much of the latent space they use."""
    model.eval()
    generator = make_rng(config.train.seed, TrainRng.VALIDATION_LOSS, device=next(model.parameters()).device)
    losses, latents = [], []
    for batch in batches:
        clips = whole_batch(clip_latents(model, batch, mixed))
        losses.append(objective(clips, config.objective, generator, progress, model.terms))
        if not config.model.encoder.frozen:  # a frozen encoder cannot collapse
            latents.append(clips.z)
    model.train()
    return (mean_losses(losses) if losses else {}) | (collapse.measure(latents) if latents else {})


@torch.no_grad()
def measure_batchnorm(model: WorldModel, batches: Iterable[Batch], *, mixed: bool = False) -> None:
    """Replace BatchNorm's running averages, which lag behind the weights, by plain means over the batches.

    Frames of one task look alike: they share far more than they differ, so a small change of the weights shifts all
    latents by the same large step.
    """
    own = set(model.terms.modules())  # loss terms: they are not part of the forward pass
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d) and m not in own]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    model.eval()  # no dropout: statistics of the model as it will be used
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a cumulative average
        norm.train()
    for batch in batches:
        whole_batch(clip_latents(model, batch, mixed))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    model.train()


class StateProbe:
    """Linear probes from z to the coordinates of the state, fitted anew at every validation (``train.probe``)."""

    def __init__(self, training_set: TrainingSet):
        self.training_set = training_set
        self.fitted, self.judged = training_set.probe_rows()
        try:
            self.coordinates = training_set.data.coordinates()
        except UserError as error:
            raise UserError(f"--train.probe cannot be used: {error}") from error
        if not len(self.fitted):
            raise UserError(f"--train.probe cannot be used: {training_set.data.path} has too few episodes")

    @property
    def names(self) -> list[str]:
        return [f"probe_{coordinate.name}" for coordinate in self.coordinates]

    def measure(self, model: WorldModel, device: torch.device, *, mixed: bool = False) -> dict[str, float]:
        """R² of each coordinate on the judged rows. The main process computes it, without the others."""
        model.eval()
        with alone():
            x, queries = (self._latents(model, rows, device, mixed) for rows in (self.fitted, self.judged))
        model.train()
        states = [torch.from_numpy(coordinate.values) for coordinate in self.coordinates]
        predicted = [ridge_probe(x, y[self.fitted], queries) for y in states]
        return {
            name: explained(p, y[self.judged]) for name, p, y in zip(self.names, predicted, states, strict=True)
        }

    @torch.no_grad()
    def _latents(self, model: WorldModel, rows: np.ndarray, device: torch.device, mixed: bool) -> Tensor:
        """(n, d) on the CPU, in float32; patch tokens are averaged."""
        parts = []
        for batch in np.split(rows, range(PROBE_BATCH, len(rows), PROBE_BATCH)):
            inputs = self.training_set.inputs_of(batch).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
                z = inputs if inputs.is_floating_point() else model.encode(inputs)
            parts.append(flat(z.float()).cpu())
        return torch.cat(parts)


def mean_losses(losses: list[Losses]) -> dict[str, float]:
    """Means by name, with one transfer from the device for each."""
    means = {"total": torch.stack([loss.total for loss in losses]).mean()}
    for name in losses[0].terms:
        means[name] = torch.stack([loss.terms[name] for loss in losses]).mean()
    return {name: float(value) for name, value in means.items()}
