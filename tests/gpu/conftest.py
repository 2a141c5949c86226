"""Tests of what runs on a CUDA device alone: `make test-gpu`, or `pytest tests/gpu`. Elsewhere they are skipped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
APART = "ATLAS_TEST_APART"  # set in the process of a test that runs apart


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "apart: runs in a process of its own, since it may leave the device unusable"
    )
    config.addinivalue_line("markers", "falls_back: the fast path goes off in it")


def why_not() -> str:
    if not torch.cuda.is_available():
        return "no CUDA device"
    return "Triton's interpreter is on: `make test-gpu` runs them" if os.environ.get("TRITON_INTERPRET") else ""


def pytest_collection_modifyitems(items):
    if reason := why_not():
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not pyfuncitem.get_closest_marker("apart") or os.environ.get(APART):
        return None
    name = f"{pyfuncitem.path}::{pyfuncitem.nodeid.partition('::')[2]}"
    command = [sys.executable, "-m", "pytest", name, "-q", "-x", "-p", "no:cacheprovider"]
    ended = subprocess.run(command, env={**os.environ, APART: "1"}, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    return True


@pytest.fixture(autouse=True)
def free_memory():
    """What one test has left on the device is no business of the next."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
