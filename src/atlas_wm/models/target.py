"""The target network: an exponential moving average (EMA) of encoder and projector.

    θ' ← decay · θ' + (1 − decay) · θ   after every update of the weights θ; θ' = θ at the start

No gradient reaches it. BatchNorm statistics are not averaged: as the online network does, the target normalises by
those of the batch in training, and follows their running averages with its own weights.
"""

from copy import deepcopy

import torch
from torch import Tensor, nn

from atlas_wm.models.layers import MLP


class EmaTarget(nn.Module):
    def __init__(self, encoder: nn.Module, projector: MLP, decay: float):
        super().__init__()
        self.encoder, self.projector = deepcopy(encoder), deepcopy(projector)
        self.decay = decay
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, frames: Tensor) -> Tensor:
        """(N, 3, H, W) uint8 → (N, d) latents that predictions are compared with"""
        return self.projector(self.encoder(frames).cls)

    @torch.no_grad()
    def follow(self, encoder: nn.Module, projector: nn.Module) -> None:
        """Move towards the weights of the online network. It waits for no device, so a CUDA graph can hold it."""
        online: list[Tensor] = [*encoder.parameters(), *projector.parameters()]
        torch._foreach_lerp_([*self.parameters()], online, 1 - self.decay)
