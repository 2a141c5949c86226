"""Is the planning latent a standard Gaussian where nobody demonstrated? (fig. oodshift)"""

from typing import Any

import numpy as np
import torch
from scipy.stats import cramervonmises
from torch import Tensor

from atlas_wm.data.states import training_rows
from atlas_wm.diagnose.subject import Subject
from atlas_wm.losses.projections import random_directions
from atlas_wm.models.geometry import effective_rank
from atlas_wm.rng import DiagnoseRng, make_rng

EPISODES, STEPS, EVERY = 100, 50, 5  # of uniformly random actions: 1,000 frames
DIRECTIONS = 512
OFFLINE = "measured on recorded frames, held-out ones if there are any: the task has no environment to act in"


def marginal(subject: Subject, seed: int) -> dict[str, Any]:
    if not subject.data.task.has_env:
        return {**statistics(subject.look(_heldout_frames(subject, seed)).z.double()), "note": OFFLINE}
    states = subject.simulator.wander(subject.data.task, EPISODES, STEPS, EVERY, seed)
    return statistics(subject.look(subject.states_frames(states)).z.double())


def _heldout_frames(subject: Subject, seed: int) -> Tensor:
    """Recorded frames of held-out episodes; of all episodes if none was held out: (n, 3, S, S) uint8"""
    rows = np.arange(len(subject.data.actions))
    heldout = np.setdiff1d(rows, training_rows(subject.data, subject.info))
    rng = np.random.default_rng([seed, DiagnoseRng.MARGINAL])
    return subject.rows_frames(
        np.sort(rng.permutation(heldout if len(heldout) else rows)[: EPISODES * STEPS // EVERY])
    )


def statistics(z: Tensor) -> dict[str, Any]:
    """z: (n, d) float64"""
    count, d = z.shape
    directions = random_directions(d, DIRECTIONS, generator=make_rng(0)).double()
    centred = z - z.mean(dim=0)
    covariance = centred.T @ centred / count
    values, vectors = torch.linalg.eigh(covariance)
    kept = values > values[-1] * 1e-9
    white = centred @ vectors[:, kept] / values[kept].sqrt() if bool(kept.any()) and values[-1] > 0 else centred
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
