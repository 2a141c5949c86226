"""Latents of some training frames, to measure how novel another latent is."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from atlas_wm.models.geometry import knn_novelty, percentile
from atlas_wm.models.image_bank import ImageBank

NEIGHBOURS = 50


@dataclass(frozen=True)
class LatentBank:
    """One point for each of N training frames, stored on the CPU.

    The point of a frame is its latent (d,), or the mean of its patch tokens (K, w) where those are the latent.
    """

    points: Tensor  # (N, m) float32
    novelty: Tensor  # (N,) float64, of each point among the others
    images: ImageBank | None = None  # None in a run folder of an older version

    @classmethod
    def of(cls, latents: Iterable[Tensor]) -> "LatentBank":
        """From batches of latents, (n, …) each."""
        points = torch.cat([flat(some).float().cpu() for some in latents])
        return cls(points, knn_novelty(points, points, _neighbours(points), leave_one_out=True))

    def percentiles(self, latents: Tensor) -> Tensor:
        """How novel latents (Q, …) are, as percentiles among the bank's own points: (Q,), 0 to 100.

        Novelty is the mean distance to the nearest 50 points, each coordinate standardised over the bank. A latent
        with NaN counts as 100.
        """
        queries = flat(latents).float()
        if queries.device.type == "mps":
            queries = queries.cpu()  # MPS has no float64
        points, novelty = self.points.to(queries.device), self.novelty.to(queries.device)
        return percentile(knn_novelty(queries, points, _neighbours(points)), novelty)


def flat(z: Tensor, leading: int = 1) -> Tensor:
    """Latents with ``leading`` axes before their own: (…, d) as it is, (…, K, w) averaged over the K tokens."""
    return z if z.ndim == leading + 1 else z.mean(dim=-2)


def _neighbours(points: Tensor) -> int:
    return min(NEIGHBOURS, len(points) - 1)
