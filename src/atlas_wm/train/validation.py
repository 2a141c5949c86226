"""What happens at a validation: BatchNorm statistics are measured, then the losses on held-out clips."""

from collections.abc import Iterable

import torch
from torch import nn

from atlas_wm.config import RunConfig
from atlas_wm.data.clips import Batch
from atlas_wm.losses.objective import Losses, Progress, objective
from atlas_wm.models.world_model import WorldModel
from atlas_wm.rng import TrainRng, make_rng
from atlas_wm.train.monitors import CollapseMonitor
from atlas_wm.train.step import clip_latents, whole_batch

VALIDATION_BATCHES = 4


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


def mean_losses(losses: list[Losses]) -> dict[str, float]:
    """Means by name, with one transfer from the device for each."""
    means = {"total": torch.stack([loss.total for loss in losses]).mean()}
    for name in losses[0].terms:
        means[name] = torch.stack([loss.terms[name] for loss in losses]).mean()
    return {name: float(value) for name, value in means.items()}
