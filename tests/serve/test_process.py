"""`atlas serve` as a process: SIGTERM drains it. The client is a package of its own, without torch."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import pytest

from atlas_wm.client import RemotePlanner

ROOT = Path(__file__).parents[2]
SLOW = ("--candidates", "300", "--iterations", "20", "--elites", "30")


def test_sigterm_answers_what_is_queued_and_ends_with_0(trained, frames):
    command = [sys.executable, "-m", "atlas_wm", "serve", str(trained), "--port", "0", "--device", "cpu", *SLOW]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    try:
        said = ""
        while "serving" not in said:
            said = server.stderr.readline()
            assert said, "it ended early"
        url = re.search(r"ws://[\d.:]+", said)[0]
        clients, plans = [RemotePlanner(url) for _ in range(4)], []
        asking = [
            threading.Thread(target=lambda c=client: plans.append(c.plan(frames[0], frames[1])))
            for client in clients
        ]
        for thread in asking:
            thread.start()
        while not plans:  # the others are queued
            time.sleep(0.005)
        server.send_signal(signal.SIGTERM)
        for thread in asking:
            thread.join(30)
        assert len(plans) == 4
        assert server.wait(15) == 0
        with pytest.raises(ConnectionError, match="connect again"):
            clients[0].plan(frames[0])
        with pytest.raises(ConnectionError, match="no server answers"):
            RemotePlanner(url)
        assert re.search("stopping: [1-3] requests", server.stderr.read())
    finally:
        server.kill()
        server.wait()


def test_the_client_package_is_the_module_of_this_one():
    assert (ROOT / "client/atlas_wm_client.py").resolve() == ROOT / "src/atlas_wm/client.py"
    mine, main = (
        tomllib.loads((ROOT / path).read_text())["project"] for path in ("client/pyproject.toml", "pyproject.toml")
    )
    assert mine["version"] == main["version"] and mine["requires-python"] == main["requires-python"]
    assert set(mine["dependencies"]) <= {"numpy", *main["optional-dependencies"]["serve"]}
    code = "import sys, atlas_wm_client; sys.exit('torch' in sys.modules or 'atlas_wm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT / "client", timeout=60).returncode == 0
