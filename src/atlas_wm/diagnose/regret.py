"""The planning bound beside what the planner really loses (thm. planning_stability, fig. regret and theo3)."""

from typing import Any

from atlas_wm.diagnose.futures import Futures
from atlas_wm.diagnose.stability import planning_stability
from atlas_wm.diagnose.subject import Subject


def regret(subject: Subject, futures: Futures) -> dict[str, Any]:
    """Of each query's candidates the planner takes the one with the nearest predicted end."""
    answer = planning_stability(
        futures.predicted[:, :, -1],
        futures.true[:, :, -1],
        futures.goal,
        futures.anchors,
        futures.anchor_goal,
        subject.latent_scale,
        subject.anchor_scale,
    )
    parts = answer.error._asdict()
    return {
        "bound": answer.error.regret_bound.tolist(),
        "regret": answer.regret.tolist(),
        **{name: values.tolist() for name, values in parts.items()},
        "margin": answer.margin.tolist(),
        "means": {name: float(values.mean()) for name, values in parts.items()},
        "guaranteed": int(answer.guaranteed.sum()),
        "eta": subject.latent_scale.mismatch,
        "ell": subject.latent_scale.length,
    }
