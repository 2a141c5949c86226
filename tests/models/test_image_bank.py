"""How novel an image is, pixel by pixel: the formula, its calibration, and changes of a scene that it must see."""

import numpy as np
import pytest
import torch

from atlas_wm.images import reduce_frames
from atlas_wm.models.image_bank import COLOURS, SIDE, ImageBank
from atlas_wm.rng import make_rng

FITTED, HELD_OUT = 2500, 1500


def noise(count, seed=0, side=32):
    return torch.randint(0, 256, (count, 3, side, side), generator=make_rng(seed), dtype=torch.uint8)


def states(count, seed):
    """Of the agent anywhere in the two rooms, but not in the wall between them."""
    drawn = np.random.default_rng(seed).uniform(25, 199, (4 * count, 2)).astype(np.float32)
    return drawn[np.abs(drawn[:, 0] - 112) > 15][:count]


@pytest.fixture(scope="module")
def bank(task):
    fitted, held_out = (task.draw(states(n, seed), 32) for n, seed in ((FITTED, 0), (HELD_OUT, 1)))
    return ImageBank.of(fitted.split(100), held_out.split(100))


def flagged(bank, frames):
    """The share of frames above 99."""
    return float((bank.percentiles(frames) > 99).float().mean())


def rendered(task, count=60, **values):
    """Frames of an environment with these values in its variation space, by name with __ for the dot."""
    env, frames = task.make_env(), []
    chosen = {name.replace("__", "."): value for name, value in values.items()}
    for state in states(count, seed=2):
        env.reset(seed=0, options={"state": state, "target_state": state, "variation_values": chosen})
        frames.append(torch.from_numpy(np.array(env.render())).permute(2, 0, 1))
    env.close()
    return reduce_frames(torch.stack(frames), 32)


def test_novelty_is_that_of_a_search_pixel_by_pixel(task):
    frames, other = task.draw(states(200, seed=5), 32), noise(4)
    found = ImageBank.of(frames.split(7), [other])
    colours, queries = found.colours.long(), reduce_frames(other, SIDE).long().flatten(2)
    for query, novelty in zip(queries, found.novelty.tolist(), strict=True):
        each = [int(((query[:, p] - colours[p]) ** 2).sum(dim=1).min()) for p in range(SIDE**2)]
        assert novelty == sum(sorted(each)[-3:])


def test_stored_colours_are_colours_of_training_frames_and_no_other_is_far_from_them(task):
    frames = task.draw(states(300, seed=6), 32)
    colours = ImageBank.of([frames], [frames]).colours.float()
    seen = reduce_frames(frames, SIDE).flatten(2).permute(2, 0, 1).float()  # (P, n, 3)
    distances = torch.cdist(colours, seen, compute_mode="donot_use_mm_for_euclid_dist")
    assert (distances.amin(dim=2) == 0).all()  # each stored colour was seen
    spacing = torch.cdist(colours, colours, compute_mode="donot_use_mm_for_euclid_dist")
    spacing = (spacing + 1e9 * torch.eye(COLOURS)).amin(dim=(1, 2))
    assert (distances.amin(dim=1).amax(dim=1) <= spacing.clamp_min(1e-9)).all()  # farthest points


def test_one_held_out_frame_in_100_lies_above_99(bank, task):
    ranks = bank.percentiles(task.draw(states(2000, seed=3), 32))
    assert 0.002 < float((ranks > 99).float().mean()) < 0.025  # 0.01, with 3 standard errors of both samples
    assert ranks.quantile(torch.linspace(0.5, 0.9, 5)).tolist() == pytest.approx(range(50, 100, 10), abs=5)


def test_an_unchanged_environment_is_not_flagged(bank, task):
    assert flagged(bank, rendered(task)) < 0.1


@pytest.mark.parametrize(
    "values",
    [{"door__position": np.array([y] * 3)} for y in (89, 130, 175)]
    + [{"agent__color": np.array(rgb, np.uint8)} for rgb in ((0, 0, 255), (0, 255, 0), (0, 0, 0), (255, 128, 0))]
    + [{"wall__axis": 0}, {"wall__color": np.array([128] * 3, np.uint8)}],
    ids=[
        "door at 89",
        "door at 130",
        "door at 175",
        "blue",
        "green",
        "black",
        "orange",
        "wall turned",
        "wall grey",
    ],
)
def test_a_changed_environment_is_flagged(bank, task, values):
    assert flagged(bank, rendered(task, **values)) >= 0.95


def test_swapped_colour_channels_are_flagged(bank, task):
    assert flagged(bank, rendered(task).flip(1)) >= 0.95


def test_the_novelty_of_a_frame_does_not_depend_on_its_batch(bank, task):
    frames = torch.cat([task.draw(states(20, seed=4), 32), noise(3)])
    assert torch.equal(bank.novelty_of(frames), torch.cat([bank.novelty_of(frame[None]) for frame in frames]))


@pytest.mark.parametrize("size", [224, 98, 32, 10, 3])
def test_a_bank_has_one_size_for_images_of_any_size(size):
    found = ImageBank.of([noise(20, side=size)], [noise(9, seed=1, side=size)])
    assert found.colours.shape == (256, 32, 3) and found.colours.nbytes < 2**15
    assert found.percentiles(noise(2, seed=2, side=size)).shape == (2,)
