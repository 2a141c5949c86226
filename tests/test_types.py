"""Types are checked here, so that mypy has one of the processes and does not keep the others waiting."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_mypy_finds_nothing():
    done = subprocess.run(
        [sys.executable, "-m", "mypy"], cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
