"""What a model foresees for the shared queries, beside what really happens; three diagnostics look at it."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atlas_wm.diagnose.queries import Queries
from atlas_wm.diagnose.subject import OnProgress, Subject
from atlas_wm.parallel.processes import share_out


@dataclass(frozen=True)
class Futures:
    predicted: Tensor  # (Q, C, H, d) imagined latents
    true: Tensor  # (Q, C, H, d) latents of the frames that really follow
    anchors: Tensor  # (Q, C, w) mean patch tokens of the last of them
    goal: Tensor  # (Q, d)
    anchor_goal: Tensor  # (Q, w)


def foresee(subject: Subject, queries: Queries, on_progress: OnProgress) -> Futures:
    starts = subject.rows_frames(queries.rows)
    goals = subject.look(subject.rows_frames(queries.goal_rows))
    count, horizon = queries.states.shape[1:3]

    def look(which: list[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
        found = []
        for i in which:
            if queries.outcome_rows is None:
                frames = subject.states_frames(queries.states[i].reshape(count * horizon, -1))
            else:
                frames = subject.rows_frames(queries.outcome_rows[i].reshape(-1))
            seen = subject.look(frames)
            true = seen.z.unflatten(0, (count, horizon))
            anchors = seen.patch.unflatten(0, (count, horizon))[:, -1]
            found.append((subject.imagine(starts[i : i + 1], queries.actions[i]), true, anchors))
            on_progress(len(found), len(which))
        return found

    looked = share_out(list(range(len(queries.states))), look)
    predicted, true, anchors = (torch.stack(parts) for parts in zip(*looked, strict=True))
    return Futures(predicted, true, anchors, goals.z, goals.patch)


def prediction_errors(futures: Futures, length: float) -> np.ndarray:
    """Latent error at each step over ℓ, the median over candidates: (Q, H)"""
    errors = (futures.predicted.double() - futures.true.double()).norm(dim=-1) / length  # (Q, C, H)
    return errors.quantile(0.5, dim=1).numpy()
