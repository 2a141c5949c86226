"""Fit the temporal head of a run: how many model steps lie between two latents.

The distance d of random pairs is pushed up, while d ≤ k must hold for frames k action chunks apart in a training
episode: what remains is the shortest time that the triangle inequality and the demonstrations allow, also between
frames that no demonstration connects (quasimetric reinforcement learning does so with k = 1). The latents that the
model imagines of the recorded actions obey the same, and must be near the frames they stand for, so that a planner
does not gain by what the model gets wrong.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from atlas_wm.data.training_set import TrainingSet, open_training_set_of
from atlas_wm.errors import UserError
from atlas_wm.models.bank import flat
from atlas_wm.models.temporal_head import TemporalHead
from atlas_wm.models.world_model import WorldModel
from atlas_wm.parallel.devices import pick_device
from atlas_wm.rng import HeadRng, make_rng
from atlas_wm.runs.folder import TEMPORAL_HEAD
from atlas_wm.runs.model import load_model, save_temporal_head

FRAMES, AHEAD = 20_000, 5  # of training episodes, at most; action chunks imagined from each
STEPS, BATCH, LR = 3000, 512, 1e-3
TIGHT = 30.0  # weight of d ≤ k; the slope of the push is at most 1
SAME = 0.3  # weight of the distance between an imagined latent and its frame
OnProgress = Callable[[int, int], None]  # done, of how many


@dataclass(frozen=True)
class Paths:
    """M frames of training episodes, one action chunk apart, an episode after the other."""

    points: Tensor  # (M, m) their points (models/bank.py)
    left: Tensor  # (M,) int64, frames that follow in the same episode, or in the same piece of it
    imagined: Tensor  # (M, AHEAD, m) points of the model's rollout of the recorded actions; real up to ``left``

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        model: WorldModel,
        pieces: Iterable[tuple[Tensor, Tensor, int]],
        on_frames: Callable[[int], None] = lambda done: None,
    ) -> "Paths":
        """From what ``TrainingSet.demonstrations`` yields; ``on_frames(done)``."""
        device, parts, done = next(model.parameters()).device, [], 0
        for frames, actions, _ in pieces:
            z = model.encode(frames.to(device))
            padded = torch.cat([actions, torch.zeros(AHEAD - 1, actions.shape[1])]).to(device)
            chunks = padded.unfold(0, AHEAD, 1).movedim(-1, 1)  # (n, AHEAD, frameskip·A)
            imagined = model.rollout(z, chunks[:, None].contiguous())[:, 0]
            left = torch.arange(len(z) - 1, -1, -1, device=device)
            parts.append((flat(z).float(), left, flat(imagined, leading=2).float()))
            done += len(z)
            on_frames(done)
        return cls(*map(torch.cat, zip(*parts, strict=True)))


def fit_temporal_head(
    paths: Paths, seed: int = 0, steps: int = STEPS, on_step: OnProgress = lambda done, total: None
) -> TemporalHead:
    """By Adam, on the device of the paths."""
    points, left, imagined, device = paths.points, paths.left, paths.imagined, paths.points.device
    starts = left.nonzero()[:, 0]  # frames with others after them
    if not len(starts):
        raise UserError("the temporal head needs training episodes of at least two frames, one action chunk apart")
    ahead = torch.arange(imagined.shape[1], device=device)
    origins, chunks = (ahead < left[:, None]).nonzero(as_tuple=True)  # imagined[origins, chunks] has a frame
    before = torch.cat([points[:, None], imagined[:, :-1]], dim=1)  # one step before imagined
    far = 2 * float(left.max())  # model steps: a path may be longer than every episode
    step_length = float((points[starts + 1] - points[starts]).norm(dim=-1).mean())
    head = TemporalHead.initial(points, make_rng(seed, HeadRng.WEIGHTS), step_length)
    rng = make_rng(seed, HeadRng.PAIRS, device=device)
    optimizer = torch.optim.Adam([tensor.requires_grad_() for tensor in head.fitted], LR)

    def some(count: int) -> Tensor:
        return torch.randint(count, (BATCH,), generator=rng, device=device)

    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LR * min(1.0, (steps - step) / (0.3 * steps))
        a, pick = starts[some(len(starts))], some(len(origins))
        gap = 1 + (torch.rand(BATCH, generator=rng, device=device) * left[a]).long().clamp_max(left[a] - 1)
        i, k = origins[pick], chunks[pick]
        from_model = torch.rand(BATCH, 1, generator=rng, device=device) < 0.5
        away = torch.where(from_model, imagined[i, k], points[some(len(points))])
        latents = [points[a], points[a + 1], points[a + gap], before[i, k], imagined[i, k], points[i + k + 1]]
        frame, following, later, previous, dreamt, real, start, end = head.embed(
            torch.stack([*latents, away, points[some(len(points))]])
        )
        d = head.between
        push = softplus(far - d(start, end), beta=2.5 / far).mean()
        too_far = torch.cat([d(frame, following) - 1, d(frame, later) - gap, d(previous, dreamt) - 1])
        same = (d(dreamt, real).square() + d(real, dreamt).square()).mean() / 2
        loss = push + TIGHT * too_far.relu().square().mean() + SAME * same
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        on_step(step + 1, steps)
    return head.to(device)


def write_temporal_head(
    run: Path,
    data: str | Path | None = None,
    device: str = "auto",
    seed: int = 0,
    frames: int = FRAMES,
    steps: int = STEPS,
    on_frames: OnProgress = lambda done, total: None,
    on_step: OnProgress = lambda done, total: None,
) -> Path:
    """Fit a head to the final weights of a run, on training episodes alone, and add it to the run folder."""
    model = load_model(run, pick_device(device))
    assert model.run is not None
    training_set = open_training_set_of(model.run, run, data)
    head = head_of(model, training_set, seed, frames, steps, on_frames, on_step)
    save_temporal_head(head, run)
    return run / TEMPORAL_HEAD


def head_of(
    model: WorldModel,
    training_set: TrainingSet,
    seed: int = 0,
    frames: int = FRAMES,
    steps: int = STEPS,
    on_frames: OnProgress = lambda done, total: None,
    on_step: OnProgress = lambda done, total: None,
) -> TemporalHead:
    """Fitted to the weights that the model has now, which must be in eval mode."""
    lengths = training_set.data.lengths[np.unique(training_set.training.episode)]
    total = min(frames, int(((lengths - 1) // model.config.frameskip + 1).sum()))
    paths = Paths.of(model, training_set.demonstrations(frames), lambda done: on_frames(done, total))
    return fit_temporal_head(paths, seed, steps, on_step)
