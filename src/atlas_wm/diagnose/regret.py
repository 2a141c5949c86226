"""The planning bound and the planner's regret (thm. planning_stability, fig. regret and theo3)."""

from typing import Any

from atlas_wm.diagnose.frozen_run import FrozenRun
from atlas_wm.diagnose.futures import Futures
from atlas_wm.diagnose.stability import planning_stability


def regret(run: FrozenRun, futures: Futures) -> dict[str, Any]:
    """For each query the planner chooses the candidate whose predicted last latent is nearest to the goal."""
    answer = planning_stability(
        futures.predicted[:, :, -1],
        futures.true[:, :, -1],
        futures.goal,
        futures.anchors,
        futures.anchor_goal,
        run.latent_scale,
        run.anchor_scale,
    )
    parts = answer.error._asdict()
    return {
        "bound": answer.error.regret_bound.tolist(),
        "regret": answer.regret.tolist(),
        **{name: values.tolist() for name, values in parts.items()},
        "margin": answer.margin.tolist(),
        "means": {name: float(values.mean()) for name, values in parts.items()},
        "guaranteed": int(answer.guaranteed.sum()),
        "eta": run.latent_scale.mismatch,
        "ell": run.latent_scale.length,
    }
