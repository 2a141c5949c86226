"""Does novelty foretell failure? AUROC of k-NN novelty for each representation (tab. probe-full, probe-atlas)."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atlas_wm.diagnose.bootstrap import interval, resamples
from atlas_wm.diagnose.subject import Subject
from atlas_wm.models.geometry import knn_novelty
from atlas_wm.runs.results import EpisodeResult

log = logging.getLogger(__name__)
NEIGHBOURS = 50


def probe(subject: Subject, episodes: Sequence[EpisodeResult]) -> dict[str, Any]:
    """The episodes are those of the run's evaluation; their last three states are shown to the model again."""
    lengths = [len(e.last_states) for e in episodes]
    states = np.concatenate([np.asarray(e.last_states, subject.data.states.dtype) for e in episodes])
    seen, bank = subject.look(subject.states_frames(states), subject.probed_blocks), subject.bank
    named = {
        f"L{block}": (a, b) for block, a, b in zip(subject.probed_blocks, seen.blocks, bank.blocks, strict=True)
    }
    if not named:
        log.info("%s: probe without encoder blocks, %s has none", subject.run, type(subject.model.encoder).__name__)
    named |= {"patch": (seen.patch, bank.patch), "cls": (seen.cls, bank.cls), "z": (seen.z, bank.z)}
    named["oracle"] = torch.from_numpy(states), torch.from_numpy(subject.training.states[subject.bank_rows])
    failed = np.array([not e.success for e in episodes])
    k = min(NEIGHBOURS, len(subject.bank_rows))
    representations = {}
    for name, (queries, reference) in named.items():
        scores = _means(knn_novelty(queries, reference, k), lengths)
        representations[name] = {**_auroc_with_interval(scores, failed), "scores": scores.tolist()}
    result: dict[str, Any] = {
        "representations": representations,
        "failed": failed.tolist(),
        "episodes": len(episodes),
        "failures": int(failed.sum()),
        "bank": len(subject.bank_rows),
        "neighbours": k,
    }
    if failed.all() or not failed.any():
        result["note"] = "all episodes ended alike: there is nothing for novelty to tell apart"
    return result


def auroc(scores: np.ndarray, failed: np.ndarray) -> float | None:
    """The chance that a failed episode scores higher than one that did not; ties count half. None without both."""
    high, low = scores[failed], scores[~failed]
    if not len(high) or not len(low):
        return None
    return float((high[:, None] > low).mean() + 0.5 * (high[:, None] == low).mean())


def _auroc_with_interval(scores: np.ndarray, failed: np.ndarray) -> dict[str, Any]:
    draws = [auroc(scores[some], failed[some]) for some in resamples(len(scores))]
    known = [value for value in draws if value is not None]
    low, high = map(float, interval(np.array(known))) if known else (None, None)
    return {"auroc": auroc(scores, failed), "low": low, "high": high}


def _means(values: Tensor, lengths: list[int]) -> np.ndarray:
    """The mean of each episode's values."""
    return np.array([part.mean() for part in values.split(lengths)])
