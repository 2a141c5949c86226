"""The colours that training frames have in each part of the image, to measure how novel another image is.

The latent keeps what prediction needs, so it may not see a door that moved or an agent of another colour. Colours
at a low resolution do; docs/notes/novelty.md compares this with other detectors.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from atlas_wm.images import reduce_frames
from atlas_wm.models.geometry import percentile

SIDE = 16  # images are reduced to SIDE × SIDE pixels
COLOURS = 32  # stored for each pixel
WORST = 3  # pixels that count
FAMILIAR = 0.99  # of held-out frames
UNUSUAL = 60.0  # distance of a colour from the usual one of its pixel, in grey levels


@dataclass(frozen=True)
class ImageBank:
    """Colours of each of P = SIDE² pixels in training frames, and the novelty of held-out frames, on the CPU.

    The novelty of an image is the sum, over its 3 worst pixels, of the squared distance to the nearest colour of
    that pixel. All numbers are whole and small, so it is exact: the same in every batch and on every device.
    """

    colours: Tensor  # (P, COLOURS, 3) uint8
    novelty: Tensor  # (R,) float32, of each held-out frame

    @classmethod
    def of(cls, frames: Iterable[Tensor], held_out: Iterable[Tensor]) -> "ImageBank":
        """From batches of training frames and of held-out frames, (n, 3, S, S) uint8 each."""
        bank = cls(_spread(torch.cat([_pixels(some.cpu()) for some in frames], dim=1)), torch.empty(0))
        return cls(bank.colours, torch.cat([bank.novelty_of(some.cpu()) for some in held_out]))

    def novelty_of(self, frames: Tensor) -> Tensor:
        """(Q, 3, S, S) uint8 → (Q,) float32"""
        return self._distances(frames).topk(WORST, dim=0).values.sum(dim=0)

    def changed(self, frames: Tensor) -> Tensor:
        """Which pixels are by themselves more novel than 99 of 100 held-out frames: (Q, 3, S, S) uint8 → (Q, P)"""
        return (self._distances(frames) > self.novelty.quantile(FAMILIAR).to(frames.device)).T

    def _distances(self, frames: Tensor) -> Tensor:
        """Squared, of each pixel to its nearest colour: (Q, 3, S, S) uint8 → (P, Q) float32"""
        pixels, colours = _pixels(frames), self.colours.to(frames.device).float()
        return (pixels[:, :, None] - colours[:, None]).square().sum(dim=-1).amin(dim=-1)

    def percentiles(self, frames: Tensor) -> Tensor:
        """How novel frames (Q, 3, S, S) uint8 are, as percentiles among held-out frames: (Q,), 0 to 100."""
        return percentile(self.novelty_of(frames), self.novelty.to(frames.device))


def footprints(frames: Iterable[Tensor]) -> Tensor:
    """Where something is in each of N frames, batches (n, 3, S, S) uint8: the pixels with another colour than most
    frames have there. (N, P) bool."""
    pixels = torch.cat([_pixels(some.cpu()) for some in frames], dim=1)
    usual = pixels.median(dim=1, keepdim=True).values
    return ((pixels - usual).square().sum(dim=-1) > UNUSUAL**2).T.contiguous()


def _pixels(frames: Tensor) -> Tensor:
    """(n, 3, S, S) uint8 → (P, n, 3) float32, 0 to 255"""
    return reduce_frames(frames, SIDE).flatten(2).permute(2, 0, 1).float()


def _spread(pixels: Tensor) -> Tensor:
    """(P, n, 3) → (P, COLOURS, 3): of the n colours of each pixel, each the farthest from those before it."""
    each, chosen = torch.arange(len(pixels)), [pixels[:, 0]]
    distance = torch.full(pixels.shape[:2], torch.inf)
    while len(chosen) < COLOURS:
        distance = torch.minimum(distance, (pixels - chosen[-1][:, None]).square().sum(dim=-1))
        chosen.append(pixels[each, distance.argmax(dim=1)])
    return torch.stack(chosen, dim=1).to(torch.uint8)
