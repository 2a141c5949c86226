"""The share of the distance that remains at the end of a plan, and how well it predicts failure."""

import numpy as np
import pytest
import torch

from atlas_wm.config import PlanConfig
from atlas_wm.evaluate.statistics import remaining_auroc
from atlas_wm.plan.planner import Planner
from atlas_wm.rng import make_rng
from atlas_wm.runs.model import load_model
from made_up_results import episode, policy


@pytest.mark.parametrize("cost", ["terminal", "nearest"])
def test_a_plan_says_how_much_of_the_distance_remains(run_folder, cost):
    """At the end of the plan, or at its nearest step: what the cost of this package reads."""
    model = load_model(run_folder)
    frames = torch.randint(0, 256, (2, 3, 32, 32), generator=make_rng(0), dtype=torch.uint8)
    planner = Planner(model, PlanConfig(candidates=20, iterations=2, elites=5, cost=cost))
    for plan in planner.plan_batch(frames, frames.flip(0), [make_rng(1), make_rng(2)]):
        assert plan.remaining == pytest.approx(plan.cost / plan.start_cost)
    (there,) = planner.plan_batch(frames[:1], frames[:1], [make_rng(1)])
    assert np.isfinite(there.remaining)  # although the distance is 0 at the start


def test_an_evaluation_says_how_well_it_predicts_failure():
    def of(failed, solved):
        episodes = [episode(row, False, remaining=value) for row, value in enumerate(failed)]
        episodes += [episode(100 + row, True, remaining=value) for row, value in enumerate(solved)]
        return remaining_auroc(
            policy({42: episodes, 43: [episode(500, False, solved_at_start=True, remaining=0.0)]})
        )

    low, high = np.linspace(0, 0.5, 10), np.linspace(0.6, 1, 10)
    assert of(high, low) == 1  # the episode that was solved at the start does not count
    assert of(low, high) == 0
    assert of(high, high) == 0.5
    assert of(high[1:], low) is None  # 9 failures
    assert of([None] * 10, low) is None
