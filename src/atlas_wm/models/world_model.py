"""The world model and its verbs: encode, predict, rollout, distance."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from atlas_wm.config import ModelConfig, ObjectiveConfig, PlanConfig, RunInfo
from atlas_wm.errors import UserError
from atlas_wm.images import reduce_frames
from atlas_wm.losses.objective import ClipLatents
from atlas_wm.losses.own_terms import make_terms
from atlas_wm.models.bank import LatentBank
from atlas_wm.models.demonstrations import Demonstrations, Piece
from atlas_wm.models.encoders import Tokens, make_encoder
from atlas_wm.models.image_bank import SIDE, ImageBank, footprints
from atlas_wm.models.layers import MLP
from atlas_wm.models.predictors import make_predictor
from atlas_wm.models.target import EmaTarget
from atlas_wm.models.temporal_head import TemporalHead
from atlas_wm.normalizer import Normalizer

TRAINING_ONLY = ("target.", "terms.")  # parts of state_dict() while a model is trained; a loaded model has none


class Features(NamedTuple):
    """Every representation that diagnostics read, for N frames, from shallow to deep."""

    blocks: list[Tensor]  # CLS after each requested block, (N, w) each
    patch: Tensor  # (N, w) mean of the final patch tokens, the relational anchor
    cls: Tensor  # (N, w)
    z: Tensor  # (N, …) planning latent


class WorldModel(nn.Module):
    """z_t = E(o_t);  ẑ_{t+1} = P(z_{t-2..t}, a_{t-2..t}).

    ``action_size`` is the A of the task; a model step takes an action chunk: ``frameskip`` actions, concatenated.
    Actions are standardised here; ``normalizer`` converts them from and to the environment's units. A latent has
    the shape ``config.latent_shape``, written … below: (d,), or (K, w) where patch tokens are the latent.
    """

    def __init__(self, config: ModelConfig, action_size: int, normalizer: Normalizer | None = None):
        super().__init__()
        self.config = config
        self.action_size = action_size
        self.normalizer = normalizer or Normalizer((0.0,) * action_size, (1.0,) * action_size)
        if self.normalizer.size != action_size:
            raise UserError(f"the normaliser has {self.normalizer.size} coordinates, actions {action_size}")
        self.run: RunInfo | None = None
        self.bank: LatentBank | None = None  # of training frames, as these weights see them
        self.demonstrations: Demonstrations | None = None  # likewise, to start a search from
        self.temporal_head: TemporalHead | None = None  # fitted to these weights, for plan.cost temporal
        self.states: bytes | None = None  # the file of training states, which evaluation reads
        chunk = config.frameskip * action_size
        self.encoder = make_encoder(config.encoder)
        self.projector = (
            None
            if config.encoder.frozen
            else MLP(config.encoder.width, config.hidden, config.latent, batchnorm=True)
        )
        self.predictor = make_predictor(config, chunk)
        self.inverse = MLP(2 * config.latent, config.inverse_hidden, chunk) if config.inverse_hidden else None
        self.target: EmaTarget | None = None  # while it is trained with objective.target ema
        self.terms = nn.ModuleDict()  # while it is trained: the user's loss terms that have parameters

    def prepare_training(self, objective: ObjectiveConfig) -> None:
        """Add the modules that only training needs. They are in ``state_dict()`` and so in checkpoints, but not in
        the run's ``model.safetensors``, and a loaded model has none."""
        self.target = None
        if objective.target == "ema":
            assert self.projector is not None  # RunConfig checks it
            self.target = EmaTarget(self.encoder, self.projector, objective.ema_decay)
        self.terms = make_terms(objective, self.config, self.action_size)

    def update_target(self) -> None:
        """Move the EMA target, if there is one, after an update of the weights."""
        if self.target is not None and self.projector is not None:
            self.target.follow(self.encoder, self.projector)

    def encode(self, frames: Tensor) -> Tensor:
        """(N, 3, H, W) uint8 → z (N, …)"""
        return self._latent(self.encoder(frames))

    def _latent(self, tokens: Tokens) -> Tensor:
        if tokens.cls.shape[-1] != self.config.encoder.width:
            raise UserError(
                f"{type(self.encoder).__name__} returned tokens of {tokens.cls.shape[-1]} numbers, not of "
                f"encoder.width {self.config.encoder.width}: set --model.encoder.width to that"
            )
        return tokens.patches if self.projector is None else self.projector(tokens.cls)

    def features(self, frames: Tensor, blocks: Sequence[int] = ()) -> Features:
        """z and the features before it. blocks: 1-based encoder blocks (the paper reads 3, 6 and 9)."""
        tokens = self.encoder(frames, blocks)
        return Features(tokens.blocks, tokens.patches.mean(dim=1), tokens.cls, self._latent(tokens))

    def forward(self, frames: Tensor, actions: Tensor) -> ClipLatents:
        """A batch of clips: (B, T, 3, H, W) uint8 frames and (B, T-1, frameskip·A) standardised actions.

        Of a frozen encoder the tokens may come instead of the frames, computed beforehand: (B, T, K, w) floats.
        """
        target = None
        if frames.is_floating_point():
            z = frames.float()
            patch = z.mean(dim=-2)
        else:
            clips, steps = frames.shape[:2]
            _, patch, _, z = self.features(frames.flatten(0, 1))
            z, patch = z.unflatten(0, (clips, steps)), patch.unflatten(0, (clips, steps))
            if self.target is not None:  # of all frames, for a BatchNorm over the same batch as the online one
                target = self.target(frames.flatten(0, 1)).unflatten(0, (clips, steps))[:, 1:]
        pairs = None if self.inverse is None else torch.cat([z[:, 1:], z[:, :-1]], dim=-1)
        return ClipLatents(
            z=z,
            anchor=patch,
            predicted=self.predictor.predict(z[:, :-1], actions),
            actions=actions,
            inverse=None if pairs is None or self.inverse is None else self.inverse(pairs),
            target=target,
        )

    def predict(self, z: Tensor, actions: Tensor) -> Tensor:
        """z: (B, T, …), actions: (B, T, frameskip·A) → ẑ of the next step after each: (B, T, …)"""
        return self.predictor.predict(z, actions)

    def rollout(self, z: Tensor, actions: Tensor) -> Tensor:
        """Imagine S action sequences from each latent: z (B, …), actions (B, S, H, frameskip·A) → (B, S, H, …)"""
        return self.predictor.rollout(z, actions)

    def terminal(self, z: Tensor, actions: Tensor) -> Tensor:
        """The last latents of the rollout alone: (B, S, …)"""
        return self.predictor.terminal(z, actions)

    def distance(self, z: Tensor, goal: Tensor) -> Tensor:
        """Distance from the goal: ‖z − z_g‖², for patch tokens the mean over tokens and coordinates."""
        gap = (z - goal).square()
        return gap.sum(dim=-1) if self.projector is not None else gap.mean(dim=(-2, -1))

    @torch.no_grad()
    def build_bank(self, frames: Iterable[Tensor], images: ImageBank | None = None) -> None:
        """Store the latents of training frames, batches of (n, 3, S, S) uint8: plans measure novelty against them,
        and that of images against ``images``.

        Leaves the model in eval mode. Call it again after the weights change.
        """
        self.eval()
        device, small = next(self.parameters()).device, list[Tensor]()

        def latents() -> Iterator[Tensor]:
            for some in frames:
                small.append(reduce_frames(some.cpu(), SIDE))
                yield self.encode(some.to(device))

        self.bank = replace(LatentBank.of(latents()), images=images, footprints=footprints(small))

    @torch.no_grad()
    def build_demonstrations(self, pieces: Iterable[tuple[Tensor, Tensor, int]]) -> None:
        """Store demonstrations: a search can start from them (plan.start retrieval), and plans measure against them
        how far they stray.

        Pieces of training episodes in order: frames (n, 3, S, S) uint8, one action chunk apart, the standardised
        chunks after each (n, frameskip·A), and the number of the episode. Leaves the model in eval mode. Call it
        again after the weights change.
        """
        self.eval()
        device = next(self.parameters()).device
        horizon = (self.run.config.plan if self.run else PlanConfig()).horizon

        def encoded() -> Iterator[Piece]:
            for frames, actions, episode in pieces:
                z = self.encode(frames.to(device))
                starts = torch.arange(max(0, len(z) - horizon))[::horizon]
                paths = z.new_empty(0, 1 + horizon, *z.shape[1:])
                if len(starts):  # a predictor need not take an empty batch
                    after = actions[starts[:, None] + torch.arange(horizon)].to(device)
                    imagined = self.rollout(z[starts], after[:, None])[:, 0]
                    paths = torch.cat([z[starts][:, None], imagined], dim=1)
                yield Piece(z, actions, episode, paths)

        self.demonstrations = Demonstrations.of(encoded())
