"""Plan on another machine: the client of ``atlas serve``. Needs NumPy, websockets and msgpack, and no torch.

>>> from atlas_wm.client import RemotePlanner
>>> with RemotePlanner("ws://127.0.0.1:8000") as planner:
...     plan = planner.plan(frame, goal)  # sets the goal
...     plan = planner.plan(frame)  # the same goal; the search may start from the last plan

Messages are msgpack maps in the convention of openpi's clients. An array is a map of ``dtype``, ``shape`` and raw
``data``; an error is a text message. Nothing is pickled.
"""

import contextlib
import math
import re
import socket
import threading
from collections import namedtuple
from typing import Any, NamedTuple

import msgpack
import numpy as np
from websockets.exceptions import ConnectionClosed, InvalidStatus, InvalidURI, WebSocketException
from websockets.sync.client import connect

__all__ = ["RemoteError", "RemotePlan", "RemotePlanner", "pack", "unpack"]

MOST_PARTS = 64  # maps and lists in a message, and items in each: small messages must not take much memory
NUMBERS = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248])")


class RemoteError(RuntimeError):
    """The server refused a request; the message says why and what to do. The connection is still usable."""


class RemotePlan(NamedTuple):
    """The fields of atlas_wm.plan.planner.Plan, and how long the server took."""

    actions: np.ndarray  # (steps, A) in the environment's units: to execute before planning again
    cost: float
    start_cost: float
    latents: np.ndarray | None  # only if asked for
    novelty: Any  # named numbers, percentiles 0 to 100; None where the run has no bank
    remaining: float
    risk: float | None  # None from a server of an older version
    rest: np.ndarray  # pass the plan as ``last`` to start the next search from it
    seconds: dict[str, float]  # waiting, planning, total: on the server, without the network


def pack(message: Any) -> bytes:
    return msgpack.packb(message, default=_encode)


def unpack(data: bytes) -> Any:
    """Raises ValueError for anything that is not a small msgpack tree of numbers, text and numeric arrays."""
    parts = 0

    def count(part: Any) -> Any:
        nonlocal parts
        parts += 1
        if parts > MOST_PARTS:
            raise ValueError(f"a message has more than {MOST_PARTS} maps and lists")
        return part

    try:
        return msgpack.unpackb(
            data,
            object_hook=lambda part: _decode(count(part)),
            list_hook=count,
            max_array_len=MOST_PARTS,
            max_map_len=MOST_PARTS,
        )
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise ValueError(f"the message is not valid msgpack: {str(error) or type(error).__name__}") from None


def _encode(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray):
        raise TypeError(f"cannot send a {type(value).__name__}: pass NumPy arrays, numbers and text")
    if not NUMBERS.fullmatch(value.dtype.str):
        raise TypeError(f"cannot send an array of {value.dtype}: only plain numbers are sent")
    return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}


def _decode(part: dict[Any, Any]) -> Any:
    if b"__npgeneric__" in part:
        return part[b"data"]
    if b"__ndarray__" not in part:
        return part
    dtype, shape, data = (part.get(key) for key in (b"dtype", b"shape", b"data"))
    if not isinstance(dtype, str) or not NUMBERS.fullmatch(dtype):
        raise ValueError(f"an array of dtype {str(dtype)[:40]!r} is refused: only plain numbers are read")
    if not isinstance(shape, list) or len(shape) > 8 or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError("the shape of an array must be up to 8 whole numbers")
    kind = np.dtype(dtype)
    if not isinstance(data, bytes) or len(data) != kind.itemsize * math.prod(shape):
        raise ValueError(f"an array of shape {tuple(shape)} and dtype {dtype} has data of another size")
    return np.frombuffer(data, kind).reshape(shape)


