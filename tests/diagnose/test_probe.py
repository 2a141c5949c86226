"""Probe: k-NN novelty and AUROC by their definitions, on models that keep all or nothing of the state."""

from itertools import product

import numpy as np
import pytest
from known import KnownRun, collapsed, identity, skewed
from sklearn.metrics import roc_auc_score

from atlas_wm.diagnose.bootstrap import resamples
from atlas_wm.diagnose.probe import probe, resampled_aurocs
from atlas_wm.evaluate.statistics import auroc
from atlas_wm.runs.results import EpisodeResult
from made_up_results import episode


def episodes(run: KnownRun, failures: int = 9, count: int = 24) -> list[EpisodeResult]:
    """They end far out if they fail, and after one or two steps if they succeed early."""
    rng = np.random.default_rng(3)
    centre = run.data.states.mean(axis=0)
    return [
        episode(
            success=number >= failures,
            last_states=(centre + rng.normal(0, 20 if number < failures else 8, (1 + number % 3, 2))).tolist(),
        )
        for number in range(count)
    ]


def counted_auroc(scores, failed) -> float:
    pairs = list(product(np.flatnonzero(failed), np.flatnonzero(~np.asarray(failed))))
    return sum(1.0 if scores[a] > scores[b] else 0.5 if scores[a] == scores[b] else 0.0 for a, b in pairs) / len(
        pairs
    )


@pytest.mark.parametrize("digits", [0, 8])  # with and without ties
def test_auroc_is_the_share_of_pairs_in_the_right_order(digits):
    rng = np.random.default_rng(0)
    failed = rng.random(50) < 0.3
    scores = np.round(rng.normal(size=50) + failed, digits)
    assert auroc(scores, failed) == pytest.approx(counted_auroc(scores, failed), abs=1e-12)


@pytest.mark.parametrize("digits", [0, 8])
def test_resampled_aurocs_are_those_of_scikit_learn(digits):
    rng = np.random.default_rng(1)
    failed = rng.random(12) < 0.2  # so few failures that some resamples have none
    scores = np.round(rng.normal(size=12) + failed, digits)
    with_both = [rows for rows in resamples(12) if 0 < failed[rows].sum() < 12]
    assert len(with_both) < len(resamples(12))
    expected = [roc_auc_score(failed[rows], scores[rows]) for rows in with_both]
    np.testing.assert_allclose(resampled_aurocs(scores, failed), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("scores", "failed"),
    [([1.0, 2.0], [True, True]), ([1.0, 2.0], [False, False]), ([1.0, np.nan], [True, False])],
)
def test_there_is_no_auroc_of_one_outcome_or_of_nan(scores, failed):
    assert auroc(np.array(scores), np.array(failed)) is None


def test_scores_are_mean_distances_to_the_nearest_of_the_standardised_bank():
    run = skewed()
    records = episodes(run)
    result = probe(run, records)
    k = result["neighbours"]
    assert k == result["bank"] == 30  # 50 where there are as many

    def score(bank: np.ndarray, states: np.ndarray) -> float:
        deviation = bank.std(axis=0) + 1e-6
        distances = [[np.linalg.norm((x - y) / deviation) for y in bank] for x in states]
        return float(np.mean([np.mean(sorted(row)[:k]) for row in distances]))

    matrix = run.model.matrix.double().numpy()
    seen = {
        "L1": lambda x: x,
        "L2": lambda x: 2 * x,
        "patch": lambda x: x,
        "cls": lambda x: x[:, :1],
        "z": lambda x: x @ matrix,
        "oracle": lambda x: x,
    }
    assert list(result["representations"]) == list(seen)
    bank = run.data.states[run.bank_rows].astype(np.float64)
    for name, see in seen.items():
        found = result["representations"][name]
        expected = [score(see(bank), see(np.array(e.last_states))) for e in records]
        np.testing.assert_allclose(found["scores"], expected, rtol=1e-4)
        assert found["auroc"] == pytest.approx(roc_auc_score(result["failed"], found["scores"]))


def test_only_the_nearest_neighbours_count(monkeypatch):
    monkeypatch.setattr("atlas_wm.diagnose.probe.NEIGHBOURS", 4)
    run = identity()
    records = episodes(run)
    bank = run.data.states[run.bank_rows]
    result = probe(run, records)
    for record, found in zip(records, result["representations"]["z"]["scores"], strict=True):
        gaps = np.linalg.norm((np.array(record.last_states)[:, None] - bank) / (bank.std(axis=0) + 1e-6), axis=-1)
        assert found == pytest.approx(np.sort(gaps, axis=1)[:, :4].mean(), rel=1e-4)


def test_intervals_are_those_of_resampled_episodes():
    run = identity()
    result = probe(run, episodes(run))
    failed, found = np.array(result["failed"]), result["representations"]["oracle"]
    scores = np.array(found["scores"])
    draws = [roc_auc_score(failed[some], scores[some]) for some in resamples(24) if 0 < failed[some].sum() < 24]
    assert [found["low"], found["high"]] == pytest.approx(np.percentile(draws, [2.5, 97.5]).tolist())


def test_a_latent_that_is_the_state_tells_what_the_state_tells():
    result = probe(identity(), episodes(identity()))
    z, oracle = (result["representations"][name] for name in ("z", "oracle"))
    assert z == oracle and oracle["auroc"] > 0.8
    assert (result["episodes"], result["failures"]) == (24, 9)


def test_a_constant_latent_tells_nothing():
    found = probe(collapsed(), episodes(collapsed()))["representations"]["z"]
    assert (found["auroc"], found["low"], found["high"]) == (0.5, 0.5, 0.5)
    assert set(found["scores"]) == {0.0}


@pytest.mark.parametrize("failures", [0, 24])
def test_where_all_end_alike_there_is_no_auroc_but_a_note(failures):
    result = probe(identity(), episodes(identity(), failures))
    assert {(r["auroc"], r["low"], r["high"]) for r in result["representations"].values()} == {(None, None, None)}
    assert "same outcome" in result["note"] and result["failures"] == failures
