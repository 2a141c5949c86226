"""Predicted and true outcomes of the shared queries. Rollout, relational and regret use them."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atlas_wm.diagnose.frozen_run import FrozenRun, OnProgress
from atlas_wm.diagnose.queries import Queries
from atlas_wm.parallel.processes import sharded_map


@dataclass(frozen=True)
class Futures:
    predicted: Tensor  # (Q, C, H, d) latents from the predictor
    true: Tensor  # (Q, C, H, d) latents of the frames that really follow
    anchors: Tensor  # (Q, C, w) mean patch tokens of the last of these frames
    goal: Tensor  # (Q, d)
    anchor_goal: Tensor  # (Q, w)


def predict_futures(run: FrozenRun, queries: Queries, on_progress: OnProgress) -> Futures:
    starts = run.frames_of_rows(queries.rows)
    goals = run.features(run.frames_of_rows(queries.goal_rows))
    count, horizon = queries.states.shape[1:3]

    def predict(which: list[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
        outcomes = []
        for i in which:
            if queries.outcome_rows is None:
                frames = run.frames_of_states(queries.states[i].reshape(count * horizon, -1))
            else:
                frames = run.frames_of_rows(queries.outcome_rows[i].reshape(-1))
            features = run.features(frames)
            true = features.z.unflatten(0, (count, horizon))
            anchors = features.patch.unflatten(0, (count, horizon))[:, -1]
            outcomes.append((run.rollout(starts[i : i + 1], queries.actions[i]), true, anchors))
            on_progress(len(outcomes), len(which))
        return outcomes

    outcomes = sharded_map(list(range(len(queries.states))), predict)
    predicted, true, anchors = (torch.stack(parts) for parts in zip(*outcomes, strict=True))
    return Futures(predicted, true, anchors, goals.z, goals.patch)


def prediction_errors(futures: Futures, length: float) -> np.ndarray:
    """Latent error at each step over ℓ, the median over candidates: (Q, H)"""
    errors = (futures.predicted.double() - futures.true.double()).norm(dim=-1) / length  # (Q, C, H)
    return errors.quantile(0.5, dim=1).numpy()
