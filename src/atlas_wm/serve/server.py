"""The server process: listens, and when it is stopped answers what it has received before it ends."""

import asyncio
import logging
import socket
from pathlib import Path
from types import FrameType

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from atlas_wm.errors import UserError
from atlas_wm.plan.planner import Planner
from atlas_wm.serve.app import PlanningApp
from atlas_wm.serve.config import Address, ServeConfig

log = logging.getLogger(__name__)

SILENT_SECONDS = 10.0  # that a connection may stay open without a whole HTTP request


class ImpatientHttp(H11Protocol):
    """Closes connections that send no request, or only a part of its headers, and those over the limit; uvicorn
    waits for ever, and keeps them open."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) > self.limit_concurrency:
            transport.abort()
            return
        self.loop.call_later(SILENT_SECONDS, self._check, None)

    def _check(self, last: RequestResponseCycle | None) -> None:
        if self.transport.is_closing() or self.transport.get_protocol() is not self:  # or it became a websocket
            return
        if self.cycle is last and (last is None or last.response_complete):
            self.transport.close()
        else:
            self.loop.call_later(SILENT_SECONDS, self._check, self.cycle)


class PlanningServer(uvicorn.Server):
    """``server.run()`` until SIGTERM or SIGINT; a second SIGINT ends it at once."""

    def __init__(self, planner: Planner, config: ServeConfig, run: Path):
        self.planning = PlanningApp(planner, config, run)
        self.name = run
        self.listener = listen(config)
        host, port = self.listener.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        super().__init__(
            uvicorn.Config(
                self.planning.asgi,
                http=ImpatientHttp,
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=2 * config.max_clients + 16,  # connections: the app refuses clients with a reason
                ws_max_size=config.max_bytes,
                ws_per_message_deflate=False,
                timeout_graceful_shutdown=5,
            )
        )

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        super().run(sockets or [self.listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.planning.batcher.start()
        await super().startup(sockets)
        log.info("serving %s at http://%s (ws://%s); Ctrl-C stops it", self.name, self.address, self.address)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.planning.stopping = True
        for server in self.servers:
            server.close()  # no new connections
        log.info("stopping: %d requests are still to be answered", self.planning.active)
        while self.planning.active and not self.force_exit:
            await asyncio.sleep(0.01)
        await super().shutdown(sockets)
        await self.planning.batcher.stop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Unlike uvicorn's, it does not raise the signal again afterwards: to be stopped is no error."""
        self.force_exit = self.should_exit
        self.should_exit = True


def listen(config: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=128)
    except OSError as error:
        where = f"--host {config.host} --port {config.port}"
        raise UserError(f"cannot listen on {where} ({error.strerror or error}): choose another one") from None
