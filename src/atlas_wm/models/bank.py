"""What training looked like: latents of some training frames, to tell how unknown another latent is."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from atlas_wm.errors import UserError
from atlas_wm.geometry import knn_novelty, percentile
from atlas_wm.run_folder import BANK, read_bank, write_tensors

NEIGHBOURS = 50


@dataclass(frozen=True)
class LatentBank:
    """A point for each of N training frames, kept on the CPU.

    The point of a frame is its latent (d,), or the mean of its patch tokens (K, w) where those are the latent.
    """

    points: Tensor  # (N, m) float32
    novelty: Tensor  # (N,) float64, of each point among the others

    @classmethod
    def of(cls, latents: Iterable[Tensor]) -> "LatentBank":
        """From batches of latents, (n, …) each."""
        points = torch.cat([flat(some).float().cpu() for some in latents])
        return cls(points, knn_novelty(points, points, _neighbours(points), leave_one_out=True))

    def percentiles(self, latents: Tensor) -> Tensor:
        """How novel latents (Q, …) are, beside the bank's own points: (Q,), 0 to 100.

        Novelty is the mean distance to the nearest 50 points, each coordinate standardised over the bank. A latent
        that is not a number counts as 100.
        """
        queries = flat(latents).float()
        if queries.device.type == "mps":
            queries = queries.cpu()  # MPS has no float64
        points, novelty = self.points.to(queries.device), self.novelty.to(queries.device)
        return percentile(knn_novelty(queries, points, _neighbours(points)), novelty)

    @classmethod
    def read(cls, folder: str | Path, width: int) -> "LatentBank | None":
        """The bank of a run folder, None where it has none. width: the m of its model."""
        stored = read_bank(folder)
        if stored is None:
            return None
        shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
        count = stored["novelty"].numel() if "novelty" in stored else 0
        if count < 2 or shapes != {"points": (count, width), "novelty": (count,)}:
            raise UserError(
                f"{Path(folder) / BANK} does not fit the model, whose points have {width} coordinates (it holds "
                f"{shapes}): delete it, and make it again with `atlas bank {folder}`"
            )
        bank = cls(stored["points"].float(), stored["novelty"].double())
        if not (bank.points.isfinite().all() and bank.novelty.isfinite().all()):
            raise UserError(
                f"{Path(folder) / BANK} is damaged (it is not finite): delete it, and make it again with "
                f"`atlas bank {folder}`"
            )
        return bank

    def write(self, folder: Path) -> None:
        write_tensors(folder / BANK, {"points": self.points, "novelty": self.novelty})


def flat(z: Tensor, leading: int = 1) -> Tensor:
    """Latents with ``leading`` axes before their own: (…, d) as it is, (…, K, w) averaged over the K tokens."""
    return z if z.ndim == leading + 1 else z.mean(dim=-2)


def _neighbours(points: Tensor) -> int:
    return min(NEIGHBOURS, len(points) - 1)
