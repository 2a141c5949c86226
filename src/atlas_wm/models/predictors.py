"""The latent dynamics: latents and action blocks in, later latents out.

A predictor is anything with ``predict`` (for training), ``rollout`` and ``terminal`` (for planning); it may offer a
faster way to compute the last two. ``…`` below is the shape of one latent: d numbers, or K patch tokens of w
numbers.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from atlas_wm.config import ModelConfig
from atlas_wm.errors import UserError
from atlas_wm.models.layers import MLP, AdaLNBlock, Block, CausalAttention, Pointwise
from atlas_wm.models.structure import departure


class Dynamics(Protocol):
    """A world model, or something faster that computes the same."""

    def terminal(self, z: Tensor, actions: Tensor) -> Tensor: ...

    def rollout(self, z: Tensor, actions: Tensor) -> Tensor: ...


class Predictor(nn.Module, ABC):
    fused = False  # train with the fused kernels it offers, in bf16

    def fused_obstacle(self) -> str:
        """Why fused kernels cannot train this predictor; "" if they can, once ``fused`` is set."""
        return f"{type(self).__name__} offers none"

    @abstractmethod
    def predict(self, z: Tensor, actions: Tensor) -> Tensor:
        """z: (B, T, …) latents of frames 1..T, actions: (B, T, A) blocks → ẑ of frames 2..T+1: (B, T, …)"""

    @abstractmethod
    def rollout(self, z: Tensor, actions: Tensor) -> Tensor:
        """Imagine S action sequences from each latent: z (B, …), actions (B, S, H, A) → (B, S, H, …)"""

    def terminal(self, z: Tensor, actions: Tensor) -> Tensor:
        """Only the ends of the same: (B, S, …)"""
        return self.rollout(z, actions)[:, :, -1]

    def fast_rollout(self, dtype: torch.dtype, capturable: bool = False) -> Dynamics | None:
        """Something that computes ``rollout`` and ``terminal`` faster, in eval mode. None: there is no such thing.
        A UserError says why it cannot be used.

        ``dtype``: of its products; it takes and returns float32. ``capturable``: it has to run inside a CUDA graph.
        The weights may be copied: the planner asks again when they change. It compares before it uses.
        """
        return None


def action_mlp(config: ModelConfig, action_block: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(action_block, config.action_smooth),
        nn.Linear(config.action_smooth, config.action_hidden),
        nn.SiLU(),
        nn.Linear(config.action_hidden, config.predictor.width),
    )


class _Autoregressive(Predictor):
    """Predicts one step from at most ``history`` steps, and feeds its predictions back."""

    history: int
    action_encoder: nn.Module

    @abstractmethod
    def forward(self, z: Tensor, embedded_actions: Tensor) -> Tensor:
        """z: (B, T, …), embedded_actions: (B, T, e) → what ``read`` makes the next latents of; T ≤ history."""

    @abstractmethod
    def read(self, hidden: Tensor) -> Tensor:
        """Hidden steps → latents (…)"""

    def predict(self, z: Tensor, actions: Tensor) -> Tensor:
        return self.read(self(z, self.action_encoder(actions)))

    def rollout(self, z: Tensor, actions: Tensor) -> Tensor:
        """The predictor sees at most the last ``history`` latents; positions start at 0 in every window."""
        batch, samples, horizon, _ = actions.shape
        embedded = self.action_encoder(actions.flatten(0, 1))  # (B·S, H, e)
        latents = [z.repeat_interleave(samples, dim=0)]
        for step in range(horizon):
            first = max(0, step + 1 - self.history)
            window = torch.stack(latents[first:], dim=1)
            latents.append(self.read(self(window, embedded[:, first : step + 1])[:, -1]))
        return torch.stack(latents[1:], dim=1).unflatten(0, (batch, samples))


class CausalPredictor(_Autoregressive):
    """LeWM's: a causal Transformer over latents, conditioned on the action of each step."""

    settings: tuple[ModelConfig, int] | None = None  # what it was made with

    def __init__(self, config: ModelConfig, action_block: int):
        super().__init__()
        p = config.predictor
        self.settings = config, action_block
        self.history = config.history
        self.action_encoder = action_mlp(config, action_block)
        self.enter = nn.Linear(config.latent, p.width) if config.latent != p.width else nn.Identity()
        self.positions = nn.Parameter(p.positions_std * torch.randn(config.history, p.width))
        self.blocks = nn.ModuleList(
            AdaLNBlock(p.width, CausalAttention(p.width, p.heads, p.head_dim, p.dropout), p.mlp, p.dropout)
            for _ in range(p.depth)
        )
        self.norm = nn.LayerNorm(p.width)
        self.head = MLP(p.width, config.hidden, config.latent, batchnorm=True)

    def forward(self, z: Tensor, embedded_actions: Tensor) -> Tensor:
        x = self.enter(z) + self.positions[: z.shape[1]]
        if self.fused and self.training:
            from atlas_wm.kernels.predictor import fused_blocks  # needs Triton

            return fused_blocks(self, x, embedded_actions)
        for block in self.blocks:
            x = block(x, embedded_actions)
        return self.norm(x)

    def read(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def fast_rollout(self, dtype: torch.dtype, capturable: bool = False) -> Dynamics | None:
        """Refused where a subclass, or a change to the module, makes it another function."""
        if why := self.departure(("forward", "read", "rollout", "terminal")):
            raise UserError(why)
        if capturable:
            from atlas_wm.kernels.rollout_triton import TritonTerminal  # needs Triton

            return TritonTerminal(self, dtype)
        from atlas_wm.kernels.rollout import FastTerminal, PackedProduct

        return FastTerminal(self, dtype, self.positions.device.type == "cpu" and PackedProduct.supported(dtype))

    def fused_obstacle(self) -> str:
        try:
            from atlas_wm.kernels import predictor as kernels
        except ImportError:
            return "that takes Triton"
        if self.settings is not None and not kernels.supports(self.settings[0]):
            return f"that takes {kernels.TAKES}"
        return self.departure(("forward",))

    def departure(self, methods: Sequence[str]) -> str:
        """What is not as this class makes it, these methods included; "" if all is."""
        if self.settings is None:
            return f"{type(self).__name__} is built in its own way"
        with torch.device("meta"):
            reference = CausalPredictor(*self.settings)
        return departure(self, reference, methods)


class PatchPredictor(_Autoregressive):
    """DINO-WM's: a Transformer over the patch tokens of all steps, causal over steps.

    A small embedding of the action is appended to every token of its step.
    """

    def __init__(self, config: ModelConfig, action_block: int):
        super().__init__()
        p = config.predictor
        self.history = config.history
        self.patches, self.token = config.latent_shape
        width = self.token + config.action_smooth
        self.action_encoder = nn.Linear(action_block, config.action_smooth)
        self.positions = nn.Parameter(p.positions_std * torch.randn(config.history * self.patches, width))
        self.blocks = nn.ModuleList(
            Block(width, CausalAttention(width, p.heads, p.head_dim, p.dropout, self.patches), p.mlp, p.dropout)
            for _ in range(p.depth)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, z: Tensor, embedded_actions: Tensor) -> Tensor:
        tiled = embedded_actions[:, :, None].expand(-1, -1, self.patches, -1)  # (B, T, K, e)
        x = torch.cat([z, tiled], dim=-1).flatten(1, 2)  # (B, T·K, w + e)
        x = x + self.positions[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x).unflatten(1, (-1, self.patches))

    def read(self, hidden: Tensor) -> Tensor:
        return hidden[..., : self.token]


def sinusoids(count: int, width: int) -> Tensor:
    """Fixed positions of the Transformer: sines and cosines from wavelength 2π to 20,000π. (count, width)"""
    angle = torch.arange(count)[:, None] * torch.exp(-math.log(10_000) * torch.arange(0, width, 2) / width)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :width]


