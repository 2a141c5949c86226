"""Training frames by their latents. There is no decoder: the nearest frame shows what a latent stands for."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from atlas_wm.data.training_set import open_training_set_of
from atlas_wm.errors import UserError
from atlas_wm.models.bank import EXACT, flat
from atlas_wm.models.world_model import WorldModel
from atlas_wm.runs.bank_frames import load_frames
from atlas_wm.runs.shipped import shipped


class TrainingFrames:
    """``nearest(latents)``: for each latent the image of the nearest training frame, and its distance.

    A distance is Euclidean, in units of the median distance of a training frame to its nearest neighbour among the
    others: 1 is as near as training frames are to one another.
    """

    def __init__(self, points: Tensor, read: Callable[[np.ndarray], Tensor]):
        """points: (N, m). read: numbers of points (n,) → their images (n, 3, S, S) uint8."""
        self.points, self.read = points.float().cpu(), read
        apart = _distances(self.points, self.points).fill_diagonal_(torch.inf)
        self.unit = max(float(apart.amin(dim=1).median()), 1e-12)

    def nearest(self, latents: np.ndarray | Tensor) -> tuple[Tensor, list[float]]:
        """(n, …) latents → (n, 3, S, S) uint8, n distances"""
        queries = flat(torch.as_tensor(latents).float().cpu())
        found = _distances(queries, self.points).min(dim=1)
        return self.read(found.indices.numpy()), (found.values / self.unit).tolist()


def _distances(a: Tensor, b: Tensor) -> Tensor:
    return torch.cdist(a, b, compute_mode=EXACT)


def open_training_frames(model: WorldModel, run: str | Path, data: str | Path | None = None) -> TrainingFrames:
    """Of the bank of a run: from images in its folder (frames.webp), else from the data it was trained on.

    data: where the dataset is now; None: where it was."""
    if model.bank is None or model.run is None:
        raise UserError(f"{run} has no bank, so imagined futures cannot be shown: run `atlas bank {run}`")
    points = model.bank.points
    stored = load_frames(shipped(run) or Path(run), len(points)) if data is None else None
    if stored is not None:
        return TrainingFrames(points, lambda which: stored[which])
    training_set = open_training_set_of(model.run, run, data)
    rows = training_set.sample_rows(len(points))
    return TrainingFrames(points, lambda which: training_set.data.frames_of(rows[which]))
