"""Is the planning latent a standard Gaussian on frames of a random policy? (fig. oodshift)"""

from typing import Any

import numpy as np
import torch
from scipy.stats import cramervonmises
from torch import Tensor

from atlas_wm.data.states import training_rows
from atlas_wm.diagnose.frozen_run import FrozenRun
from atlas_wm.losses.projections import random_directions
from atlas_wm.models.geometry import effective_rank
from atlas_wm.rng import DiagnoseRng, make_rng

EPISODES, STEPS, EVERY = 100, 50, 5  # of uniformly random actions: 1,000 frames
DIRECTIONS = 512


def marginal(run: FrozenRun, seed: int) -> dict[str, Any]:
    if not run.data.task.has_env:
        return statistics(run.features(_heldout_frames(run, seed)).z.double())
    states = run.simulator.random_states(run.data.task, EPISODES, STEPS, EVERY, seed)
    return statistics(run.features(run.frames_of_states(states)).z.double())


def _heldout_frames(run: FrozenRun, seed: int) -> Tensor:
    """Recorded frames of held-out episodes; of all episodes if none was held out: (n, 3, S, S) uint8"""
    rows = np.arange(len(run.data.actions))
    heldout = np.setdiff1d(rows, training_rows(run.data, run.info))
    rng = np.random.default_rng([seed, DiagnoseRng.MARGINAL])
    return run.frames_of_rows(
        np.sort(rng.permutation(heldout if len(heldout) else rows)[: EPISODES * STEPS // EVERY])
    )


def statistics(z: Tensor) -> dict[str, Any]:
    """z: (n, d) float64"""
    count, d = z.shape
    directions = random_directions(d, DIRECTIONS, generator=make_rng(0)).double()
    centred = z - z.mean(dim=0)
    covariance = centred.T @ centred / count
    values, vectors = torch.linalg.eigh(covariance)
    nonzero = values > values[-1] * 1e-9
    white = centred
    if bool(nonzero.any()) and values[-1] > 0:
        white = centred @ vectors[:, nonzero] / values[nonzero].sqrt()
    gaussian = torch.randn(count, d, generator=make_rng(1), dtype=torch.float64)
    return {
        "frames": count,
        "mean_norm": float(z.mean(dim=0).norm()),
        "covariance_error": float((covariance - torch.eye(d)).norm() / d**0.5),
        "cvm": median_cvm(z @ directions),
        "cvm_whitened": median_cvm(
            white @ random_directions(white.shape[1], DIRECTIONS, generator=make_rng(0)).double()
        ),
        "cvm_null": median_cvm(gaussian @ directions),
        "effective_rank": effective_rank(values),
    }


def median_cvm(x: Tensor) -> float:
    """The median over L projections, (n, L), of ∫ (F_n − Φ)² dΦ: the Cramér–von Mises statistic over n."""
    return float(np.median(cramervonmises(x.numpy(), "norm", axis=0).statistic)) / len(x)
