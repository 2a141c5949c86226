"""A real object store on this machine (moto's server), a proxy before it that interrupts connections, and a server
that answers the Hugging Face hub's client."""

import hashlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote


@contextmanager
def moto_server() -> Iterator[int]:
    """Yields the port of an S3 server in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            assert server.poll() is None, "moto's server ended"
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.1)
        yield port
    finally:
        server.kill()
        server.wait()


class Proxy:
    """Passes connections on to a port. It cuts the next ``cuts`` responses in the middle, and drops all while it is
    ``down``."""

    def __init__(self, target: int):
        self.target, self.cuts, self.down = target, 0, False
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):  # closed already
            self._listener.shutdown(socket.SHUT_RDWR)  # ends accept()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self.target))
                for source, sink, is_response in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pass_on, args=(source, sink, is_response), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_response: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if is_response and self._cuts():
                    sink.sendall(b"" if self.down else data[: len(data) // 2])
                    break
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _cuts(self) -> bool:
        with self._lock:
            if self.down:
                return True
            self.cuts, cut = max(0, self.cuts - 1), self.cuts > 0
            return cut


@contextmanager
def hub_server(folder: Path) -> Iterator[int]:
    """Yields the port of a hub with one dataset repository, USER/REPO: the files of a folder."""
    api, commit = "/api/datasets/USER/REPO", "0" * 40
    files = [path for path in folder.rglob("*") if path.is_file()]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, headers = unquote(self.path.partition("?")[0]), {"X-Repo-Commit": commit}
            resolved = folder / path.removeprefix(f"/datasets/USER/REPO/resolve/{commit}/")
            status, body = 200, b""
            if path == f"{api}/revision/main":
                body = json.dumps({"id": "USER/REPO", "sha": commit, "siblings": []}).encode()
            elif path == f"{api}/tree/{commit}":
                listed = [(str(file.relative_to(folder)), file.stat().st_size) for file in files]
                body = json.dumps(
                    [{"type": "file", "path": p, "size": n, "oid": commit} for p, n in listed]
                ).encode()
            elif resolved in files:
                body = resolved.read_bytes()
                headers["ETag"] = f'"{hashlib.sha256(body).hexdigest()}"'
            else:
                status = 404
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
