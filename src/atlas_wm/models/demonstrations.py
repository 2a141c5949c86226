"""Training demonstrations as the weights of a model see them: latents, and the action chunks between them."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from atlas_wm.models.bank import flat


@dataclass(frozen=True)
class Demonstrations:
    """M frames of training episodes, stored on the CPU: one action chunk apart, an episode after the other.

    The point of a frame is that of the latent bank: its latent, or the mean of its patch tokens.
    """

    points: Tensor  # (M, m) float16
    actions: (
        Tensor  # (M, frameskip·A) float32 standardised, from each frame to the next; zero after an episode's last
    )
    episodes: Tensor  # (M,) int64, the number of the episode in the dataset

    @classmethod
    def of(cls, pieces: Iterable[tuple[Tensor, Tensor, int]]) -> "Demonstrations":
        """From pieces of episodes: latents (n, …), actions (n, frameskip·A), the number of the episode."""
        parts = [
            (flat(z).to("cpu", torch.float16), actions.float(), torch.full((len(z),), episode))
            for z, actions, episode in pieces
        ]
        return cls(*map(torch.cat, zip(*parts, strict=True)))