class RemotePlanner:
    """A connection to ``atlas serve``, used like atlas_wm.Planner. May be shared by threads, which take turns.

    url: such as ws://127.0.0.1:8000. token: what the server was started with. timeout: seconds to wait for a
    connection, and for each answer, sending included. After a timeout, an interrupt (Ctrl-C) or a lost connection
    make a new RemotePlanner: with the connection the server forgets the goal. ``metadata`` is what the server says
    of its model. Raises ValueError for an address or a token that cannot be one, RemoteError if the server refuses
    the connection, and ConnectionError if there is none or it is not ``atlas serve``.
    """

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 30.0):
        if token and not (token.isascii() and token.isprintable()):
            raise ValueError("the token must be printable ASCII, since headers are: does it end in a line break?")
        self.timeout = timeout
        self._turn = threading.Lock()
        headers = {"Authorization": f"Bearer {token}"} if token else None
        try:
            self._socket = connect(
                url,
                additional_headers=headers,
                compression=None,
                max_size=None,
                open_timeout=timeout,
                close_timeout=1,
                ping_interval=None,
                proxy=None,
            )
        except InvalidStatus as error:
            said = (error.response.body or b"").decode(errors="replace")
            raise RemoteError(f"{url} refused the connection ({error.response.status_code}): {said}") from None
        except OSError as error:
            raise ConnectionError(f"no server answers at {url} ({error}): start one with `atlas serve`") from error
        except (InvalidURI, ValueError) as error:
            why = error.msg if isinstance(error, InvalidURI) else error
            raise ValueError(f"a server's address looks like ws://127.0.0.1:8000, not {url!r} ({why})") from None
        except (WebSocketException, AssertionError) as error:  # of websockets, where SSH answers
            raise _stranger(url, error) from error
        try:
            self.metadata = _read_metadata(self._exchange())
        except (OSError, ValueError) as error:
            self._hang_up()
            raise _stranger(url, error) from error

    def plan(
        self,
        frame: Any,
        goal: Any = None,
        *,
        seed: int = 0,
        last: RemotePlan | None = None,
        latents: bool = False,
    ) -> RemotePlan:
        """One plan. frame and goal: (H, W, 3) uint8 RGB, as environments render them.

        With a goal it is the plan of Planner.plan with the same arguments. Without one it continues: the server
        uses the last goal of this connection, and its last plan as ``last`` (only a cost with warm start uses it).
        latents: also send what the model imagines.
        """
        request: dict[str, Any] = {"frame": np.asarray(frame), "seed": seed, "latents": latents}
        if goal is not None:
            request["goal"] = np.asarray(goal)
        if last is not None:
            request["rest"] = last.rest
        answer = self._ask(request)
        novelty = answer["novelty"]
        return RemotePlan(
            actions=answer["actions"].copy(),  # arrays of a message are read-only
            cost=answer["cost"],
            start_cost=answer["start_cost"],
            latents=answer.get("latents"),
            novelty=novelty and namedtuple("Novelty", novelty)(**novelty),
            remaining=answer["remaining"],
            risk=answer.get("risk"),
            rest=answer["rest"],
            seconds=answer["server_timing"],
        )

    def reset(self) -> None:
        """Forget the goal and the last plan: a new episode."""
        self._ask({"reset": True})

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> "RemotePlanner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        message, most = pack(request), self.metadata["max_bytes"]
        if len(message) > most:
            raise RemoteError(
                f"a request of {len(message)} bytes is over the server's limit of {most}: send smaller images (the "
                f"model sees {self.metadata['image_size']} pixels) or start it with a larger --max-message-mb"
            )
        with self._turn:
            answer = self._exchange(message)
        if isinstance(answer, str):
            raise RemoteError(answer)
        return unpack(answer)

    def _exchange(self, message: bytes | None = None) -> str | bytes:
        """The next message of the server, after sending one. Any failure in between ends the connection, or a late
        answer would be taken for that of the next request."""
        late = threading.Event()

        def expire() -> None:
            late.set()
            self._hang_up()

        timer = threading.Timer(self.timeout, expire)  # websockets has a timeout for recv, but none for send
        timer.daemon = True
        try:
            timer.start()
            if message is not None:
                self._socket.send(message)
            return self._socket.recv()
        except ConnectionClosed as closed:
            if late.is_set():
                raise TimeoutError(
                    f"no answer within {self.timeout:g} s: connect again, with a longer timeout"
                ) from None
            raise _lost(closed) from closed
        except BaseException:
            self._hang_up()
            raise
        finally:
            timer.cancel()

    def _hang_up(self) -> None:
        """Close at once, also during a send, whose lock close() would wait for."""
        with contextlib.suppress(OSError):  # closed already
            socket.socket.shutdown(self._socket.socket, socket.SHUT_RDWR)  # that of TLS goes on in plain text


def _read_metadata(said: str | bytes) -> dict[str, Any]:
    metadata = unpack(said) if isinstance(said, bytes) else None
    if not isinstance(metadata, dict) or "max_bytes" not in metadata:
        raise ValueError("its first message does not describe a model")
    return metadata


def _stranger(url: str, error: Exception) -> ConnectionError:
    why = str(error) or "it speaks another protocol"
    return ConnectionError(f"{url} does not answer like `atlas serve` ({why}): check the host and the port")


def _lost(closed: ConnectionClosed) -> ConnectionError:
    why = closed.rcvd.reason if closed.rcvd and closed.rcvd.reason else str(closed)
    return ConnectionError(f"the connection is closed: {why}; connect again with a new RemotePlanner")
