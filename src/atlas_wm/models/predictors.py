"""The latent dynamics: latents and action chunks in, later latents out.

Training calls ``predict``; planning calls ``rollout`` and ``terminal``, or a faster version of these that the
predictor offers. Your own predictor is a subclass of :class:`Predictor` with a ``predict``
(docs/guides/own-model.md). ``…`` below is the shape of one latent: d numbers, or K patch tokens of w numbers.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from atlas_wm.config import ModelConfig
from atlas_wm.errors import UserError
from atlas_wm.models.layers import MLP, AdaLNBlock, Block, CausalAttention, Pointwise
from atlas_wm.models.structure import departure
from atlas_wm.plugins import build


class Dynamics(Protocol):
    """A world model, or a faster implementation of the same function."""

    def terminal(self, z: Tensor, actions: Tensor) -> Tensor: ...

    def rollout(self, z: Tensor, actions: Tensor) -> Tensor: ...


class Predictor(nn.Module, ABC):
    """What ``model.predictor.kind`` names. ``action_chunk`` is frameskip·A, the size of one model action."""

    fused = False  # train with the fused kernels that it offers, in bf16

    def __init__(self, config: ModelConfig, action_chunk: int):
        super().__init__()
        self.history = config.history

    def fused_obstacle(self) -> str:
        """Why fused kernels cannot train this predictor; "" if they can, once ``fused`` is set."""
        return f"{type(self).__name__} offers none"

    @abstractmethod
    def predict(self, z: Tensor, actions: Tensor) -> Tensor:
        """z: (B, T, …) latents of frames 1..T, actions: (B, T, action_chunk) → ẑ of frames 2..T+1: (B, T, …).

        Step t may depend on steps up to t only: a rollout feeds predictions back. T is at most ``history`` there.
        """

    def rollout(self, z: Tensor, actions: Tensor) -> Tensor:
        """Imagine S action sequences from each latent: z (B, …), actions (B, S, H, action_chunk) → (B, S, H, …).

        Step by step, from the last ``history`` latents.
        """
        flat = actions.flatten(0, 1)
        return self._feed_back(z, actions, lambda window, steps: self.predict(window, flat[:, steps])[:, -1])

    def _feed_back(self, z: Tensor, actions: Tensor, step: Callable[[Tensor, slice], Tensor]) -> Tensor:
        """``step``: a window of latents (B·S, at most history, …) and its steps → the next latent (B·S, …)"""
        batch, samples, horizon, _ = actions.shape
        latents = [z.repeat_interleave(samples, dim=0)]
        for last in range(horizon):
            first = max(0, last + 1 - self.history)
            latents.append(step(torch.stack(latents[first:], dim=1), slice(first, last + 1)))
        return torch.stack(latents[1:], dim=1).unflatten(0, (batch, samples))

    def terminal(self, z: Tensor, actions: Tensor) -> Tensor:
        """The last latents of the rollout alone: (B, S, …)"""
        return self.rollout(z, actions)[:, :, -1]

    def fast_rollout(self, dtype: torch.dtype, capturable: bool = False) -> Dynamics | None:
        """A faster implementation of ``rollout`` and ``terminal`` in eval mode, or None. A UserError says why the
        one there is does not fit.

        ``dtype``: of its products; it takes and returns float32. ``capturable``: it has to run inside a CUDA graph.
        It may copy the weights: the planner asks again when they change, and compares it with ``rollout`` first.
        """
        return None


def action_mlp(config: ModelConfig, action_chunk: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(action_chunk, config.action_smooth),
        nn.Linear(config.action_smooth, config.action_hidden),
        nn.SiLU(),
        nn.Linear(config.action_hidden, config.predictor.width),
    )


class AutoregressivePredictor(Predictor):
    """A predictor with an action encoder. A rollout embeds each action once, and reads only the last of the hidden
    steps."""

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
        embedded = self.action_encoder(actions.flatten(0, 1))  # (B·S, H, e)
        return self._feed_back(z, actions, lambda window, steps: self.read(self(window, embedded[:, steps])[:, -1]))


class CausalPredictor(AutoregressivePredictor):
    """LeWM: a causal Transformer over latents, conditioned on the action of each step."""

    settings: tuple[ModelConfig, int] | None = None  # its arguments

    def __init__(self, config: ModelConfig, action_chunk: int):
        super().__init__(config, action_chunk)
        p = config.predictor
        self.settings = config, action_chunk
        self.action_encoder = action_mlp(config, action_chunk)
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
        """A subclass or a changed module computes another function, and gets a UserError."""
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
        """The first difference from what this class builds, these methods included; "" if there is none."""
        if self.settings is None:
            return f"{type(self).__name__} is not built as CausalPredictor is"
        with torch.device("meta"):
            reference = CausalPredictor(*self.settings)
        return departure(self, reference, methods)


class PatchPredictor(AutoregressivePredictor):
    """DINO-WM: a Transformer over the patch tokens of all steps, causal over steps.

    A small embedding of the action is appended to every token of its step.
    """

    def __init__(self, config: ModelConfig, action_chunk: int):
        super().__init__(config, action_chunk)
        p = config.predictor
        self.patches, self.token = config.latent_shape
        width = self.token + config.action_smooth
        self.action_encoder = nn.Linear(action_chunk, config.action_smooth)
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
    """FAST-WM: the latent after each action prefix in one pass, without feeding predictions back.

    A causal Transformer encodes the current latent and the action chunks into one token per prefix. Each token
    conditions pointwise blocks that map the current latent to the latent after that prefix.
    """

    position: Tensor

    def __init__(self, config: ModelConfig, action_chunk: int):
        super().__init__(config, action_chunk)
        p = config.predictor
        self.action_encoder = action_mlp(config, action_chunk)
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
                f"{actions.shape[1]} action chunks are more than the {len(self.position) - 1} that this model was "
                f"trained on: plan with a shorter horizon, or train with a larger --model.predictor.prefixes"
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
        """From the first latent alone: the others are what it predicts."""
        return self.carry(z[:, 0], self.encode_prefixes(z[:, 0], actions))

    def rollout(self, z: Tensor, actions: Tensor) -> Tensor:
        starts = z.repeat_interleave(actions.shape[1], dim=0)
        ends = self.carry(starts, self.encode_prefixes(starts, actions.flatten(0, 1)))
        return ends.unflatten(0, actions.shape[:2])

    def terminal(self, z: Tensor, actions: Tensor) -> Tensor:
        starts = z.repeat_interleave(actions.shape[1], dim=0)
        whole = self.encode_prefixes(starts, actions.flatten(0, 1))[:, -1:]
        return self.carry(starts, whole)[:, 0].unflatten(0, actions.shape[:2])


PREDICTORS: dict[str, type[Predictor]] = {
    "causal": CausalPredictor,
    "patch": PatchPredictor,
    "prefix": PrefixPredictor,
}


def make_predictor(config: ModelConfig, action_chunk: int) -> Predictor:
    return build("predictor", config.predictor.kind, PREDICTORS, Predictor, config, action_chunk)
