"""The world model and its verbs: encode, predict, rollout, distance."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch import Tensor, nn

from atlas_wm.card import CARD, model_card
from atlas_wm.config import ModelConfig
from atlas_wm.errors import UserError
from atlas_wm.hub import fetch, publish
from atlas_wm.losses.objective import ClipLatents
from atlas_wm.models.bank import LatentBank
from atlas_wm.models.encoders import Tokens, ViTEncoder
from atlas_wm.models.layers import MLP
from atlas_wm.models.predictors import PREDICTORS
from atlas_wm.normalize import Normalizer
from atlas_wm.run_folder import (
    BANK,
    STATES,
    WEIGHTS,
    RunInfo,
    read_run,
    read_states,
    read_weights,
    write_atomically,
    write_info,
    write_tensors,
)


class Features(NamedTuple):
    """Every representation the diagnostics look at, for N frames, from shallow to deep."""

    blocks: list[Tensor]  # CLS after the blocks asked for, (N, w) each
    patch: Tensor  # (N, w) mean of the final patch tokens, the relational anchor
    cls: Tensor  # (N, w)
    z: Tensor  # (N, …) planning latent


class WorldModel(nn.Module):
    """z_t = E(o_t);  ẑ_{t+1} = P(z_{t-2..t}, a_{t-2..t}).

    ``action_size`` is the A of the task; a model step takes a block of ``frameskip`` actions, concatenated.
    Actions here are standardised; ``normalizer`` is the way between them and the environment's. A latent has the
    shape ``config.latent_shape``, written … below: (d,), or (K, w) where patch tokens are the latent.
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
        self.states: bytes | None = None  # the file of training states, which evaluation reads
        block = config.frameskip * action_size
        self.encoder = ViTEncoder(config.encoder)
        self.projector = (
            MLP(config.encoder.width, config.hidden, config.latent, batchnorm=True)
            if config.encoder.kind == "vit"
            else None
        )
        self.predictor = PREDICTORS[config.predictor.kind](config, block)
        self.inverse = MLP(2 * config.latent, config.inverse_hidden, block) if config.inverse_hidden else None

    def encode(self, frames: Tensor) -> Tensor:
        """(N, 3, H, W) uint8 → z (N, …)"""
        return self._latent(self.encoder(frames))

    def _latent(self, tokens: Tokens) -> Tensor:
        return tokens.patches if self.projector is None else self.projector(tokens.cls)

    def features(self, frames: Tensor, blocks: Sequence[int] = ()) -> Features:
        """z and what it is made from. blocks: 1-based encoder blocks (the paper looks at 3, 6 and 9)."""
        tokens = self.encoder(frames, blocks)
        return Features(tokens.blocks, tokens.patches.mean(dim=1), tokens.cls, self._latent(tokens))

    def forward(self, frames: Tensor, actions: Tensor) -> ClipLatents:
        """A batch of clips: (B, T, 3, H, W) uint8 frames and (B, T-1, frameskip·A) standardised actions.

        Of a frozen encoder the tokens may come instead of the frames, computed beforehand: (B, T, K, w) floats.
        """
        if frames.is_floating_point():
            z = frames.float()
            patch = z.mean(dim=-2)
        else:
            clips, steps = frames.shape[:2]
            _, patch, _, z = self.features(frames.flatten(0, 1))
            z, patch = z.unflatten(0, (clips, steps)), patch.unflatten(0, (clips, steps))
        pairs = None if self.inverse is None else torch.cat([z[:, 1:], z[:, :-1]], dim=-1)
        return ClipLatents(
            z=z,
            anchor=patch,
            predicted=self.predictor.predict(z[:, :-1], actions),
            actions=actions,
            inverse=None if pairs is None or self.inverse is None else self.inverse(pairs),
        )

    def predict(self, z: Tensor, actions: Tensor) -> Tensor:
        """z: (B, T, …), actions: (B, T, frameskip·A) → ẑ of the next step after each: (B, T, …)"""
        return self.predictor.predict(z, actions)

    def rollout(self, z: Tensor, actions: Tensor) -> Tensor:
        """Imagine S action sequences from each latent: z (B, …), actions (B, S, H, frameskip·A) → (B, S, H, …)"""
        return self.predictor.rollout(z, actions)

    def terminal(self, z: Tensor, actions: Tensor) -> Tensor:
        """Where those sequences end: (B, S, …)"""
        return self.predictor.terminal(z, actions)

    def distance(self, z: Tensor, goal: Tensor) -> Tensor:
        """What a plan costs that ends in z: ‖z − z_g‖², for patch tokens the mean over tokens and coordinates."""
        gap = (z - goal).square()
        return gap.sum(dim=-1) if self.projector is not None else gap.mean(dim=(-2, -1))

    @torch.no_grad()
    def remember(self, frames: Iterable[Tensor]) -> None:
        """Keep a bank of training frames, batches of (n, 3, S, S) uint8: what plans measure novelty against.

        The model is left in eval mode. Call it again after the weights change.
        """
        self.eval()
        device = next(self.parameters()).device
        self.bank = LatentBank.of(self.encode(some.to(device)) for some in frames)

    @classmethod
    def load(cls, folder: str | Path, device: torch.device | str = "cpu") -> "WorldModel":
        """The trained model of a run folder, in eval mode; ``model.run`` holds its settings."""
        info, normalizer = read_run(folder)
        with torch.device("meta"):  # what the settings ask for takes memory only once the weights agree with it
            expected = cls(info.config.model, info.action_size, normalizer).state_dict()
        weights = read_weights(folder, expected)
        model = cls(info.config.model, info.action_size, normalizer)
        model.load_state_dict(weights)
        model.run = info
        model.bank = LatentBank.read(folder, info.config.model.latent_shape[-1])
        model.states = read_states(folder)
        return model.eval().to(device)

    @classmethod
    def from_pretrained(
        cls, path_or_hub_id: str | Path, device: torch.device | str = "cpu", revision: str | None = None
    ) -> "WorldModel":
        """:meth:`load` for a run folder, or for a repository of the Hugging Face hub as ``user/name``."""
        if Path(path_or_hub_id).is_dir():
            return cls.load(path_or_hub_id, device)
        return cls.load(fetch(str(path_or_hub_id), revision), device)

    def save_pretrained(self, folder: str | Path) -> None:
        """What :meth:`load` needs: settings, weights, normaliser and, if there are, bank and states."""
        if self.run is None:
            raise UserError("only a model that was trained or loaded can be saved: set model.run to its RunInfo")
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_info(folder, self.run, self.normalizer)
        weights = {name: t.detach().cpu().contiguous() for name, t in self.state_dict().items()}
        write_tensors(folder / WEIGHTS, weights)
        if self.bank is None:
            (folder / BANK).unlink(missing_ok=True)  # of another model that was saved here
        else:
            self.bank.write(folder)
        if self.states is not None:
            with write_atomically(folder / STATES) as temporary:
                temporary.write_bytes(self.states)

    def push_to_hub(self, repo_id: str, private: bool | None = None) -> str:
        """Save to a repository of the Hugging Face hub, made where there is none; returns its address.

        Of the path of the data, which tells about your machine, only the last part goes along.
        """
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            assert self.run is not None  # or it could not have been saved
            data = replace(self.run.data, path=Path(self.run.data.path).name)
            write_info(Path(folder), replace(self.run, data=data), self.normalizer)
            parameters = sum(p.numel() for p in self.parameters())
            Path(folder, CARD).write_text(model_card(self.run, parameters, repo_id=repo_id))
            return publish(Path(folder), repo_id, private)
