"""The planning score: closed forms for a point in the plane, limits, invariances."""

import math

import pytest
import torch

from atlas_wm.models.score import Episodes, planning_score, saturation
from atlas_wm.rng import make_rng

LENGTH, HORIZON = 16, 5


class Plane:
    """A point that actions move: a perfect predictor. The latent is what ``see`` makes of the position, which
    comes after it, for ``terminal`` alone. ``heed``: by how much actions move the imagined point."""

    def __init__(self, see=lambda position: position, heed: float = 1.0):
        self.see, self.heed = see, heed

    def encode(self, position):
        return torch.cat([self.see(position), position], dim=-1)

    def terminal(self, z, actions):
        return self.encode(z[:, None, -2:] + self.heed * actions.sum(dim=2))

    def distance(self, z, goal):
        return (z - goal)[..., :-2].square().sum(dim=-1)


def waves(period: float):
    """Positions a period apart look the same."""

    def see(position):
        angle = 2 * math.pi * position / period
        return torch.cat([angle.sin(), angle.cos()], dim=-1)

    return see


def walks(episodes: int = 40) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions, actions, episodes of noisy straight walks of one unit a chunk, from starts in a square of 20."""
    rng = make_rng(3)
    angle = 2 * math.pi * torch.rand(episodes, 1, generator=rng, dtype=torch.float64)
    heading = torch.stack([angle.cos(), angle.sin()], dim=-1)
    actions = heading + 0.3 * torch.randn(episodes, LENGTH, 2, generator=rng, dtype=torch.float64)
    start = 20 * torch.rand(episodes, 1, 2, generator=rng, dtype=torch.float64)
    positions = torch.cat([start, start + actions[:, :-1].cumsum(dim=1)], dim=1)
    return positions.flatten(0, 1), actions.flatten(0, 1), torch.arange(episodes).repeat_interleave(LENGTH)


def recorded(model: Plane) -> Episodes:
    positions, actions, episode = walks()
    return Episodes(model.encode(positions), actions, episode)


def score(model: Plane, horizon: int = HORIZON) -> float:
    return planning_score(model, recorded(model), horizon, make_rng(0))


def test_a_latent_that_is_the_position_scores_nearly_one():
    assert score(Plane()) > 0.95


def test_actions_that_end_at_the_goal_score_highest():
    """No episode is long enough for goals two horizons away."""
    assert score(Plane(), horizon=LENGTH - 6) > 0.99  # but for the same sequence, drawn again


def test_a_predictor_that_ignores_actions_scores_one_half():
    assert score(Plane(heed=0.0)) == 0.5


def test_a_predictor_with_reversed_actions_scores_nearly_zero():
    assert score(Plane(heed=-1.0)) < 0.15


def test_a_folded_latent_scores_less():
    """Goals are 5 and 10 away. With a period of 8 the recorded walk to the latter ends opposite of where the goal
    seems to be: that half of the score falls below one half."""
    assert score(Plane(waves(200.0))) == pytest.approx(score(Plane()), abs=0.01)
    assert score(Plane(waves(8.0))) < 0.7
    assert score(Plane(waves(0.01))) < 0.8  # the actions that were recorded still end at the nearer goal


def test_latents_without_order_score_one_half():
    model = Plane()
    positions, actions, episode = walks()
    shuffled = Episodes(
        model.encode(positions)[torch.randperm(len(positions), generator=make_rng(2))], actions, episode
    )
    assert planning_score(model, shuffled, HORIZON, make_rng(0)) == pytest.approx(0.5, abs=0.1)


def test_rotation_scale_and_shift_change_nothing():
    turn = torch.linalg.qr(torch.randn(2, 2, generator=make_rng(1), dtype=torch.float64)).Q
    other = Plane(lambda position: 7 * position @ turn - 3)
    assert score(other) == pytest.approx(score(Plane()))
    one, same = (saturation(model, recorded(model), HORIZON) for model in (Plane(), other))
    assert one == pytest.approx(same)


def test_the_same_rng_gives_the_same_score():
    model = Plane()
    first, second, third = (
        planning_score(model, recorded(model), HORIZON, make_rng(seed), windows=10, others=4) for seed in (0, 0, 1)
    )
    assert first == second != third


def test_batches_of_rollouts_do_not_change_the_score(monkeypatch):
    whole = score(Plane())
    monkeypatch.setattr("atlas_wm.models.score.ROLLOUTS", 100)
    assert score(Plane()) == pytest.approx(whole)


def test_windows_stay_within_an_episode():
    episode = torch.tensor([0, 0, 0, 1, 1, 5])
    some = Episodes(torch.zeros(6, 4), torch.zeros(6, 2), episode)
    assert some.windows(1).tolist() == [0, 1, 3] and some.windows(2).tolist() == [0]
    assert not len(some.windows(len(some.z) + 3))  # fewer frames than chunks
    assert math.isnan(planning_score(Plane(), some, 3, make_rng(0)))
    assert math.isnan(saturation(Plane(), some, 3))


def test_saturation_is_the_share_of_the_typical_distance():
    """Walks of one unit a chunk in a square of 20: short folds make near frames as far apart as any others."""
    wide, narrow = (saturation(model, recorded(model), HORIZON) for model in (Plane(), Plane(waves(4.0))))
    assert wide < 0.6 and narrow > 0.9
    two = Episodes(torch.tensor([[0.0, 0, 0], [3, 0, 0], [6, 0, 0], [6, 0, 0], [9, 0, 0], [12, 0, 0]]),
                   torch.zeros(6, 2), torch.tensor([0, 0, 0, 1, 1, 1]))  # fmt: skip
    assert saturation(Plane(), two, 1) == pytest.approx(3 / 6)
