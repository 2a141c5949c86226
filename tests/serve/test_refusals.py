"""What a server refuses, how it says so, and that other clients do not notice."""

import contextlib
import json
import logging
import socket
import struct
import threading
import time
import urllib.error
import urllib.request

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from atlas_wm.client import RemoteError, RemotePlanner, pack, unpack
from atlas_wm.errors import SettingError, UserError
from atlas_wm.serve import listener
from atlas_wm.serve.config import ServeConfig
from atlas_wm.serve.listener import listen
from atlas_wm.serve.protocol import read_message


def status_of(request):
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


def array(dtype="|u1", shape=(2,), data=b"ab"):
    return {b"__ndarray__": True, b"dtype": dtype, b"shape": shape, b"data": data}


def test_images_that_are_none_are_refused_with_a_remedy_and_the_connection_survives(serving, planner, frames):
    wrong = {
        r"frame must be uint8 .* not float32: its values lie in \[0, 1\]": (frames[0] / 255).astype(np.float32),
        r"frame must have shape .*: move the channels last, `frame.transpose\(1, 2, 0\)`": frames[0].transpose(
            2, 0, 1
        ),
        r"frame must have shape .*: it is grayscale": frames[0][..., 0],
        r"frame: an image of 112×224 pixels .* is stretched: .*crop it alike": frames[0][:112],
        r"frame: an image of 8×8 pixels is enlarged to 32×32: .*render it larger": frames[0][:8, :8],
    }
    with serving(planner) as running, running.client() as client:
        for message, image in wrong.items():
            with pytest.raises(RemoteError, match=message):
                client.plan(image, frames[1])
        with pytest.raises(RemoteError, match="goal must be uint8"):
            client.plan(frames[0], frames[1].astype(np.int64))
        with pytest.raises(RemoteError, match="seed must be a whole number"):
            client.plan(frames[0], frames[1], seed=-1)
        with pytest.raises(TypeError, match="only plain numbers are sent"):
            client.plan(np.array([None, "x"]), frames[1])
        assert len(client.plan(frames[0], frames[1]).actions) == 10


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (b"\xc1garbage", "not valid msgpack"),
        (b"", "not valid msgpack"),
        (b"\x93" * 2000, "not valid msgpack"),
        (msgpack.packb([{}] * 60 + [[[]] * 60]), "more than 64 maps and lists"),
        (msgpack.packb([0] * 100_000), "not valid msgpack"),
        (msgpack.packb(3), "a request is a map"),
        (msgpack.packb({}), "the request has no frame"),
        (msgpack.packb({"fraem": 1}), "unknown field 'fraem'. Did you mean 'frame'?"),
        (msgpack.packb({"frame": 1}), "frame must have shape|frame must be"),
        (msgpack.packb({"frame": array("|O")}), r"dtype '\|O' is refused"),
        (msgpack.packb({"frame": array("|V2")}), "is refused"),
        (msgpack.packb({"frame": array("(9999999,)u1")}), "is refused"),
        (msgpack.packb({"frame": array(shape=(2**40, 2**40, 3))}), "data of another size"),
        (msgpack.packb({"frame": array(shape=(-1, -2))}), "up to 8 whole numbers"),
        (msgpack.packb({"reset": 1}), "reset must be true or false"),
    ],
)
def test_a_malformed_message_gets_an_error(planner, message, error):
    with pytest.raises(UserError, match=error):
        read_message(planner, message)


def test_garbage_and_text_are_answered_with_errors(serving, planner, frames):
    with serving(planner) as running, connect(running.ws, compression=None) as socket:
        socket.recv()
        for message in (b"\xc1", "text", msgpack.packb({"frame": array("|O")})):
            socket.send(message)
            assert isinstance(socket.recv(timeout=5), str)
        socket.send(pack({"frame": frames[0], "goal": frames[1], "rest": np.full((3, 10), np.nan)}))
        assert "rest must be" in socket.recv(timeout=5)
        socket.send(pack({"frame": frames[0], "goal": frames[1]}))
        assert "actions" in unpack(socket.recv(timeout=5))


