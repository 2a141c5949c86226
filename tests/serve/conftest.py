"""A real server on a free port, in a thread."""

import threading
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from atlas_wm.client import RemotePlanner
from atlas_wm.plan.planner import Planner
from atlas_wm.runs.model import load_model
from atlas_wm.serve.config import ServeConfig
from atlas_wm.serve.server import PlanningServer


@pytest.fixture(scope="module")
def model(trained):
    return load_model(trained, "cpu")


@pytest.fixture
def planner(model):
    """Its searches start from the rest of the last plan."""
    return Planner(model, replace(model.run.config.plan, cost="nearest", execute=2))


@pytest.fixture(scope="session")
def frames(task):
    """Eight TwoRoom images, (8, 224, 224, 3)."""
    states = np.random.default_rng(0).uniform(40, 180, (8, 2)).astype(np.float32)
    return task.draw(states, 224).permute(0, 2, 3, 1).numpy()


class Running:
    def __init__(self, server, thread):
        self.server, self.thread = server, thread
        self.http, self.ws = f"http://{server.address}", f"ws://{server.address}"

    def client(self, **options):
        return RemotePlanner(self.ws, **options)


@pytest.fixture
def serving(trained):
    """``with serving(planner, max_batch=4) as running``"""

    @contextmanager
    def start(planner, **settings):
        server = PlanningServer(planner, ServeConfig(port=0, **settings), trained)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        try:
            yield Running(server, thread)
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()

    return start


@pytest.fixture
def held(planner, monkeypatch):
    """Planning waits until ``release`` is set; ``sizes`` of the batches that were planned."""

    class Held:
        started, release, sizes = threading.Event(), threading.Event(), []

    plan_batch = planner.plan_batch

    def wait(frames, *rest):
        if Held.armed:
            Held.started.set()
            assert Held.release.wait(20)
            Held.sizes.append(len(frames))
        return plan_batch(frames, *rest)

    Held.armed = False
    monkeypatch.setattr(planner, "plan_batch", wait)
    return Held
