"""The losses alone under plain DDP: 4 processes of 128 rows are one of 512, in value and in gradients."""

from pathlib import Path

import plain_ddp
import pytest
import torch

from atlas_wm.losses import gathered, wemreg
from preloaded import run_script


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What each process found, and what one finds alone."""
    file = tmp_path_factory.mktemp("ddp") / "found.pt"
    run_script(Path(plain_ddp.__file__), str(file), said=file.with_name("said"))
    return [torch.load(f"{file}.{rank}") for rank in range(plain_ddp.PROCESSES)], torch.load(file)


def same(gradients, expected):
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("kind", plain_ddp.SHARES)
def test_value_and_gradients_are_those_of_the_whole_batch(measured, kind):
    by_rank, whole = measured
    for result in by_rank:
        torch.testing.assert_close(result[kind]["value"], whole[kind]["value"])
        same(result[kind]["gradients"], whole[kind]["gradients"])


def test_with_directions_of_their_own_the_gradient_is_that_of_the_mean(measured):
    by_rank, whole = measured
    each = [found["gradients"] for found in whole["own directions"]]
    mean = [torch.stack(some).mean(dim=0) for some in zip(*each, strict=True)]
    for result in by_rank:
        same(result["own directions"]["gradients"], mean)


def test_without_it_the_mean_over_shards_is_another_objective(measured):
    by_rank, _ = measured
    alone = torch.stack([result["alone"] for result in by_rank]).mean()
    assert alone > 2 * by_rank[0]["together"]


def test_in_one_process_it_is_the_identity():
    z = torch.randn(8, 3)
    assert gathered(z) is z and wemreg(gathered(z, dim=-2)).ndim == 0
