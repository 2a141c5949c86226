"""A real server of the page on a free port, in a thread."""

import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from atlas_wm.play.app import PlayServer
from atlas_wm.play.load import load_session
from atlas_wm.serve.config import Address


@pytest.fixture
def playing():
    """``with playing(Path("demo")) as server``; ``load``: in place of loading runs."""

    @contextmanager
    def start(*runs: Path, load=None, **settings):
        opened = threading.Event()
        load = load or (lambda: load_session(runs, None, "cpu", lambda plan: plan))
        server = PlayServer(Address(port=0, **settings), load, lambda url: opened.set())
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        try:
            assert opened.wait(20)
            yield server
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()

    return start
