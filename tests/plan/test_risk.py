"""What predicts that a plan fails: the distance that remains at its end, unknown and changed places on its way."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from atlas_wm.config import PlanConfig
from atlas_wm.errors import UserError
from atlas_wm.evaluate.statistics import failure_auroc
from atlas_wm.models.bank import LatentBank
from atlas_wm.models.image_bank import SIDE, ImageBank, footprints
from atlas_wm.plan.planner import Planner
from atlas_wm.rng import make_rng
from atlas_wm.runs.model import load_bank, load_model, save_bank
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


@pytest.mark.parametrize("number", ["remaining", "risk"])
def test_an_evaluation_says_how_well_it_predicts_failure(number):
    def of(failed, solved):
        episodes = [episode(row, False, **{number: value}) for row, value in enumerate(failed)]
        episodes += [episode(100 + row, True, **{number: value}) for row, value in enumerate(solved)]
        at_start = episode(500, False, solved_at_start=True, **{number: 0.0})
        return failure_auroc(policy({42: episodes, 43: [at_start]}), number)

    low, high = np.linspace(0, 0.5, 10), np.linspace(0.6, 1, 10)
    assert of(high, low) == 1  # the episode that was solved at the start does not count
    assert of(low, high) == 0
    assert of(high, high) == 0.5
    assert of(high[1:], low) is None  # 9 failures
    assert of([None] * 10, low) is None


def a_scene(*marked: tuple[int, int], agent: int | None = None, mark: int = 0) -> torch.Tensor:
    """White, SIDE × SIDE, with a black agent in one of the columns of row 4, and other pixels."""
    frame = torch.full((3, SIDE, SIDE), 255, dtype=torch.uint8)
    if agent is not None:
        frame[:, 4, agent] = 0
    for row, column in marked:
        frame[:, row, column] = mark
    return frame


@pytest.fixture
def corridor() -> LatentBank:
    """The latent of a frame is the agent's column."""
    frames = torch.stack([a_scene(agent=column) for column in range(SIDE)])
    images = ImageBank.of([frames], [frames])
    points = torch.arange(SIDE)[:, None].float()
    return replace(LatentBank.of([points]), images=images, footprints=footprints([frames]))


def crossed(bank: LatentBank, frame: torch.Tensor, *columns: float) -> float:
    nearest = bank.nearest(torch.tensor(columns)[None, :, None])
    (share,) = bank.crossed(frame[None], nearest).tolist()
    return share


def test_what_changed_counts_where_the_path_leads(corridor):
    """The agent is at 2. A grey wall stands at column 8 of its row, another one elsewhere."""
    frame = a_scene((4, 8), (11, 8), agent=2, mark=128)
    assert crossed(corridor, frame, 2, 5, 8, 11) == 0.5
    assert crossed(corridor, frame, 2, 3, 4, 5) == crossed(corridor, frame, 2, 2, 2, 2) == 0
    assert crossed(corridor, a_scene((4, 8), agent=2, mark=128), 2, 7.6) == 1  # the nearest training frame counts


def test_a_familiar_scene_is_crossed_nowhere(corridor):
    assert crossed(corridor, a_scene(agent=2), 2, 5, 8, 11) == 0


def test_where_things_are_now_does_not_count(corridor):
    """An agent of another colour is novel, but not on its own way."""
    frame = a_scene()
    frame[:, 4, 2] = torch.tensor([0, 0, 255])
    assert corridor.images.changed(frame[None]).sum() == 1
    assert crossed(corridor, frame, 2, 2, 3, 4) == 0


def test_each_episode_of_a_batch_has_its_own(corridor):
    frames = torch.stack([a_scene((4, 8), agent=2, mark=128), a_scene(agent=2)])
    paths = torch.tensor([[2.0, 8.0], [2.0, 8.0]])[..., None]
    assert corridor.crossed(frames, corridor.nearest(paths)).tolist() == [1, 0]


@pytest.fixture
def grid() -> LatentBank:
    """Known are the points (x, y) of 0 to 9, but not those with 2 < x < 7 and y > 2: a wall with a way round it."""
    points = torch.cartesian_prod(torch.arange(10), torch.arange(10)).float()
    inside = (points[:, 0] > 2) & (points[:, 0] < 7) & (points[:, 1] > 2)
    return LatentBank.of([points[~inside]])


def strayed(bank: LatentBank, *path: tuple[float, float]) -> float:
    paths = torch.tensor(path, dtype=torch.float)[None]
    (share,) = bank.strayed(paths, bank.nearest(paths)).tolist()
    return share


def test_a_path_through_a_wall_strays_and_one_round_it_does_not(grid):
    assert strayed(grid, (1, 1), (3, 1), (5, 1), (8, 1)) == 0
    # (4, 6) is 2 away from what is known, where 1 is usual; a step is 3 long
    assert strayed(grid, (1, 6), (4, 6), (7, 6)) == pytest.approx((2 - 1) / 3)
    assert strayed(grid, (1, 6), (1, 30), (1, 30.5)) == 1


def test_straying_has_no_unit(grid):
    larger = LatentBank.of([grid.points * 7])
    assert strayed(larger, (7, 42), (28, 42), (49, 42)) == pytest.approx(strayed(grid, (1, 6), (4, 6), (7, 6)))


def test_a_frame_that_is_unknown_itself_does_not_stray(grid):
    """Novelty tells that; here only what the plan adds counts."""
    assert strayed(grid, (0, 30), (1, 30), (2, 30)) == 0


def test_a_plan_that_stays_where_it_is_does_not_stray(grid):
    assert strayed(grid, (5, 6), (5, 6), (5, 6)) == 0


def test_the_risk_counts_what_is_known(run_folder):
    model = load_model(run_folder)
    frames = torch.randint(0, 256, (2, 3, 32, 32), generator=make_rng(0), dtype=torch.uint8)
    config = PlanConfig(candidates=20, iterations=2, elites=5)
    (new,) = Planner(model, config).plan_batch(frames[:1], frames[1:], [make_rng(1)])
    model.bank = replace(model.bank, footprints=None)
    (old,) = Planner(model, config).plan_batch(frames[:1], frames[1:], [make_rng(1)])
    model.bank = None
    (oldest,) = Planner(model, config).plan_batch(frames[:1], frames[1:], [make_rng(1)])
    assert oldest.strayed is None and oldest.crossed is None
    assert oldest.risk == pytest.approx(min(1, oldest.remaining))
    assert old.crossed is None and old.strayed == new.strayed is not None
    assert old.risk == pytest.approx(1 - (1 - oldest.risk) * (1 - old.strayed))
    assert new.crossed is not None and new.remaining == old.remaining == oldest.remaining
    assert new.risk == pytest.approx(1 - (1 - old.risk) * (1 - new.crossed))


def test_footprints_are_stored_with_the_bank(run_folder, tmp_path):
    bank = load_model(run_folder).bank
    assert bank.footprints.shape == (len(bank.points), SIDE**2) and bank.footprints.any()
    save_bank(bank, tmp_path)
    again = load_bank(tmp_path, bank.points.shape[1])
    assert torch.equal(again.footprints, bank.footprints)
    save_bank(replace(bank, footprints=bank.footprints[:-1]), tmp_path)
    with pytest.raises(UserError, match="does not fit the model"):
        load_bank(tmp_path, bank.points.shape[1])
