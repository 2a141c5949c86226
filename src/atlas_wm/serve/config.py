"""The settings of a server. They are the flags of ``atlas serve`` and ``atlas play``, so nothing heavy is imported
here."""

import ipaddress
import os
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from atlas_wm.settings import check_types, require, within


@dataclass(frozen=True)
class Address:
    """Where a server listens, and whom it admits."""

    host: str = "127.0.0.1"
    """Address to listen on. Any other than this machine's own (127.0.0.1, ::1, localhost) needs a token."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    token: Annotated[str | None, arg(metavar="TEXT", help_behavior_hint="(default: ATLAS_TOKEN)")] = None
    """Clients must send it. Better set in the environment as ATLAS_TOKEN: other users of the machine see flags."""

    def __post_init__(self) -> None:
        check_types("serve.", self)
        within("serve.", self, 0, 65535, "port")
        require((self.secret or "").isascii(), "serve.token must be ASCII, since headers are")
        require(
            bool(self.secret) or is_loopback(self.host),
            f"serve.host {self.host} can be reached from other machines: set a token, in the environment "
            "(ATLAS_TOKEN) or with --token",
        )

    @property
    def secret(self) -> str | None:
        return self.token or os.environ.get("ATLAS_TOKEN") or None


@dataclass(frozen=True)
class ServeConfig(Address):
    max_batch: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: 16; 1 on a CPU)")] = None
    """Most requests planned together. A CPU computes plans one by one, so a batch would only delay the first."""
    max_wait_ms: float = 5.0
    """Milliseconds that a batch waits for clients that have not asked yet."""
    max_queue: int = 64
    """Most requests that wait for a plan; more are refused (status 503)."""
    max_clients: int = 64
    """Most clients at a time; more are refused (status 503)."""
    max_message_mb: float = 16.0
    """Largest request, in MiB."""
    idle_timeout: float = 300.0
    """Seconds after which a silent websocket client is disconnected."""

    def __post_init__(self) -> None:
        super().__post_init__()
        within("serve.", self, 1, 1e4, "max_queue", "max_clients")
        within("serve.", self, 0, 1e4, "max_wait_ms")
        within("serve.", self, 0.01, 1024, "max_message_mb")
        within("serve.", self, 0.1, 1e6, "idle_timeout")
        require(self.max_batch is None or 1 <= self.max_batch <= 128, "serve.max_batch must lie between 1 and 128")

    @property
    def max_bytes(self) -> int:
        return int(self.max_message_mb * 2**20)


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name
        return False
