"""Several processes train with the same fast step: as one graph over NCCL, with fused kernels over gloo."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from on_device import BF16, FLOAT32, clips, config_of, random_model, relative_error, step_of, updates
from rank import BATCH, RATE, REPLAYS

from atlas_wm.train.step import WARM_UP


def run(size, file, precision):
    """What ``size`` processes on this device compute, as rank 0 found it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    job |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)} if size > 1 else {}
    command = [sys.executable, str(Path(__file__).with_name("rank.py")), str(file), precision]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": "0"})
        for rank in range(size)
    ]
    assert [rank.wait(timeout=180) for rank in ranks] == [0] * size
    return torch.load(file)


@pytest.mark.parametrize(("size", "captured"), [(1, True), (2, False)])
@pytest.mark.parametrize(("precision", "tolerance"), [(FLOAT32, 1e-4), (BF16, 0.05)])
def test_several_processes_update_as_one_does(tmp_path, size, captured, precision, tolerance):
    config = config_of(precision, batch=BATCH)
    model = random_model(config)
    alone = list(updates(step_of(model, config), model, clips(config, WARM_UP + REPLAYS, BATCH), RATE))
    found = run(size, tmp_path / "found.pt", precision)
    assert (found["captured"], found["fused"]) == (captured, precision == BF16)
    for i, ((numbers, gradients), expected) in enumerate(zip(found["updates"], alone, strict=True)):
        slack = 1 if i == 0 else 50  # rounding grows from update to update
        assert numbers == pytest.approx(expected.numbers, rel=tolerance * slack, abs=1e-6)
        assert relative_error(gradients, expected.gradients) < tolerance * slack
