"""Label the episodes of an evaluation as ID or OOD by their distance from the training states of the run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from atlas_wm.config import RunInfo
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.data.states import TrainingStates, training_data
from atlas_wm.evaluate.protocol import draw_starts
from atlas_wm.evaluate.split import StateBank, ood_labels, path_scores, state_bank
from atlas_wm.runs.results import NoveltyBank, Protocol

NEIGHBOURS = 50  # of the k-NN novelty (Appendix idood)

Labels = dict[int, tuple[float, bool]]  # row → its novelty, and whether it is OOD


@dataclass(frozen=True)
class Draws:
    """The start rows of every condition and seed with their labels."""

    starts: dict[Protocol, dict[int, Labels]]  # protocol → seed
    bank: NoveltyBank


def draw_and_label(run: Path, info: RunInfo, data: EpisodeData, protocols: Sequence[Protocol]) -> Draws:
    bank, states, about = _bank(run, info, data)
    starts: dict[Protocol, dict[int, Labels]] = {protocol: {} for protocol in protocols}
    for protocol in protocols:
        for seed in protocol.seeds:
            rows = draw_starts(data, protocol, seed, info)
            scores = path_scores(states, rows, protocol.offset, bank, k=about.neighbours)
            labels = zip(scores.tolist(), ood_labels(scores).tolist(), strict=True)
            starts[protocol][seed] = dict(zip(rows.tolist(), labels, strict=True))
    return Draws(starts, about)


def _bank(run: Path, info: RunInfo, data: EpisodeData) -> tuple[StateBank, np.ndarray, NoveltyBank]:
    """The bank of training states, and the states of the evaluated data in the same columns: (R, s)."""
    known = TrainingStates.read(run, info)
    if known is None:  # a run folder of an older version
        remedy = f"store its training states in the run folder with `atlas bank {run} --data …`"
        known = TrainingStates.of(training_data(run, info, data, remedy), info)
    bank = state_bank(known.states)
    about = NoveltyBank(
        states=len(bank.states),
        neighbours=min(NEIGHBOURS, len(bank.states)),
        seed=0,
        source="training data" if known.data == info.data.hash else "evaluated data",
        data=known.data,
    )
    return bank, data.columns((known.columns,)), about
