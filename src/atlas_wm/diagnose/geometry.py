"""The planning latent in two principal components, with the novelty of each true state (fig. ood-scatter)."""

import warnings
from typing import Any

import numpy as np
import torch
from scipy.stats import ConstantInputWarning, spearmanr

from atlas_wm.diagnose.frozen_run import FrozenRun
from atlas_wm.errors import UserError
from atlas_wm.models.geometry import knn_novelty, percentile
from atlas_wm.rng import DiagnoseRng

POINTS, NEIGHBOURS = 2000, 50


def geometry(run: FrozenRun, seed: int) -> dict[str, Any]:
    """Rows are drawn from the whole dataset. Novelty compares true states with the bank's, without any model."""
    if not run.data.states.shape[1]:
        raise UserError(f"{run.data.path} has no state column to measure novelty in: name one in the task")
    rows = np.random.default_rng([seed, DiagnoseRng.MAP]).choice(
        len(run.data.states), min(POINTS, len(run.data.states)), replace=False
    )
    z = run.features(run.frames_of_rows(rows)).z.double()
    centred = z - z.mean(dim=0)
    _, strength, axes = torch.linalg.svd(centred, full_matrices=False)
    axes = axes[:2] * axes[:2].sum(dim=1).sign().where(axes[:2].sum(dim=1) != 0, torch.ones(2).double())[:, None]
    states = torch.from_numpy(run.data.states[rows])
    bank = torch.from_numpy(run.training.states[run.bank_rows])
    k = min(NEIGHBOURS, len(bank) - 1)
    novelty = knn_novelty(states, bank, k)
    ranks = percentile(novelty, knn_novelty(bank, bank, k, leave_one_out=True))
    with warnings.catch_warnings():  # NaN if all latents are equal: the JSON file says so
        warnings.simplefilter("ignore", ConstantInputWarning)
        correlation = spearmanr(centred.norm(dim=1), novelty).statistic
    return {
        "points": (centred @ axes.T).tolist(),
        "novelty_percentile": ranks.tolist(),
        "explained": (strength.square() / strength.square().sum().clamp_min(1e-300))[:2].tolist(),
        "rank_correlation": float(correlation),
    }
