"""Training demonstrations as the weights of a model see them: latents, and the action chunks between them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from atlas_wm.models.bank import distances_to, flat

USUAL = 0.8  # share of recorded paths that counts as usual
PATHS, AT_ONCE = 500, 50  # such paths, at most; those whose distances are computed together


class Piece(NamedTuple):
    """Frames of one training episode, one action chunk apart."""

    latents: Tensor  # (n, …)
    actions: Tensor  # (n, frameskip·A) standardised, from each frame to the next; zero after an episode's last
    episode: int  # its number in the dataset
    imagined: Tensor  # (q, 1 + H, …) some of these latents, and what the model imagines of the H chunks after each


@dataclass(frozen=True)
class Demonstrations:
    """M frames of training episodes, stored on the CPU: one action chunk apart, an episode after the other.

    The point of a frame is that of the latent bank: its latent, or the mean of its patch tokens.
    """

    points: Tensor  # (M, m) float16
    actions: Tensor  # (M, frameskip·A) float32, as in a piece
    episodes: Tensor  # (M,) int64
    usual: Tensor | None = None  # (H,) departure of most imagined paths of 1 to H chunks; None: not known

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> "Demonstrations":
        parts = [
            (
                flat(piece.latents).to("cpu", torch.float16),
                piece.actions.float(),
                torch.full((len(piece.latents),), piece.episode),
                flat(piece.imagined, leading=2).float().cpu(),
                torch.full((len(piece.imagined),), piece.episode),
            )
            for piece in pieces
        ]
        *stored, imagined, episodes = map(torch.cat, zip(*parts, strict=True))
        known, every = cls(*stored), max(1, -(-len(imagined) // PATHS))
        return replace(known, usual=known._usual(imagined[::every], episodes[::every]))

    def strayed(self, paths: Tensor) -> Tensor | None:
        """How far a plan leaves what was seen in training, in steps of its own: an agent inside a wall, say.

        paths: (Q, 1 + H, …), the latents of current frames and those that a plan imagines after each. → (Q,) on the
        CPU, 0 to 1: the departure of the path, less what is usual where the model imagines recorded actions from
        frames of other episodes. None: what is usual is not known, as in files of older versions.
        """
        if self.usual is None:
            return None
        horizon = min(paths.shape[1] - 1, len(self.usual))
        return (self._departures(paths)[:, -1].cpu() - self.usual[horizon - 1]).clamp(0, 1)

    def _departures(self, paths: Tensor, episodes: Tensor | None = None) -> Tensor:
        """How much farther from the nearest point the first h chunks of a path lead than it begins, over the mean
        step: (Q, H).

        episodes: (Q,) which each path comes from, and whose points do not count.
        """
        queries = flat(paths, leading=2).float()
        distances = distances_to(self._points_on(queries.device), queries)  # (Q, 1 + H, M)
        if episodes is not None:
            distances = distances.masked_fill(episodes[:, None, None] == self.episodes, torch.inf)
        nearest = distances.amin(dim=2)
        steps = queries.diff(dim=1).norm(dim=-1).cumsum(dim=1)
        means = steps / torch.arange(1, paths.shape[1], device=steps.device)
        return (nearest[:, 1:].cummax(dim=1).values - nearest[:, :1]) / means.clamp_min(1e-12)

    def _usual(self, imagined: Tensor, episodes: Tensor) -> Tensor | None:
        """None where no episode is longer than a path, or there is no other episode."""
        if not len(imagined) or len(self.episodes.unique()) < 2:
            return None
        parts = zip(imagined.split(AT_ONCE), episodes.split(AT_ONCE), strict=True)
        return torch.cat([self._departures(*part) for part in parts]).quantile(USUAL, dim=0).clamp_min(0)

    @cached_property
    def _copies(self) -> dict[torch.device, Tensor]:
        return {}

    def _points_on(self, device: torch.device) -> Tensor:
        if device not in self._copies:
            self._copies[device] = self.points.to(device).float()
        return self._copies[device]
