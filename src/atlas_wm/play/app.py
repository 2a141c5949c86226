"""The server of the page. Models load while the page opens; one thread plans, acts and renders for all visitors."""

import asyncio
import hmac
import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from atlas_wm.errors import UserError
from atlas_wm.serve.config import Address, is_loopback
from atlas_wm.serve.listener import listen, server_config

if TYPE_CHECKING:
    from atlas_wm.play.session import Session

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
FILES = {"/": "page.html", "/play.js": "play.js", "/lane.js": "lane.js", "/play.css": "play.css"}
NEED_TOKEN = ("/", "/live")  # the other files are those of the package
MOST_VISITORS = 4
MOST_WAITING = 32  # messages of a page
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; connect-src 'self'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PlayServer(uvicorn.Server):
    """``server.run()`` until Ctrl-C. ``load`` makes a session for a visitor, after models have been loaded once."""

    def __init__(
        self, address: Address, load: "Callable[[], Callable[[], Session]]", on_start: Callable[[str], None]
    ):
        self.settings, self.load, self.on_start = address, load, on_start
        self.error: BaseException | None = None
        self.listener = listen(address)
        host, self.port = self.listener.getsockname()[:2]
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        self.address = f"[{shown}]:{self.port}" if ":" in shown else f"{shown}:{self.port}"
        token = f"?token={address.secret}" if address.secret else ""
        self.url = f"http://{self.address}/{token}"
        self.visitors = 0
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="play")  # of OpenGL contexts, too
        routes: list[Any] = [Route(path, self._file) for path in FILES]
        app = Starlette(routes=[*routes, WebSocketRoute("/live", self._live)])
        super().__init__(server_config(app, connections=64, message_bytes=2**16, grace_seconds=1))

    def run(self, sockets: Any = None) -> None:
        super().run(sockets or [self.listener])
        self.thread.shutdown(cancel_futures=True)
        if self.error is not None:
            raise self.error

    async def startup(self, sockets: Any = None) -> None:
        self.loaded = asyncio.get_running_loop().run_in_executor(self.thread, self.load)
        self.loaded.add_done_callback(self._check)
        await super().startup(sockets)
        self.on_start(self.url)

    def _check(self, loaded: Any) -> None:
        """A run that does not load ends the server, once a page has had the time to say why."""
        if not loaded.cancelled() and (error := loaded.exception()) is not None:
            self.error = error
            asyncio.get_running_loop().call_later(1.0, self.handle_exit, 0, None)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Unlike uvicorn's, it does not raise the signal again afterwards: to be stopped is no error."""
        self.force_exit = self.should_exit
        self.should_exit = True

    def _refused(self, client: HTTPConnection) -> str | None:
        """Why a request is not answered: a page of another site must not reach the server through a browser."""
        host, origin, secret = client.headers.get("host", ""), client.headers.get("origin"), self.settings.secret
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if is_loopback(self.settings.host) and not is_loopback(name.strip("[]")):
            return "open the page at the address that `atlas play` printed"
        if origin is not None and origin.partition("://")[2] != host:
            return "requests of other sites are refused"
        given = client.query_params.get("token", "")
        if secret and client.url.path in NEED_TOKEN and not hmac.compare_digest(given.encode(), secret.encode()):
            return "the token is missing or wrong: open the page with ?token=TOKEN"
        return None

    async def _file(self, request: Request) -> Response:
        refused = self._refused(request)
        if refused is not None:
            return PlainTextResponse(refused + "\n", 403)
        return FileResponse(FOLDER / FILES[request.url.path], headers=HEADERS)

    async def _live(self, socket: WebSocket) -> None:
        refused = self._refused(socket)
        if refused is None and self.visitors >= MOST_VISITORS:
            refused = f"{MOST_VISITORS} pages are open already: close one"
        if refused is not None:
            await socket.send_denial_response(PlainTextResponse(refused + "\n", 403))
            return
        await socket.accept()
        self.visitors += 1
        session: Session | None = None
        loop = asyncio.get_running_loop()
        try:
            make_session = await asyncio.shield(self.loaded)
            session = await loop.run_in_executor(self.thread, make_session)
            await self._play(socket, session)
        except WebSocketDisconnect:
            pass
        except UserError as error:
            await socket.send_text(json.dumps({"event": "error", "text": str(error), "final": True}))
        except Exception as error:
            log.exception("a session failed")
            text = f"the session failed ({type(error).__name__}): see the terminal, then reload the page"
            await socket.send_text(json.dumps({"event": "error", "text": text, "final": True}))
        finally:
            self.visitors -= 1
            if session is not None:
                loop.run_in_executor(self.thread, session.close)

    async def _play(self, socket: WebSocket, session: "Session") -> None:
        """Handle messages as they come; while the session runs, advance it in between."""
        loop, messages = asyncio.get_running_loop(), asyncio.Queue[str](MOST_WAITING)

        async def receive() -> None:
            while True:
                await messages.put(await socket.receive_text())

        receiving = asyncio.create_task(receive())
        delay: float | None = None
        try:
            while True:
                for event in session.events:
                    await socket.send_text(json.dumps(event, allow_nan=False))
                session.events.clear()
                next_message = asyncio.create_task(messages.get())
                await asyncio.wait({next_message, receiving}, timeout=delay, return_when=asyncio.FIRST_COMPLETED)
                if receiving.done():
                    next_message.cancel()
                    receiving.result()
                if next_message.done():
                    texts = [next_message.result()]
                    while not messages.empty():
                        texts.append(messages.get_nowait())
                    for message in without_outdated([_decoded(text) for text in texts]):
                        await loop.run_in_executor(self.thread, session.handle, message)
                    delay = 0.0 if session.running else None
                else:
                    next_message.cancel()
                    delay = await loop.run_in_executor(self.thread, session.advance)
        finally:
            receiving.cancel()


def without_outdated(messages: list[Any]) -> list[Any]:
    """Of a drag only its last message counts: what came before it has not been done yet."""

    def drag(message: Any) -> tuple[Any, ...] | None:
        if isinstance(message, dict) and message.get("do") in ("move", "vary"):
            return tuple(repr(message.get(key)) for key in ("do", "which", "name"))
        return None

    drags = [drag(message) for message in messages]
    following = [*drags[1:], None]
    return [messages[i] for i, one in enumerate(drags) if one is None or one != following[i]]


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
