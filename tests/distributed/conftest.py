"""Real processes, told their places as torchrun tells them."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run_together(command: Sequence[str], size: int, cwd: Path = HERE) -> list[subprocess.CompletedProcess[str]]:
    """The command in ``size`` processes, and how each of them ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=cwd,
            env=os.environ
            | {"OMP_NUM_THREADS": "1"}
            | {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        ended = [(process, *process.communicate(timeout=120)) for process in started]
    finally:
        for process in started:
            process.kill()
    return [subprocess.CompletedProcess(p.args, p.returncode, out, errors) for p, out, errors in ended]


@pytest.fixture
def together():
    return run_together
