"""The application: a websocket with a session for each client, ``POST /plan`` and ``GET /healthz``."""

import asyncio
import hmac
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from torch import Tensor

from atlas_wm.client import pack
from atlas_wm.errors import UserError
from atlas_wm.plan.planner import Planner
from atlas_wm.serve.batching import Batcher, Busy, Job
from atlas_wm.serve.config import ServeConfig
from atlas_wm.serve.protocol import Request, answer, as_json, metadata, read_form, read_message

log = logging.getLogger(__name__)

BODY_SECONDS = 30.0  # to receive the body of an HTTP request
GOING_AWAY = 1001  # a close code of websockets


class Refused(UserError):
    """With the HTTP status that says so."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass
class Session:
    """What the server remembers of a websocket client."""

    goal: Tensor | None = None  # (1, 3, S, S)
    rest: np.ndarray | None = None  # of its last plan to this goal


class PlanningApp:
    def __init__(self, planner: Planner, config: ServeConfig, run: Path):
        self.planner, self.config = planner, config
        self.batcher = Batcher(
            planner,
            clients=lambda: self.clients,
            max_batch=config.max_batch,
            max_wait=config.max_wait_ms / 1e3,
            max_queue=config.max_queue,
        )
        self.metadata = pack(metadata(planner, run, config.max_bytes))
        self.stopping = False
        self.clients = 0
        self.active = 0  # requests that have been received and not answered
        routes = [
            Route("/healthz", self._healthz),
            Route("/plan", self._post_plan, methods=["POST"]),
            WebSocketRoute("/", self._websocket),
        ]
        self.asgi = Starlette(routes=routes)

    async def _healthz(self, _: HttpRequest) -> Response:
        return PlainTextResponse("stopping\n" if self.stopping else "OK\n", 503 if self.stopping else 200)

    def _admit(self, client: HTTPConnection) -> None:
        """Raises unless the client may plan. A web page must not use the server behind its reader's back, and
        browsers send an Origin with everything that a page of another site could start."""
        if "origin" in client.headers:
            raise Refused(403, "requests of browsers are refused: use a program, such as atlas_wm.client")
        if self.config.secret is not None:
            _, _, given = client.headers.get("authorization", "").partition(" ")
            given = given or client.query_params.get("token", "")
            if not hmac.compare_digest(given.encode(), self.config.secret.encode()):
                raise Refused(401, "the token is missing or wrong: send the header 'Authorization: Bearer TOKEN'")
        if self.stopping:
            raise Busy("the server is stopping")
        if self.clients >= self.config.max_clients:
            raise Busy(f"{self.clients} clients are connected already, the most that this server takes")

    @contextmanager
    def _client(self) -> Iterator[None]:
        self.clients += 1
        try:
            yield
        finally:
            self.clients -= 1

    @contextmanager
    def _request(self) -> Iterator[None]:
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    async def _plan(self, request: Request, session: Session, received: float) -> dict[str, Any]:
        if request.frame is None:
            session.goal = session.rest = None
            return {"reset": True}
        if request.goal is not None:
            session.goal, session.rest = request.goal, None
        if session.goal is None:
            raise UserError("no goal is set: send the goal image as 'goal' with the first request")
        rest = session.rest if request.rest is None else request.rest
        planned = await self.batcher.plan(Job(request.frame, session.goal, request.seed, rest))
        session.rest = planned.plan.rest
        return answer(planned, time.perf_counter() - received, request.latents)

    # HTTP

    async def _post_plan(self, http: HttpRequest) -> Response:
        received = time.perf_counter()
        try:
            self._admit(http)
            with self._client(), self._request():
                body = await self._body(http)
                form = http.headers.get("content-type", "")
                request = await asyncio.to_thread(read_form, self.planner, form, body)
                return JSONResponse(as_json(await self._plan(request, Session(), received)))
        except UserError as error:
            return _refusal(error)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it

    async def _body(self, http: HttpRequest) -> bytes:
        body, most = bytearray(), self.config.max_bytes
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in http.stream():
                    body += part
                    if len(body) > most:
                        remedy = "send smaller images, or start the server with a larger --max-message-mb"
                        raise Refused(413, f"the request is larger than {most} bytes: {remedy}")
        except TimeoutError:
            raise Refused(408, f"the request did not arrive within {BODY_SECONDS:g} s") from None
        return bytes(body)

    # Websocket

    async def _websocket(self, socket: WebSocket) -> None:
        try:
            self._admit(socket)
        except UserError as error:
            await socket.send_denial_response(_refusal(error))
            return
        with self._client():
            try:
                await socket.accept()
                await socket.send_bytes(self.metadata)
                await self._converse(socket)
            except (WebSocketDisconnect, TimeoutError):  # the client has left, or does not read
                pass

    async def _converse(self, socket: WebSocket) -> None:
        """One request after the other. The next message is received during a plan, so that pings are answered and a
        client that leaves takes its request out of the queue."""
        session, idle = Session(), self.config.idle_timeout
        incoming = asyncio.create_task(socket.receive())
        work: asyncio.Task[str | bytes] | None = None
        try:
            while True:
                done, _ = await asyncio.wait({incoming}, timeout=idle)
                if not done:
                    await socket.close(GOING_AWAY, f"no request within {idle:g} s")
                    return
                message = incoming.result()
                if message["type"] == "websocket.disconnect":
                    return
                if self.stopping:
                    await socket.close(GOING_AWAY, "the server is stopping")
                    return
                incoming = asyncio.create_task(socket.receive())
                with self._request():
                    work = asyncio.create_task(self._answer(message.get("bytes"), session))
                    await asyncio.wait({work, incoming}, return_when=asyncio.FIRST_COMPLETED)
                    if incoming.done() and incoming.result()["type"] == "websocket.disconnect":
                        return
                    said = await work
                    send = socket.send_text(said) if isinstance(said, str) else socket.send_bytes(said)
                    await asyncio.wait_for(send, idle)
        finally:
            for task in (incoming, work):
                if task is not None:
                    task.cancel()

    async def _answer(self, message: bytes | None, session: Session) -> str | bytes:
        """A plan, or the text of an error."""
        received = time.perf_counter()
        try:
            if message is None:
                raise UserError("send binary messages, msgpack maps: see docs/guides/serve.md")
            request = await asyncio.to_thread(read_message, self.planner, message)
            return pack(await self._plan(request, session, received))
        except UserError as error:
            return str(error)
        except Exception:
            log.exception("a request failed")
            return "the request failed: see the server's log"


def _refusal(error: UserError) -> Response:
    if isinstance(error, Busy):
        return JSONResponse({"error": str(error)}, 503, {"Retry-After": "1"})
    return JSONResponse({"error": str(error)}, error.status if isinstance(error, Refused) else 400)
