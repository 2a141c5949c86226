"""Latents of some training frames, to measure how novel another latent is."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from atlas_wm.models.geometry import knn_novelty, percentile
from atlas_wm.models.image_bank import ImageBank

NEIGHBOURS = 50
EXACT = "donot_use_mm_for_euclid_dist"  # for cdist: products would round small distances away


@dataclass(frozen=True)
class LatentBank:
    """One point for each of N training frames, stored on the CPU.

    The point of a frame is its latent (d,), or the mean of its patch tokens (K, w) where those are the latent.
    """

    points: Tensor  # (N, m) float32
    novelty: Tensor  # (N,) float64, of each point among the others
    images: ImageBank | None = None  # None in a run folder of an older version
    footprints: Tensor | None = None  # (N, P) bool, where something is in each frame (image_bank.py)

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

    def nearest(self, paths: Tensor) -> Tensor:
        """The point nearest to each latent of paths (Q, 1 + H, …), those of current frames and what plans imagine
        after them: (Q, 1 + H) int64 on the CPU."""
        queries = flat(paths, leading=2).float()
        return distances_to(self.points.to(queries.device), queries).argmin(dim=-1).cpu()

    def crossed(self, frames: Tensor, paths: Tensor) -> Tensor | None:
        """How much of what changed in the scene lies where a plan leads.

        frames: (Q, 3, S, S) uint8, the current ones; paths as in ``nearest``. There is no decoder, so the nearest
        training frame stands for each latent, and its footprint for where it is. → (Q,) on the CPU: of the pixels
        of a frame whose colour is novel, the share in a footprint of its path but not in the current one; 0 where
        no colour is novel. None: the bank is of an older version.
        """
        if self.images is None or self.footprints is None:
            return None
        now, *path = self.footprints[self.nearest(paths)].unbind(dim=1)  # (Q, P) each
        changed = self.images.changed(frames).cpu()
        crossed = changed & torch.stack(path).any(dim=0) & ~now
        return crossed.sum(dim=1) / changed.sum(dim=1).clamp_min(1)

    @cached_property
    def spacing(self) -> Tensor:
        """(N,) the distance of each point from its nearest other one."""
        distances = torch.cdist(self.points, self.points, compute_mode=EXACT)
        return distances.fill_diagonal_(torch.inf).amin(dim=1)


def flat(z: Tensor, leading: int = 1) -> Tensor:
    """Latents with ``leading`` axes before their own: (…, d) as it is, (…, K, w) averaged over the K tokens."""
    return z if z.ndim == leading + 1 else z.mean(dim=-2)


def distances_to(points: Tensor, paths: Tensor) -> Tensor:
    """(N, m) and (Q, L, m) → (Q, L, N). Of all paths in one product: cdist would copy the points for each path."""
    return torch.cdist(paths.flatten(0, 1), points, compute_mode=EXACT).unflatten(0, paths.shape[:2])


def _neighbours(points: Tensor) -> int:
    return min(NEIGHBOURS, len(points) - 1)
