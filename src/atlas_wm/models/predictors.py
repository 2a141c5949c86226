"""The latent dynamics: past latents and action blocks in, next latents out."""

import torch
from torch import Tensor, nn

from atlas_wm.config import ModelConfig
from atlas_wm.models.layers import AdaLNBlock


class CausalPredictor(nn.Module):
    """Causal Transformer over at most ``history`` steps, conditioned on the action of each step."""

    def __init__(self, config: ModelConfig, action_block: int):
        super().__init__()
        p = config.predictor
        self.action_encoder = nn.Sequential(
            nn.Linear(action_block, config.action_smooth),
            nn.Linear(config.action_smooth, config.action_hidden),
            nn.SiLU(),
            nn.Linear(config.action_hidden, p.width),
        )
        self.enter = nn.Linear(config.latent, p.width) if config.latent != p.width else nn.Identity()
        self.positions = nn.Parameter(p.positions_std * torch.randn(config.history, p.width))
        self.blocks = nn.ModuleList(
            AdaLNBlock(p.width, p.heads, p.head_dim, p.mlp, p.dropout) for _ in range(p.depth)
        )
        self.norm = nn.LayerNorm(p.width)

    def forward(self, z: Tensor, embedded_actions: Tensor) -> Tensor:
        """z: (B, T, d), embedded_actions: (B, T, width) → (B, T, width), T ≤ history."""
        x = self.enter(z) + self.positions[: z.shape[1]]
        for block in self.blocks:
            x = block(x, embedded_actions)
        return self.norm(x)
