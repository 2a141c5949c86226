"""TwoRoom: what is drawn from states is what the environment draws; what we call solved is what it calls solved."""

import numpy as np
import pytest
import torch

from atlas_wm.images import reduce_frames
from atlas_wm.tasks import get_task

TASK = get_task("tworoom")


@pytest.fixture(scope="module")
def env():
    return TASK.make_env()


def positions() -> np.ndarray:
    """Anywhere in the room, on the grid, at the borders and in the wall."""
    rng = np.random.default_rng(0)
    anywhere = rng.uniform(14, 209, (80, 2))
    on_the_grid = rng.integers(14, 209, (10, 2))
    special = [(21, 21), (203, 203), (112, 49), (99.5, 112), (124.5, 30), (14, 209), (112.5, 63.5)]
    return np.concatenate([anywhere, on_the_grid, special]).astype(np.float32)


@pytest.fixture(scope="module")
def rendered(env) -> torch.Tensor:
    frames = []
    for state in positions():
        TASK.reset(env, state, state)
        frames.append(torch.from_numpy(env.render().copy()).permute(2, 0, 1))
    return torch.stack(frames)


@pytest.mark.parametrize("size", [224, 112, 64, 50, 32])
def test_drawn_frames_equal_the_environments_pixel_by_pixel(rendered, size):
    assert torch.equal(TASK.draw(positions(), size), reduce_frames(rendered, size))


def test_a_reset_puts_the_agent_and_the_goal_where_asked(env):
    state, goal = np.array([60.25, 100.5], np.float32), np.array([170.0, 40.0], np.float32)
    TASK.reset(env, state, goal)
    assert np.array_equal(TASK.state(env), state)
    assert np.array_equal(env.unwrapped.target_position.numpy(), goal)


def test_solved_agrees_with_the_environment(env):
    rng = np.random.default_rng(1)
    verdicts = set()
    for _ in range(60):
        goal = rng.uniform(30, 90, 2).astype(np.float32)
        state = goal + rng.uniform(-15, 15, 2).astype(np.float32)
        TASK.reset(env, state, goal)
        _, _, terminated, _, _ = env.step(np.zeros(2, np.float32))
        assert TASK.solved(TASK.state(env), goal) == terminated
        verdicts.add(bool(terminated))
    assert verdicts == {True, False}


def test_the_probe_reads_the_agents_position():
    (agent,) = TASK.coordinates(positions())
    assert (agent.name, agent.unit, agent.angle) == ("agent", "px", False)
    assert np.array_equal(agent.values, positions())
