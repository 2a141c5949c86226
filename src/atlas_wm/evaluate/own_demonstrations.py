"""An evaluated episode must not retrieve its own demonstration, which leads from its start to its goal."""

from collections.abc import Callable

import numpy as np
import torch

from atlas_wm.config import RunInfo
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.data.groups import episode_groups
from atlas_wm.plan.planner import Planner
from atlas_wm.plan.retrieval import NONE


def demonstration_groups(data: EpisodeData, run: RunInfo) -> np.ndarray | None:
    """The group of each episode, (E,): variants of one demonstration together, others alone. None: the run was
    trained on another dataset, so it has stored none of these demonstrations."""
    return episode_groups(data) if run.data.hash == data.content_hash() else None


def leave_out_own(planner: Planner, data: EpisodeData, groups: np.ndarray | None) -> Callable[[int], int]:
    """Start row of an episode → the group that its searches leave out (``plan_batch``)."""
    if planner.retrieval is None or groups is None:
        return lambda row: NONE
    planner.retrieval.group_by(torch.from_numpy(groups))
    return lambda row: int(groups[data.locate(np.array([row]))[0][0]])
