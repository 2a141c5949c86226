"""The world model and its verbs: encode, predict, rollout."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from atlas_wm.config import ModelConfig
from atlas_wm.errors import UserError
from atlas_wm.losses.objective import ClipLatents
from atlas_wm.models.encoders import ViTEncoder
from atlas_wm.models.layers import MLP
from atlas_wm.models.predictors import CausalPredictor
from atlas_wm.normalize import Normalizer
from atlas_wm.run_folder import RunInfo, read_run, read_weights


class Features(NamedTuple):
    """Every representation the diagnostics look at, for N frames, from shallow to deep."""

    blocks: list[Tensor]  # CLS after the blocks asked for, (N, w) each
    patch: Tensor  # (N, w) mean of the final patch tokens, the relational anchor
    cls: Tensor  # (N, w)
    z: Tensor  # (N, d) planning latent


class WorldModel(nn.Module):
    """z_t = E(o_t);  ẑ_{t+1} = P(z_{t-2..t}, a_{t-2..t}).

    ``action_size`` is the A of the task; a model step takes a block of ``frameskip`` actions, concatenated.
    Actions here are standardised; ``normalizer`` is the way between them and the environment's.
    """

    def __init__(self, config: ModelConfig, action_size: int, normalizer: Normalizer | None = None):
        super().__init__()
        self.config = config
        self.action_size = action_size
        self.normalizer = normalizer or Normalizer((0.0,) * action_size, (1.0,) * action_size)
        if self.normalizer.size != action_size:
            raise UserError(f"the normaliser has {self.normalizer.size} coordinates, actions {action_size}")
        self.run: RunInfo | None = None
        self.encoder = ViTEncoder(config.encoder)
        self.projector = MLP(config.encoder.width, config.hidden, config.latent, batchnorm=True)
        self.predictor = CausalPredictor(config, config.frameskip * action_size)
        self.head = MLP(config.predictor.width, config.hidden, config.latent, batchnorm=True)

    def encode(self, frames: Tensor) -> Tensor:
        """(N, 3, H, W) uint8 → z (N, d)"""
        return self.projector(self.encoder(frames).cls)

    def features(self, frames: Tensor, blocks: Sequence[int] = ()) -> Features:
        """z and what it is made from. blocks: 1-based encoder blocks (the paper looks at 3, 6 and 9)."""
        tokens = self.encoder(frames, blocks)
        return Features(tokens.blocks, tokens.patches.mean(dim=1), tokens.cls, self.projector(tokens.cls))

    def predict(self, z: Tensor, actions: Tensor) -> Tensor:
        """z: (B, T, d), actions: (B, T, frameskip·A) → ẑ of the next step after each: (B, T, d)"""
        return self.head(self.predictor(z, self.predictor.action_encoder(actions)))

    def forward(self, frames: Tensor, actions: Tensor) -> ClipLatents:
        """A batch of clips. frames: (B, T, 3, H, W) uint8, actions: (B, T-1, frameskip·A) standardised."""
        clips, steps = frames.shape[:2]
        _, patch, _, z = self.features(frames.flatten(0, 1))
        z, patch = z.unflatten(0, (clips, steps)), patch.unflatten(0, (clips, steps))
        return ClipLatents(z=z, anchor=patch, predicted=self.predict(z[:, :-1], actions))

    def rollout(self, z: Tensor, actions: Tensor) -> Tensor:
        """Imagine S action sequences from each latent: the latents after each of the H blocks.

        z: (B, d), actions: (B, S, H, frameskip·A) → (B, S, H, d). The predictor sees at most the last
        ``history`` latents; positions start at 0 in every window.
        """
        batch, samples, horizon, _ = actions.shape
        embedded = self.predictor.action_encoder(actions.flatten(0, 1))  # (B·S, H, width)
        latents = [z.repeat_interleave(samples, dim=0)]
        for step in range(horizon):
            first = max(0, step + 1 - self.config.history)
            window = torch.stack(latents[first:], dim=1)
            hidden = self.predictor(window, embedded[:, first : step + 1])
            latents.append(self.head(hidden[:, -1]))
        return torch.stack(latents[1:], dim=1).unflatten(0, (batch, samples))

    @classmethod
    def load(cls, folder: str | Path, device: torch.device | str = "cpu") -> "WorldModel":
        """The trained model of a run folder, in eval mode; ``model.run`` holds its settings."""
        info, normalizer = read_run(folder)
        model = cls(info.config.model, info.action_size, normalizer)
        weights = read_weights(folder)
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            raise UserError(f"{folder}: model.safetensors does not fit its config.json: {error}") from error
        model.run = info
        return model.eval().to(device)
