"""Frames are reduced to the mean over each pixel's area."""

import pytest
import torch
from torch.nn.functional import interpolate

from atlas_wm.images import reduce_frames
from atlas_wm.rng import make_rng


def frames(n: int, height: int, width: int) -> torch.Tensor:
    return torch.randint(0, 256, (n, 3, height, width), dtype=torch.uint8, generator=make_rng(height))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("height", "width", "size"),
    [(224, 224, 112), (224, 224, 96), (224, 224, 64), (224, 224, 32), (224, 224, 5), (200, 300, 1), (600, 20, 1),
     (480, 640, 224), (97, 31, 30), (7, 9, 16), (1, 1, 3)],
)  # fmt: skip
def test_each_pixel_is_the_mean_of_its_area(height, width, size, channels_last):
    given = frames(3, height, width)
    if channels_last:
        given = given.to(memory_format=torch.channels_last)
    expected = interpolate(given.double(), (size, size), mode="area").round().to(torch.uint8)
    assert torch.equal(reduce_frames(given, size), expected)


def test_half_grey_levels_are_rounded_to_even():
    given = torch.tensor([[0, 1], [1, 0]], dtype=torch.uint8).repeat(1, 3, 1, 1)
    assert reduce_frames(given, 1).unique().tolist() == [0]
    assert reduce_frames(given + 1, 1).unique().tolist() == [2]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_frames_do_not_depend_on_the_others(count):
    given = frames(3, 50, 50)
    assert torch.equal(reduce_frames(given[:count], 32), reduce_frames(given, 32)[:count])


def test_frames_of_the_right_size_are_not_copied():
    given = frames(2, 32, 32)
    assert reduce_frames(given, 32) is given
