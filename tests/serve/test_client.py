"""The client against servers that stall, vanish or are something else, and calls that are interrupted."""

import signal
import socket
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.server import ServerProtocol
from websockets.sync.server import serve

from atlas_wm.client import RemotePlanner, pack


@contextmanager
def listening(handle):
    """A port whose connections are passed to ``handle``, and stay open until the end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peers = []

        def accept():
            while True:
                try:
                    peers.append(listener.accept()[0])
                    handle(peers[-1])
                except OSError:  # the end
                    return

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"ws://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for peer in peers:
                peer.close()


def greet_and_stop_reading(peer):
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    protocol = ServerProtocol()
    protocol.receive_data(peer.recv(65536))
    [request] = protocol.events_received()
    protocol.send_response(protocol.accept(request))
    protocol.send_binary(pack({"max_bytes": 2**30}))
    for data in protocol.data_to_send():
        peer.sendall(data)


def test_after_an_interrupt_the_late_answer_is_not_taken_for_the_next(serving, planner, held, frames):
    def interrupt(*_):
        raise KeyboardInterrupt

    with serving(planner) as running, running.client() as client:
        held.armed = True
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            with pytest.raises(KeyboardInterrupt):
                client.plan(frames[0], frames[1], seed=1)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            held.release.set()
        for _ in range(2):
            with pytest.raises(ConnectionError, match="connect again with a new RemotePlanner"):
                client.plan(frames[0], frames[1], seed=2)


@pytest.mark.parametrize("side", [8, 3000])  # sent at once; larger than the buffers of a connection
def test_the_timeout_includes_sending_and_no_thread_waits_longer(side):
    image, raised = np.zeros((side, side, 3), np.uint8), []

    def ask():
        try:
            client.plan(image)
        except OSError as error:
            raised.append(error)

    with listening(greet_and_stop_reading) as url:
        client = RemotePlanner(url, timeout=0.5)
        asking = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(5)
        assert [type(error) for error in raised] == [TimeoutError, ConnectionError, ConnectionError]
        assert "no answer within 0.5 s" in str(raised[0]) and "new RemotePlanner" in str(raised[1])


@pytest.mark.parametrize("handle", [socket.socket.close, lambda peer: peer.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")])
def test_a_port_of_something_else_is_a_connection_error(handle):
    with listening(handle) as url, pytest.raises(ConnectionError, match=f"{url} .*`atlas serve`"):
        RemotePlanner(url, timeout=1)


@pytest.mark.parametrize("first", ["hello", b"\xc1", pack(3), pack({"a": 1}), None])
def test_another_websocket_server_is_a_connection_error_and_is_left(first):
    left = threading.Event()

    def handle(connection):
        if first is not None:
            connection.send(first)
        try:
            connection.recv(timeout=10)
        except ConnectionClosed:
            left.set()

    with serve(handle, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=f"{url} does not answer like `atlas serve`.*: check the host"):
            RemotePlanner(url, timeout=1)
        assert left.wait(5)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "ws://", "ws:/127.0.0.1:9", "ws://127.0.0.1:99999"])
def test_what_cannot_be_an_address_is_a_value_error(url):
    with pytest.raises(ValueError, match=f"looks like ws://127.0.0.1:8000, not '{url}'"):
        RemotePlanner(url)


@pytest.mark.parametrize("token", ["secret\n", "gehéim"])
def test_what_cannot_be_a_token_is_a_value_error(token):
    with (
        listening(socket.socket.close) as url,
        pytest.raises(ValueError, match="token must be printable ASCII"),
    ):
        RemotePlanner(url, token=token)
