"""Rollout, relational and regret, each against loops over queries, candidates and pairs."""

import numpy as np
import pytest
import torch
from known import collapsed, identity, queries, skewed

from atlas_wm.config import PlanConfig
from atlas_wm.diagnose.bootstrap import median_interval
from atlas_wm.diagnose.diagnose import finite
from atlas_wm.diagnose.futures import Futures, predict_futures
from atlas_wm.diagnose.regret import regret
from atlas_wm.diagnose.relational import relational
from atlas_wm.diagnose.rollout import rollout

EPSILON = 1e-6


def predicted(run) -> Futures:
    return predict_futures(run, queries(run), lambda done, total: None)


def scales(bank: np.ndarray) -> tuple[np.ndarray, float]:
    """σ + ε₀ and c of a reference bank."""
    deviation = bank.std(axis=0) + EPSILON
    return deviation, float(np.mean([[np.linalg.norm((a - b) / deviation) for a in bank] for b in bank]))


class ByHand:
    """All of it from states in float64."""

    def __init__(self, run):
        self.asked, self.matrix = queries(run), run.model.matrix.double().numpy()
        self.slip, data = run.model.slip, run.data.states.astype(np.float64)
        bank = data[run.bank_rows]
        self.z_deviation, self.z_mean = scales(bank @ self.matrix)
        self.p_deviation, self.p_mean = scales(bank)
        self.length = (1 + EPSILON) * self.z_mean
        self.eta = np.abs(self.z_deviation - EPSILON - 1).max() / (1 + EPSILON)
        self.starts, self.goals = data[self.asked.rows], data[self.asked.goal_rows]
        self.ends = self.asked.states.astype(np.float64)

    def predicted(self, query: int, candidate: int, step: int) -> np.ndarray:
        moved = self.asked.actions[query, candidate, : step + 1].astype(np.float64).sum(axis=(0, 1))
        return (self.starts[query] + self.slip * moved) @ self.matrix

    def error(self, query: int, candidate: int, step: int) -> float:
        return np.linalg.norm(
            self.predicted(query, candidate, step) - self.ends[query, candidate, step] @ self.matrix
        )

    def d_z(self, a: np.ndarray, b: np.ndarray) -> float:
        return np.linalg.norm((a - b) @ self.matrix / self.z_deviation) / self.z_mean

    def d_p(self, a: np.ndarray, b: np.ndarray) -> float:
        return np.linalg.norm((a - b) / self.p_deviation) / self.p_mean

    def distortions(self, query: int) -> list[float]:
        points = [*self.ends[query, :, -1], self.goals[query]]
        return [abs(self.d_z(a, b) - self.d_p(a, b)) for a in points for b in points]


@pytest.fixture(scope="module")
def run():
    return skewed(slip=0.8)


@pytest.fixture(scope="module")
def by_hand(run):
    return ByHand(run)


def test_rollout_is_the_median_error_of_candidates_over_the_banks_length(run, by_hand):
    result = rollout(run, predicted(run))
    expected = np.array(
        [
            [np.median([by_hand.error(query, c, step) for c in range(5)]) / by_hand.length for step in range(3)]
            for query in range(6)
        ]
    )
    assert result["horizons"] == [1, 2, 3]
    np.testing.assert_allclose(result["per_query"], expected, rtol=1e-4)
    for name, values in zip(("median", "low", "high"), median_interval(expected), strict=True):
        np.testing.assert_allclose(result[name], values, rtol=1e-4)
    assert result["scale"] == pytest.approx(by_hand.length, rel=1e-5)


def test_a_perfect_predictor_has_no_rollout_error():
    run = skewed(slip=1.0)
    assert np.max(rollout(run, predicted(run))["per_query"]) < 1e-5


def test_relational_is_the_distortion_over_all_pairs_of_ends_and_goal(run, by_hand):
    result = relational(run, predicted(run))
    for name, summary in {
        "rmse": lambda gaps: np.sqrt(np.mean(np.square(gaps))),
        "percentile_95": lambda gaps: np.percentile(gaps, 95),
        "maximum": max,
    }.items():
        expected = np.array([summary(by_hand.distortions(query)) for query in range(6)])
        np.testing.assert_allclose(result[name]["per_query"], expected, rtol=1e-4)
        median, low, high = median_interval(expected)
        assert [result[name][key] for key in ("median", "low", "high")] == pytest.approx(
            [median, low, high], rel=1e-4
        )
    assert set(result) == {"rmse", "percentile_95", "maximum"}


def test_regret_and_its_bound_follow_the_theorem(run, by_hand):
    result = regret(run, predicted(run))
    for query in range(6):
        ends, goal = by_hand.ends[query, :, -1], by_hand.goals[query]
        costs = [by_hand.d_p(end, goal) for end in ends]
        imagined = [np.linalg.norm(by_hand.predicted(query, c, 2) - goal @ by_hand.matrix) for c in range(5)]
        worst = max(by_hand.error(query, c, 2) for c in range(5))
        prediction, scale = worst / by_hand.length, by_hand.eta * max(costs)
        distortion = (1 + by_hand.eta) * max(by_hand.distortions(query))
        expected = {
            "prediction": prediction,
            "relational": distortion,
            "scale": scale,
            "bound": 2 * (prediction + distortion + scale),
            "regret": costs[int(np.argmin(imagined))] - min(costs),
            "margin": sorted(costs)[1] - min(costs),
        }
        assert {name: result[name][query] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert result["means"] == pytest.approx({name: np.mean(result[name]) for name in result["means"]})
    assert (result["eta"], result["ell"]) == pytest.approx((by_hand.eta, by_hand.length), rel=1e-4)
    assert result["guaranteed"] == sum(m > b for m, b in zip(result["margin"], result["bound"], strict=True))


@pytest.mark.parametrize("slip", [-1.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("make", [identity, skewed])
def test_the_measured_regret_never_exceeds_the_bound(make, slip):
    run = make(slip=slip)
    result = regret(run, predicted(run))
    assert (np.array(result["regret"]) <= np.array(result["bound"])).all()


def test_of_a_latent_that_is_the_anchor_no_distance_is_distorted():
    run = identity()
    futures = predicted(run)
    assert {value for part in relational(run, futures).values() for value in part["per_query"]} == {0.0}
    assert set(regret(run, futures)["relational"]) == {0.0}


@pytest.mark.filterwarnings("error")
def test_a_constant_latent_has_no_scale_and_so_no_error_instead_of_none_at_all():
    run = collapsed()
    futures = predicted(run)
    errors = finite(rollout(run, futures))
    assert errors["per_query"] == [[None] * 3] * 6 and errors["median"] == errors["low"] == [None] * 3
    assert finite(relational(run, futures))["maximum"]["median"] is None
    result = finite(regret(run, futures))
    assert result["bound"] == [None] * 6 and result["guaranteed"] == 0 and result["means"]["prediction"] is None
    assert min(result["regret"]) >= 0 and result["eta"] == pytest.approx(1, abs=1e-5)


def test_candidates_may_be_imagined_in_parts():
    run = skewed(slip=0.8)
    asked = queries(run)
    frame = run.frames_of_rows(asked.rows[:1])
    together = run.rollout(frame, asked.actions[0])
    run.info.config.plan = PlanConfig(candidate_chunk=2)
    torch.testing.assert_close(run.rollout(frame, asked.actions[0]), together)
    assert together.shape == (5, 3, 4)
