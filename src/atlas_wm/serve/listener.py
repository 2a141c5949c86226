"""What every server of this package listens with."""

import asyncio
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from atlas_wm.errors import UserError
from atlas_wm.serve.config import Address

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


def listen(config: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=128)
    except OSError as error:
        where = f"--host {config.host} --port {config.port}"
        raise UserError(f"cannot listen on {where} ({error.strerror or error}): choose another one") from None


def server_config(app: Any, *, connections: int, message_bytes: int, grace_seconds: int) -> uvicorn.Config:
    """``connections``: the most at a time. ``grace_seconds``: for open requests when it stops."""
    return uvicorn.Config(
        app,
        http=ImpatientHttp,
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=connections,
        ws_max_size=message_bytes,
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=grace_seconds,
    )
