"""The server of the page: whom it answers, what it says while models load and when they do not."""

import json
import threading
import time
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from atlas_wm.cli.app import main
from atlas_wm.errors import UserError
from atlas_wm.play.app import FILES, MOST_VISITORS, PlayServer, without_outdated
from atlas_wm.serve.config import Address


def never():
    raise UserError("there is no run folder nowhere: train one")


def status(url: str, **headers: str) -> int:
    try:
        with urlopen(Request(url, headers=headers), timeout=10) as answer:
            return answer.status
    except HTTPError as error:
        return error.code


class Silent:
    """A session that has nothing to say."""

    running, events = False, []

    def close(self):
        pass


def test_the_page_comes_before_the_models(playing):
    with playing(load=lambda: Silent) as server:
        base = server.url.rstrip("/")
        assert {status(base + path) for path in FILES} == {200}
        page = urlopen(base + "/", timeout=10)
        assert "Loading" in page.read().decode()
        assert "default-src 'self'" in page.headers["Content-Security-Policy"]
        assert status(base + "/../app.py") == status(base + "/session.py") == 404


def test_other_sites_are_refused(playing):
    with playing(load=lambda: Silent) as server:
        live = f"ws://{server.address}/live"
        assert status(server.url, Host="evil.example") == 403  # a name that now points to this machine
        assert status(server.url, Origin="http://evil.example") == 403
        for name in ("localhost", f"localhost:{server.port}", "[::1]", "127.0.0.1:99"):  # such as a forwarded port
            assert status(server.url, Host=name, Origin=f"http://{name}") == 200
        with pytest.raises(InvalidStatus, match="403"):
            connect(live, origin="http://evil.example")
        with connect(live, origin=f"http://{server.address}"):
            pass


def test_other_machines_need_a_token(playing):
    with pytest.raises(UserError, match="set a token"):
        Address(host="0.0.0.0")
    with playing(load=lambda: Silent, token="secret") as server:
        base = f"http://{server.address}/"
        assert server.url == base + "?token=secret"
        assert status(base) == 403 and status(base + "?token=other") == 403 and status(server.url) == 200
        with pytest.raises(InvalidStatus, match="403"):
            connect(f"ws://{server.address}/live")
        with connect(f"ws://{server.address}/live?token=secret"):
            pass


def test_too_many_pages_are_refused(playing):
    with playing(load=lambda: Silent) as server:
        open_ones = [connect(f"ws://{server.address}/live") for _ in range(MOST_VISITORS)]
        with pytest.raises(InvalidStatus, match="403"):
            connect(f"ws://{server.address}/live")
        for one in open_ones:
            one.close()


def test_a_run_that_does_not_load_is_said_on_the_page_and_ends_the_command():
    said = []
    opened = []
    server = PlayServer(Address(port=0), never, opened.append)

    def talk():
        while not opened:
            time.sleep(0.01)
        with connect(opened[0].replace("http", "ws") + "live") as socket:
            said.append(json.loads(socket.recv(timeout=10)))

    talking = threading.Thread(target=talk, daemon=True)
    talking.start()
    with pytest.raises(UserError, match="no run folder"):
        server.run()
    talking.join(10)
    assert said == [{"event": "error", "text": str(server.error), "final": True}]


def test_of_a_drag_only_the_last_message_counts():
    moves = [{"do": "move", "which": "goal", "name": "agent", "x": i / 10} for i in range(3)]
    other, go, vary = {**moves[0], "which": "start"}, {"do": "go"}, {"do": "vary", "values": {}}
    assert without_outdated([*moves, other, go, go, vary, vary, None]) == [moves[2], other, go, go, vary, None]
    assert without_outdated([moves[0], go, moves[1]]) == [moves[0], go, moves[1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b", "c"], "one or two runs"),
        (["--host", "0.0.0.0"], "--host 0.0.0.0 .*token"),
        (["--port", "99999"], "--port must"),
        (["nowhere", "--no-browser", "--port", "0"], "there is no run folder nowhere"),
    ],
)
def test_what_the_command_refuses(arguments, message):
    with pytest.raises(SystemExit, match=message):
        main(["play", *arguments])
