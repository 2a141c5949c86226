"""Relational distortion: how much the planning latent changes the distances between outcomes (fig. reme)."""

from typing import Any

import torch

from atlas_wm.diagnose.bootstrap import median_interval
from atlas_wm.diagnose.frozen_run import FrozenRun
from atlas_wm.diagnose.futures import Futures
from atlas_wm.diagnose.stability import relational_distortion


def relational(run: FrozenRun, futures: Futures) -> dict[str, Any]:
    """|d_Z − d_P| over all pairs of a query's C final frames and its goal, in the bank's scales."""
    result: dict[str, Any] = {}
    latents = torch.cat([futures.true[:, :, -1], futures.goal[:, None]], dim=1)  # (Q, C + 1, d)
    anchors = torch.cat([futures.anchors, futures.anchor_goal[:, None]], dim=1)
    distortion = relational_distortion(
        run.latent_scale.distances(latents, latents), run.anchor_scale.distances(anchors, anchors)
    )
    for name, values in distortion._asdict().items():
        median, low, high = median_interval(values.numpy())
        result[name] = {
            "median": float(median),
            "low": float(low),
            "high": float(high),
            "per_query": values.tolist(),
        }
    return result
