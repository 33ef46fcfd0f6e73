"""The application on a socket, until it is told to end."""

import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from lowrank_kv_jax.serving.http.engine_thread import EngineThread

GRACE = 5
"""Seconds in which answers in flight are told that it is over, and clients read it."""

MOST_CONNECTIONS = 1000
"""Beyond them uvicorn itself answers 503."""


def bind(host: str, port: int) -> socket.socket:
    """A socket that has its address, and refuses connections for now.

    Raises:
        ValueError: no such host, or an address that is taken or not this machine's.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--host {host}: {getattr(error, 'strerror', None) or error}; must be a name or an address of "
                         "this machine") from error
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        bound.close()
        raise ValueError(f"--host {host} --port {port}: {getattr(error, 'strerror', None) or error}; must be an address "
                         "of this machine and a port that is free") from error
    return bound


def url_of(bound: socket.socket) -> str:
    """Where clients find it."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class Server(uvicorn.Server):
    """Serves until SIGINT, SIGTERM or `stop`; what is in flight then ends with an error.

    Args:
        on_start: called once connections are taken.

    Attributes:
        interrupted: whether Ctrl-C ended it.
    """

    def __init__(self, app: Any, thread: EngineThread, on_start: Callable[[], None] = lambda: None):
        super().__init__(uvicorn.Config(
            app, http="h11", ws="none", loop="asyncio", lifespan="off", log_config=None, access_log=False,
            server_header=False, timeout_graceful_shutdown=GRACE, limit_concurrency=MOST_CONNECTIONS,
        ))
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # what a client does wrong is told to that client
        self._thread, self._on_start, self.interrupted = thread, on_start, False
        thread.on_end = self.stop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Of SIGINT and SIGTERM; whether asyncio raises KeyboardInterrupt behind it depends on who is faster."""
        self.interrupted = self.interrupted or sig == signal.SIGINT
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Take connections."""
        self._thread.start()
        await super().startup(sockets=sockets)
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Tell those who wait, and take no more."""
        self._thread.close()
        await super().shutdown(sockets=sockets)

    def stop(self) -> None:
        """End soon; from any thread."""
        self.should_exit = True
