"""Does novelty predict failure? AUROC of k-NN novelty for each representation (tab. probe-full, probe-atlas)."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor

from atlas_wm.diagnose.bootstrap import interval, resamples
from atlas_wm.diagnose.frozen_run import FrozenRun
from atlas_wm.evaluate.statistics import auroc
from atlas_wm.models.geometry import knn_novelty
from atlas_wm.runs.results import EpisodeResult

log = logging.getLogger(__name__)
NEIGHBOURS = 50


def probe(run: FrozenRun, episodes: Sequence[EpisodeResult]) -> dict[str, Any]:
    """The episodes are those of the run's evaluation; the model encodes their last three states again."""
    lengths = [len(e.last_states) for e in episodes]
    states = np.concatenate([np.asarray(e.last_states, run.data.states.dtype) for e in episodes])
    found, bank = run.features(run.frames_of_states(states), run.probed_blocks), run.bank
    named = {f"L{block}": (a, b) for block, a, b in zip(run.probed_blocks, found.blocks, bank.blocks, strict=True)}
    if not named:
        log.info("%s: probe without encoder blocks, %s has none", run.folder, type(run.model.encoder).__name__)
    named |= {"patch": (found.patch, bank.patch), "cls": (found.cls, bank.cls), "z": (found.z, bank.z)}
    named["oracle"] = torch.from_numpy(states), torch.from_numpy(run.training.states[run.bank_rows])
    failed = np.array([not e.success for e in episodes])
    k = min(NEIGHBOURS, len(run.bank_rows))
    representations = {}
    for name, (queries, reference) in named.items():
        scores = _means(knn_novelty(queries, reference, k), lengths)
        representations[name] = {**_auroc_with_interval(scores, failed), "scores": scores.tolist()}
    result: dict[str, Any] = {
        "representations": representations,
        "failed": failed.tolist(),
        "episodes": len(episodes),
        "failures": int(failed.sum()),
        "bank": len(run.bank_rows),
        "neighbours": k,
    }
    if failed.all() or not failed.any():
        result["note"] = "all episodes of the first evaluation seed had the same outcome, so the AUROC is undefined"
    return result


def resampled_aurocs(scores: np.ndarray, failed: np.ndarray) -> np.ndarray:
    """The AUROC of every bootstrap resample that has both outcomes.

    From the ranks (Mann–Whitney U), all resamples at once: 1,000 calls of scikit-learn on 200 episodes take 2 s per
    representation, this takes 0.03 s.
    """
    rows = resamples(len(scores))
    ranks, failures = rankdata(scores[rows], axis=1), failed[rows]
    n_failed, n_solved = failures.sum(axis=1), (~failures).sum(axis=1)
    u = (ranks * failures).sum(axis=1) - n_failed * (n_failed + 1) / 2
    both = (n_failed > 0) & (n_solved > 0)
    return u[both] / (n_failed * n_solved)[both]


def _auroc_with_interval(scores: np.ndarray, failed: np.ndarray) -> dict[str, Any]:
    value = auroc(scores, failed)
    low, high = (None, None) if value is None else map(float, interval(resampled_aurocs(scores, failed)))
    return {"auroc": value, "low": low, "high": high}


def _means(values: Tensor, lengths: list[int]) -> np.ndarray:
    """The mean of each episode's values."""
    return np.array([part.mean() for part in values.split(lengths)])