def test_a_message_over_the_limit(serving, planner, frames):
    with serving(planner, max_message_mb=0.2) as running, running.client() as client:
        with pytest.raises(RemoteError, match=r"over the server's limit .* --max-message-mb"):
            client.plan(frames[0], frames[1])
        assert len(client.plan(frames[0][::7, ::7], frames[1][::7, ::7]).actions) == 10
        with connect(running.ws, compression=None) as socket:
            socket.recv()
            socket.send(bytes(300_000))
            with pytest.raises(ConnectionClosed) as closed:
                socket.recv(timeout=5)
            assert closed.value.rcvd.code == 1009
        code, said = status_of(urllib.request.Request(f"{running.http}/plan", bytes(300_000)))
        assert code == 413 and "--max-message-mb" in said
        assert len(client.plan(frames[0][::7, ::7]).actions) == 10


def test_http_errors_say_what_to_send(serving, planner):
    form = {"Content-Type": "multipart/form-data; boundary=b"}
    part = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    with serving(planner) as running:

        def post(body, headers=form):
            return status_of(urllib.request.Request(f"{running.http}/plan", body, headers))

        code, said = post(b"{}", {"Content-Type": "application/json"})
        assert code == 400 and "curl -F frame=@now.png" in said
        assert post(part % (b"frame", b"no image") + b"--b--") == (
            400,
            "frame is no image: send one of PNG, JPEG, BMP, WEBP",
        )
        assert post(part % (b"frame", b"x"))[1].startswith("the form ends too early")
        assert "unknown field 'farme'" in post(part % (b"farme", b"x") + b"--b--")[1]
        assert post(part % (b"seed", b"1") + b"--b--")[1].startswith("the request has no frame")
        code, said = post(b"--b--", {**form, "Origin": "http://evil.example"})
        assert code == 403 and "browsers" in said


def test_a_full_queue_refuses_instead_of_growing(serving, planner, held, frames, tmp_path):
    with serving(planner, max_queue=1, max_clients=3) as running:
        clients = [running.client() for _ in range(3)]
        held.armed = True
        asking = [threading.Thread(target=clients[0].plan, args=(frames[0], frames[1]))]
        asking[0].start()
        assert held.started.wait(10)  # planned; the next one waits in the queue
        asking.append(threading.Thread(target=clients[1].plan, args=(frames[0], frames[1])))
        asking[1].start()
        until(lambda: running.server.planning.batcher._queue.full())
        with pytest.raises(RemoteError, match="1 requests are waiting already"):
            clients[2].plan(frames[0], frames[1])
        with pytest.raises(RemoteError, match=r"\(503\).*3 clients are connected already"):
            running.client()
        assert status_of(urllib.request.Request(f"{running.http}/plan", b"x"))[0] == 503
        held.release.set()
        for thread in asking:
            thread.join(10)
        assert len(clients[2].plan(frames[0], frames[1]).actions) == 10
        for client in clients:
            client.close()


def until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_another_host_needs_a_token(monkeypatch):
    monkeypatch.delenv("ATLAS_TOKEN", raising=False)
    for host in ("127.0.0.1", "::1", "localhost"):
        assert ServeConfig(host=host).secret is None
    for host in ("0.0.0.0", "::", "192.168.0.7", "robot.example"):
        with pytest.raises(SettingError, match="set a token"):
            ServeConfig(host=host)
        assert ServeConfig(host=host, token="secret").secret == "secret"
    monkeypatch.setenv("ATLAS_TOKEN", "hidden")
    assert ServeConfig(host="0.0.0.0").secret == "hidden"


def test_the_token_is_checked(serving, planner, frames):
    with serving(planner, token="s3cret-/?") as running:
        for token in (None, "wrong", "s3cret"):
            with pytest.raises(RemoteError, match=r"\(401\).*token is missing or wrong"):
                running.client(token=token)
        with RemotePlanner(f"{running.ws}/?token=s3cret-/%3F") as client:
            assert len(client.plan(frames[0], frames[1]).actions) == 10
        plan = urllib.request.Request(f"{running.http}/plan", b"x")
        assert status_of(plan)[0] == 401
        assert status_of(f"{running.http}/healthz")[0] == 200