class PrefixPredictor(Predictor):
    """FAST-WM's: the latent after each action prefix in one pass, without feeding predictions back.

    A causal Transformer reads the current latent and the action blocks; what it makes of each prefix then
    conditions pointwise blocks that carry the current latent to the one after that prefix.
    """

    position: Tensor

    def __init__(self, config: ModelConfig, action_block: int):
        super().__init__()
        p = config.predictor
        self.action_encoder = action_mlp(config, action_block)
        self.enter = nn.Linear(config.latent, p.width) if config.latent != p.width else nn.Identity()
        self.register_buffer("position", sinusoids(1 + p.prefixes, p.width), persistent=False)
        self.prefix_blocks = nn.ModuleList(
            Block(
                p.width,
                CausalAttention(p.width, p.prefix_heads, p.prefix_head_dim, p.dropout),
                p.prefix_mlp,
                p.dropout,
            )
            for _ in range(p.prefix_depth)
        )
        self.prefix_norm = nn.LayerNorm(p.width)
        self.blocks = nn.ModuleList(
            AdaLNBlock(p.width, Pointwise(p.width, p.heads * p.head_dim), p.mlp, p.dropout) for _ in range(p.depth)
        )
        self.norm = nn.LayerNorm(p.width)
        self.head = MLP(p.width, config.hidden, config.latent, batchnorm=True)

    def encode_prefixes(self, z: Tensor, actions: Tensor) -> Tensor:
        """z: (B, d) the current latent, actions: (B, H, A) → a token for each prefix, (B, H, width)"""
        if actions.shape[1] >= len(self.position):
            raise UserError(
                f"{actions.shape[1]} action blocks are more than the {len(self.position) - 1} this model knows: "
                f"plan with a shorter horizon, or train with a larger --model.predictor.prefixes"
            )
        x = torch.cat([self.enter(z)[:, None], self.action_encoder(actions)], dim=1)
        x = x + self.position[: x.shape[1]]
        for block in self.prefix_blocks:
            x = block(x)
        return self.prefix_norm(x[:, 1:])

    def carry(self, z: Tensor, prefix: Tensor) -> Tensor:
        """z: (B, d), prefix: (B, n, width) → the latent after each prefix, (B, n, d)"""
        x = self.enter(z)[:, None].expand_as(prefix)
        for block in self.blocks:
            x = block(x, prefix)
        return self.head(self.norm(x))

    def predict(self, z: Tensor, actions: Tensor) -> Tensor:
        """Only the first latent is looked at: the others are what it has to foresee."""
        return self.carry(z[:, 0], self.encode_prefixes(z[:, 0], actions))

    def rollout(self, z: Tensor, actions: Tensor) -> Tensor:
        starts = z.repeat_interleave(actions.shape[1], dim=0)
        ends = self.carry(starts, self.encode_prefixes(starts, actions.flatten(0, 1)))
        return ends.unflatten(0, actions.shape[:2])

    def terminal(self, z: Tensor, actions: Tensor) -> Tensor:
        starts = z.repeat_interleave(actions.shape[1], dim=0)
        whole = self.encode_prefixes(starts, actions.flatten(0, 1))[:, -1:]
        return self.carry(starts, whole)[:, 0].unflatten(0, actions.shape[:2])


PREDICTORS: dict[str, type[CausalPredictor | PatchPredictor | PrefixPredictor]] = {
    "causal": CausalPredictor,
    "patch": PatchPredictor,
    "prefix": PrefixPredictor,
}
