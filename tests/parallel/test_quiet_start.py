"""Processes that start do not say that Atari is not installed."""

import os
import subprocess
import sys

import pytest

from atlas_wm.parallel.workers import quiet_start

CHILD = """
import warnings
warnings.warn("ale-py not found; more", UserWarning)
warnings.warn("something new", UserWarning)
"""


@pytest.mark.parametrize("before", [None, "ignore:something else"])
def test_a_child_does_not_warn_of_atari_and_warns_of_the_rest(monkeypatch, before):
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    if before:
        monkeypatch.setenv("PYTHONWARNINGS", before)
    with quiet_start():
        child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
    assert "ale-py" not in child.stderr and "something new" in child.stderr
    assert os.environ.get("PYTHONWARNINGS") == before