def test_the_header_of_openpi_carries_the_token_too(serving, planner):
    with serving(planner, token="abc") as running:
        with connect(running.ws, additional_headers={"Authorization": "Api-Key abc"}) as socket:
            assert unpack(socket.recv())["server"] == "atlas-wm"
        with running.client(token="abc") as client:
            assert client.metadata["run"] == "tiny"


def test_a_killed_client_leaves_the_queue_and_hurts_nobody(serving, planner, held, frames):
    with serving(planner) as running, running.client() as good:
        held.armed = True
        asking = threading.Thread(target=good.plan, args=(frames[0], frames[1]))
        asking.start()
        assert held.started.wait(10)
        bad = connect(running.ws, compression=None)
        bad.recv()
        bad.send(pack({"frame": frames[2], "goal": frames[3]}))
        until(lambda: running.server.planning.active == 2)
        bad.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        bad.socket.shutdown(socket.SHUT_RDWR)  # without the closing handshake of a websocket
        until(lambda: running.server.planning.active == 1)
        held.release.set()
        asking.join(10)
        assert len(good.plan(frames[0]).actions) == 10
        assert held.sizes == [1, 1]  # nothing was planned for the dead one
        until(lambda: running.server.planning.clients == 1)


def test_silent_clients_are_disconnected(serving, planner, frames, monkeypatch):
    monkeypatch.setattr(listener, "SILENT_SECONDS", 0.2)
    with serving(planner, idle_timeout=0.3) as running:
        client = running.client()
        host, port = running.server.address.split(":")
        with socket.create_connection((host, int(port)), timeout=5) as silent:
            silent.sendall(b"POST /plan HTTP/1.1\r\nContent-Le")
            assert silent.recv(1) == b""
        time.sleep(0.5)
        with pytest.raises(ConnectionError, match=r"no request within 0.3 s; connect again"):
            client.plan(frames[0], frames[1])


def test_a_client_that_leaves_within_a_request_is_no_error(serving, planner, caplog):
    with serving(planner, max_clients=1) as running:
        host, port = running.server.address.split(":")
        with socket.create_connection((host, int(port)), timeout=5) as leaving:
            leaving.sendall(b"POST /plan HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nabc")
            until(lambda: running.server.planning.clients == 1)
        until(lambda: running.server.planning.clients == 0)
    assert [r for r in caplog.records if r.levelno > logging.INFO] == []


def test_open_connections_are_limited(serving, planner):
    with serving(planner, max_clients=1) as running:
        host, port = running.server.address.split(":")
        many = [socket.create_connection((host, int(port)), timeout=5) for _ in range(25)]
        until(lambda: sum(map(is_closed, many)) == 25 - 18)
        for connection in many:
            connection.close()


def is_closed(connection):
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_message_is_read_or_refused(planner, data):
    """Of random bytes, and of maps with arrays of any numbers and any shape."""
    shape = data.draw(st.lists(st.sampled_from([0, 1, 3, 4, 32]), max_size=4))
    dtype = np.dtype(data.draw(st.sampled_from(["?", "u1", "i1", "u2", ">u4", "u8", "i8", ">f2", "f4", "f8"])))
    image = np.frombuffer(data.draw(st.binary(min_size=1, max_size=20)) * 8, np.uint8)
    image = np.resize(image, int(np.prod(shape)) * dtype.itemsize).tobytes()
    scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
    fields = {
        "frame": array(dtype.str, shape, image),
        "goal": data.draw(scalars | st.just(array("|u1", (32, 32, 3), bytes(3072)))),
        "seed": data.draw(scalars),
        "rest": data.draw(scalars | st.just(array(dtype.str, shape, image))),
        data.draw(st.sampled_from(["latents", "reset", "frame"])): data.draw(scalars | st.lists(scalars)),
    }
    message = data.draw(st.just(msgpack.packb(fields)) | st.binary())
    with contextlib.suppress(UserError):
        read_message(planner, message)


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on --host 127.0.0.1 --port {port} .*in use"):
            listen(ServeConfig(port=port))
