"""Rollout error: the distance of predicted latents from those of the frames that follow (fig. rollout)."""

from typing import Any

from atlas_wm.diagnose.bootstrap import median_interval
from atlas_wm.diagnose.frozen_run import FrozenRun
from atlas_wm.diagnose.futures import Futures, prediction_errors


def rollout(run: FrozenRun, futures: Futures) -> dict[str, Any]:
    """The median over candidates, then over queries, at every step, in units of the bank's ℓ."""
    length = run.latent_scale.length
    per_query = prediction_errors(futures, length)
    median, low, high = median_interval(per_query)
    return {
        "horizons": list(range(1, per_query.shape[1] + 1)),
        "median": median.tolist(),
        "low": low.tolist(),
        "high": high.tolist(),
        "per_query": per_query.tolist(),
        "scale": length,
    }
