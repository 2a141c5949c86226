"""Processes that start do not say that Atari is not installed, and leave Ctrl-C to the one that starts them."""

import os
import signal
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


@pytest.mark.usefixtures("heard_interrupts")
def test_ctrl_c_does_not_reach_a_child():
    interrupted = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('alive')"]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with quiet_start():
        child = subprocess.run(interrupted, capture_output=True, text=True)
    assert child.stdout == "alive\n" and not child.stderr
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    assert subprocess.run(interrupted, capture_output=True).returncode == -signal.SIGINT
