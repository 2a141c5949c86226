"""The server process: listens, and when it is stopped answers what it has received before it ends."""

import asyncio
import logging
import socket
from pathlib import Path
from types import FrameType

import uvicorn

from atlas_wm.plan.planner import Planner
from atlas_wm.serve.app import PlanningApp
from atlas_wm.serve.config import ServeConfig
from atlas_wm.serve.listener import listen, server_config

log = logging.getLogger(__name__)


class PlanningServer(uvicorn.Server):
    """``server.run()`` until SIGTERM or SIGINT; a second SIGINT ends it at once."""

    def __init__(self, planner: Planner, config: ServeConfig, run: Path):
        self.planning = PlanningApp(planner, config, run)
        self.name = run
        self.listener = listen(config)
        host, port = self.listener.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        most = 2 * config.max_clients + 16  # the app refuses clients with a reason
        limits = {"connections": most, "message_bytes": config.max_bytes, "grace_seconds": 5}
        super().__init__(server_config(self.planning.asgi, **limits))

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
