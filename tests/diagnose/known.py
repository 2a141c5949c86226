"""Runs whose diagnostics are known beforehand: a frame is the state itself, a latent linear in it."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn

from atlas_wm.config import PlanConfig
from atlas_wm.diagnose.frozen_run import FrozenRun
from atlas_wm.diagnose.queries import Queries
from atlas_wm.models.world_model import Features
from atlas_wm.normalizer import Normalizer

FRAMESKIP = 5


@dataclass(frozen=True)
class Walks:
    """As much of a dataset as diagnostics look at: an action is a step."""

    states: np.ndarray  # (R, 2)

    def frames_of(self, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(self.states[rows])


def walks(rows: int = 90, seed: int = 0) -> Walks:
    return Walks(np.random.default_rng(seed).normal(size=(rows, 2)).cumsum(axis=0).astype(np.float32))


class LinearModel(nn.Module):
    """z = x·M, the anchor is x. Imagined steps are ``slip`` times the true ones: 1 is a perfect predictor."""

    def __init__(self, matrix: Tensor, slip: float = 1.0, shift: float = 0.0):
        super().__init__()
        self.matrix, self.slip, self.shift = nn.Parameter(matrix, requires_grad=False), slip, shift
        self.normalizer = Normalizer((3.0, -1.0), (0.5, 2.0))

    def encode(self, frames: Tensor) -> Tensor:
        return frames @ self.matrix + self.shift

    def features(self, frames: Tensor, blocks=()) -> Features:
        return Features([frames * block for block in blocks], frames, frames[:, :1], self.encode(frames))

    def rollout(self, z: Tensor, actions: Tensor) -> Tensor:
        """z: (B, d), actions: (B, S, H, frameskip·2)"""
        steps = self.normalizer.invert(actions.unflatten(-1, (FRAMESKIP, 2))).sum(dim=-2).cumsum(dim=-2)
        return z[:, None, None] + self.slip * steps @ self.matrix


class KnownRun(FrozenRun):
    probed_blocks = (1, 2)

    def __init__(self, model: LinearModel, data: Walks | None = None, simulator=None):
        self.model, self.data, self.simulator = model, data or walks(), simulator
        self.training = self.data
        self.bank_rows = np.arange(0, len(self.data.states), 3)
        self.info = SimpleNamespace(config=SimpleNamespace(plan=PlanConfig()))

    def frames_of_states(self, states: np.ndarray) -> Tensor:
        return torch.from_numpy(states)


def identity(**options) -> KnownRun:
    return KnownRun(LinearModel(torch.eye(2), **options))


def skewed(**options) -> KnownRun:
    """Four coordinates that keep the state but change its distances."""
    return KnownRun(LinearModel(torch.randn(2, 4, generator=torch.Generator().manual_seed(1)), **options))


def collapsed(**options) -> KnownRun:
    return KnownRun(LinearModel(torch.zeros(2, 3), shift=0.1, **options))


def queries(run: KnownRun, count: int = 6, candidates: int = 5, horizon: int = 3) -> Queries:
    rng = np.random.default_rng(7)
    rows = rng.choice(len(run.data.states) - 20, count, replace=False)
    actions = rng.normal(size=(count, candidates, horizon, FRAMESKIP, 2)).astype(np.float32)
    states = run.data.states[rows][:, None, None] + actions.sum(axis=3).cumsum(axis=2)
    return Queries(rows, rows + 20, actions, states, "key")
