"""What predicts that a plan fails: the distance that remains at its end, unknown and changed places on its way."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from atlas_wm.config import PlanConfig
from atlas_wm.errors import UserError
from atlas_wm.evaluate.statistics import failure_auroc
from atlas_wm.models.bank import LatentBank
from atlas_wm.models.demonstrations import Demonstrations, Piece
from atlas_wm.models.image_bank import SIDE, ImageBank, footprints
from atlas_wm.models.world_model import WorldModel
from atlas_wm.plan.planner import Plan, Planner
from atlas_wm.recipes import demo
from atlas_wm.rng import make_rng
from atlas_wm.runs.model import load_bank, load_demonstrations, load_model, save_bank, save_demonstrations
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
    (share,) = bank.crossed(frame[None], torch.tensor(columns)[None, :, None]).tolist()
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
    assert corridor.crossed(frames, paths).tolist() == [1, 0]


@pytest.fixture
def grid() -> Demonstrations:
    """Known are the points (x, y) of 0 to 9, but not those with 2 < x < 7 and y > 2: a wall with a way round it."""
    points = torch.cartesian_prod(torch.arange(10), torch.arange(10)).half()
    inside = (points[:, 0] > 2) & (points[:, 0] < 7) & (points[:, 1] > 2)
    return Demonstrations(
        points[~inside], torch.empty(0), torch.arange(int((~inside).sum())), torch.full((2,), 0.25)
    )


def strayed(known: Demonstrations, *path: tuple[float, float]) -> float:
    (share,) = known.strayed(torch.tensor(path, dtype=torch.float)[None]).tolist()
    return share


def test_a_path_through_a_wall_strays_and_one_round_it_does_not(grid):
    assert strayed(grid, (1, 1), (3, 1), (5, 1), (8, 1)) == 0
    # (4, 6) is 2 away from what is known, and a step 3 long; a quarter of a step is usual
    assert strayed(grid, (1, 6), (4, 6), (7, 6)) == pytest.approx(2 / 3 - 0.25, abs=1e-5)
    assert strayed(grid, (1, 6), (1, 30), (1, 30.5)) == 1


def test_straying_has_no_unit(grid):
    larger = replace(grid, points=grid.points * 7)
    same = strayed(larger, (7, 42), (28, 42), (49, 42))
    assert same == pytest.approx(strayed(grid, (1, 6), (4, 6), (7, 6)), abs=1e-5)


def test_a_frame_that_is_unknown_itself_does_not_stray(grid):
    """Novelty tells that; here only what the plan adds counts."""
    assert strayed(grid, (0, 30), (1, 30), (2, 30)) == 0


def test_a_plan_that_stays_where_it_is_does_not_stray(grid):
    assert strayed(grid, (5, 6), (5, 6), (5, 6)) == 0


def test_what_is_usual_is_judged_by_other_episodes():
    """Two episodes on parallel lines. What is imagined of the second ends too far from the first, or too near."""

    def piece(episode: int, off: float) -> Piece:
        latents = torch.tensor([[0.0, 3 * episode], [1.0, 3 * episode]])
        return Piece(latents, torch.zeros(2, 2), episode, (latents + torch.tensor([[0, 0], [0, off]]))[None])

    # 80 % of the way from the departure of the first path, 0, to that of the second, 1 over a step of √2
    assert Demonstrations.of([piece(0, 0), piece(1, 1)]).usual.tolist() == pytest.approx([0.8 / 2**0.5], abs=1e-5)
    assert Demonstrations.of([piece(0, 0), piece(1, -1)]).usual.tolist() == [0]
    assert Demonstrations.of([piece(1, 1)]).usual is None  # there is no other episode


def test_what_is_usual_depends_on_the_length_of_a_plan():
    line = torch.stack([torch.arange(10.0), torch.zeros(10)], dim=1).half()
    known = Demonstrations(line, torch.empty(0), torch.arange(10), torch.tensor([0.0, 0.25]))
    assert strayed(known, (3, 0), (3, 0.6)) == pytest.approx(1)
    assert strayed(known, (3, 0), (4, 0.5)) == pytest.approx(0.5 / 1.25**0.5, abs=1e-5)
    # twice as long, and as far from the line at its end: steps of √1.0625 from (3, 0) by (4, 0.25) to (5, 0.5)
    assert strayed(known, (3, 0), (4, 0.25), (5, 0.5)) == pytest.approx(0.5 / 1.0625**0.5 - 0.25, abs=1e-5)
    assert strayed(known, (3, 0), (4, 0), (5, 0), (6, 0)) == 0  # longer than any whose usual departure is known


@pytest.mark.parametrize("horizon", [2, 3])
def test_demonstrations_are_imagined_as_far_as_the_run_plans(horizon):
    """A predictor of action prefixes cannot look farther than its prefixes."""
    fast = demo("fast-wm").model
    model = WorldModel(replace(fast, predictor=replace(fast.predictor, prefixes=horizon)), 2)
    model.run = SimpleNamespace(config=SimpleNamespace(plan=PlanConfig(horizon=horizon, execute=1)))
    frames = torch.randint(0, 256, (3, 8, 3, 32, 32), generator=make_rng(0), dtype=torch.uint8)
    chunks = torch.randn(3, 8, 10, generator=make_rng(1))
    model.build_demonstrations(zip(frames, chunks, range(3), strict=True))
    assert model.demonstrations.usual.shape == (horizon,)
    model.predictor.rollout = None  # nothing is imagined: a predictor need not take an empty batch
    model.build_demonstrations(zip(frames[:, :horizon], chunks[:, :horizon], range(3), strict=True))
    assert model.demonstrations.usual is None  # no episode is longer than a plan


def test_the_risk_counts_what_is_known(run_folder):
    model = load_model(run_folder)
    frames = torch.randint(0, 256, (2, 3, 32, 32), generator=make_rng(0), dtype=torch.uint8)

    def plan() -> Plan:
        planner = Planner(model, PlanConfig(candidates=20, iterations=2, elites=5))
        return planner.plan_batch(frames[:1], frames[1:], [make_rng(1)])[0]

    everything = plan()
    model.bank = replace(model.bank, footprints=None)
    older = plan()
    model.demonstrations = replace(model.demonstrations, usual=None)
    oldest = plan()
    assert oldest.strayed is None and oldest.crossed is None
    assert oldest.risk == pytest.approx(min(1, oldest.remaining))
    assert older.crossed is None and older.strayed == everything.strayed is not None
    assert older.risk == pytest.approx(1 - (1 - oldest.risk) * (1 - older.strayed))
    assert everything.crossed is not None and everything.remaining == older.remaining == oldest.remaining
    assert everything.risk == pytest.approx(1 - (1 - older.risk) * (1 - everything.crossed))


def test_what_is_usual_is_stored_with_the_demonstrations(run_folder, tmp_path):
    model = load_model(run_folder)
    known, facts = model.demonstrations, (model.bank.points.shape[1], 5 * model.action_size)
    save_demonstrations(known, tmp_path)
    assert torch.equal(load_demonstrations(tmp_path, *facts).usual, known.usual)
    save_demonstrations(replace(known, usual=None), tmp_path)  # of an older version
    assert load_demonstrations(tmp_path, *facts).usual is None
    save_demonstrations(replace(known, usual=torch.zeros(1, 2)), tmp_path)
    with pytest.raises(UserError, match="does not fit the model"):
        load_demonstrations(tmp_path, *facts)


def test_footprints_are_stored_with_the_bank(run_folder, tmp_path):
    bank = load_model(run_folder).bank
    assert bank.footprints.shape == (len(bank.points), SIDE**2) and bank.footprints.any()
    save_bank(bank, tmp_path)
    again = load_bank(tmp_path, bank.points.shape[1])
    assert torch.equal(again.footprints, bank.footprints)
    save_bank(replace(bank, footprints=bank.footprints[:-1]), tmp_path)
    with pytest.raises(UserError, match="does not fit the model"):
        load_bank(tmp_path, bank.points.shape[1])
