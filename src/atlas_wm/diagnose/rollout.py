"""Rollout error: how far imagined latents are from those of the frames that really follow (fig. rollout)."""

from typing import Any

from atlas_wm.diagnose.bootstrap import median_interval
from atlas_wm.diagnose.futures import Futures, prediction_errors
from atlas_wm.diagnose.subject import Subject


def rollout(subject: Subject, futures: Futures) -> dict[str, Any]:
    """Candidate medians, then query medians, at every step, in units of the reference bank's ℓ."""
    length = subject.latent_scale.length
    per_query = prediction_errors(futures, length)
    median, low, high = median_interval(per_query)
    result = {
        "horizons": list(range(1, per_query.shape[1] + 1)),
        "median": median.tolist(),
        "low": low.tolist(),
        "high": high.tolist(),
        "per_query": per_query.tolist(),
        "scale": length,
    }
    if not subject.data.task.has_env:
        result["note"] = "measured on recorded actions alone: the task has no environment to try others in"
    return result
