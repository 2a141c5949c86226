"""Several processes compute what one does: losses, gradients, statistics, weights. 2 and 4, unevenly filled."""

from pathlib import Path

import job
import pytest
import torch

from preloaded import run_script


@pytest.fixture(scope="module")
def measured(dataset_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    run_script(Path(job.__file__), str(dataset_path), str(folder), said=folder / "said")
    return {size: torch.load(folder / f"{size}.pt") for size in (1, 2, 4)}


@pytest.fixture
def alone(measured):
    return measured[1][0]


@pytest.fixture(params=[2, 4])
def by_rank(request, measured):
    assert len(measured[request.param]) == request.param
    return measured[request.param]


def same(found, expected, tolerance):
    """The scale is that of the largest number of a tensor: a gradient is as exact as its large parts."""
    if isinstance(expected, (dict, list)):
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            same(found[key], expected[key], tolerance)
        return
    scale = max(1e-3, float(expected.abs().max()))
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * scale)


@pytest.mark.slow
def test_every_loss_term_and_its_gradient(by_rank, alone):
    assert all(value[0] > 0 for value in alone["terms"].values())
    for result in by_rank:
        same(result["terms"], alone["terms"], 1e-5)


def test_batchnorm_its_gradient_and_its_statistics(by_rank, alone):
    for result in by_rank:
        same(result["batchnorm"], alone["batchnorm"], 1e-5)


def test_batchnorm_alone_is_torchs(alone):
    norm = torch.nn.BatchNorm1d(5)
    torch.nn.init.normal_(norm.weight, generator=job.make_rng(2))
    x = 2 + 3 * job.draw(job.CLIPS, 5, key=3)
    torch.testing.assert_close(norm(x), alone["batchnorm"]["0.1 3"][0], rtol=1e-6, atol=1e-6)
    assert list(norm.state_dict()) == list(job.BatchNorm(5).state_dict())


@pytest.mark.parametrize("method", job.METHODS)
def test_the_whole_step_and_the_clipped_gradient(by_rank, alone, method):
    expected = alone["steps"][method]
    assert expected["norm"] > 0.01  # it was clipped
    for result in by_rank:
        same(result["steps"][method], expected, 1e-4)


def test_eight_steps_end_with_the_same_weights(by_rank, alone):
    expected = alone["training"]
    assert [bool("val_total" in row) for row in expected["rows"]] == [False, True, False, True]
    for result in by_rank:
        found = result["training"]
        same(found["weights"], expected["weights"], 1e-2)  # rounding of one step is 5e-5, and adds up
        for row, other in zip(found["rows"], expected["rows"], strict=True):
            assert row == pytest.approx(other, rel=5e-3)
        same(found["weights"], by_rank[0]["training"]["weights"], 0)


def test_fewer_clips_than_processes(by_rank, alone):
    for result in by_rank:
        assert result["training"]["few"] == pytest.approx(alone["training"]["few"], rel=5e-3)
        same(result["training"]["statistics"], alone["training"]["statistics"], 1e-2)
