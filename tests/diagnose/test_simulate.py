"""The real environment in processes: images of states that cannot be drawn, and random actions."""

import numpy as np
import torch

from atlas_wm.diagnose import simulate
from atlas_wm.diagnose.simulate import Simulator
from atlas_wm.images import frame_to_tensor, reduce_frames
from atlas_wm.tasks import get_task


def test_images_of_a_task_that_cannot_draw_are_what_the_environment_shows(simulator, monkeypatch):
    task = get_task("pusht")
    rng = np.random.default_rng(0)
    states = np.column_stack(
        [rng.uniform(60, 180, (5, 2)), rng.uniform(250, 400, (5, 2)), rng.uniform(0, 6, 5), np.zeros((5, 2))]
    )
    monkeypatch.setattr(simulate, "STATES_PER_JOB", 2)  # in several processes
    env, expected = task.make_env(), []
    for state in states:
        task.reset(env, state, states[0])  # the goal is not in the image
        expected.append(reduce_frames(frame_to_tensor(env.render()), 32)[0])
    images = simulator.images(task, states, 32)
    assert images.dtype == torch.uint8 and torch.equal(images, torch.stack(expected))
    assert len({image.numpy().tobytes() for image in images}) == 5


def test_what_can_be_drawn_is_drawn_without_a_process(task, data):
    idle = Simulator(1)
    assert torch.equal(idle.images(task, data.states[:3], 32), task.draw(data.states[:3], 32))
    assert not idle._pool._idle


def test_random_states_are_a_function_of_the_seed_alone(simulator, task):
    states, env = simulator.random_states(task, 3, 10, 5, seed=1), task.make_env()
    assert states.tolist() == [
        simulate._random_states(task, env, 10, 5, [1, n])[i].tolist() for n in range(3) for i in (0, 1)
    ]
    assert simulator.random_states(task, 3, 10, 5, seed=1) is states  # for the next run
    assert not np.array_equal(states, simulator.random_states(task, 3, 10, 5, seed=2))
    assert len(np.unique(states, axis=0)) == 6
