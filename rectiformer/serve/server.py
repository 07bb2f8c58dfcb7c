"""The process: a socket, the application, and an end that loses nothing which was accepted."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from rectiformer.errors import ArgumentError
from rectiformer.serve.app import Served, build_app
from rectiformer.serve.connections import BACKLOG, Connection, accept
from rectiformer.serve.limits import Limits
from rectiformer.serve.service import Service

KEEP_ALIVE = 30
"""Seconds for which an idle connection stays open."""


def bind(host: str, port: int) -> socket.socket:
    """A socket that has the port but does not listen yet; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sends at once only if TCP is named
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ArgumentError(
            f"cannot listen on {host}:{port}: {error.strerror}; name another --port, or 0 for a free one"
        ) from error
    return bound


def address(bound: socket.socket) -> str:
    """Where a browser finds it."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


class DrainingServer(uvicorn.Server):
    """A server that is first not ready, then finishes what it accepted, then ends; a second signal ends it at once."""

    def __init__(self, config: uvicorn.Config, service: Service, limits: Limits) -> None:
        super().__init__(config)
        self.service, self.limits = service, limits
        self._accepting: list[asyncio.Task[None]] = []
        self._ending: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """While it serves, SIGTERM and SIGINT are handled here."""
        loop = asyncio.get_running_loop()
        for kind in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(kind, self._hear)
        try:
            yield
        finally:
            for kind in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(kind)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, and accept connections within the limits, which uvicorn itself does not."""
        await super().startup(sockets=[])

        def connect() -> Connection:
            return Connection(self.config, self.server_state, self.lifespan.state, self.limits)

        most = self.limits.max_connections
        self._accepting = [
            asyncio.create_task(accept(each, connect, self.server_state.connections, most)) for each in sockets or ()
        ]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Cancel requests that were not finished, so that they are told at once, and end."""
        for task in (*self._accepting, *self.server_state.tasks):
            task.cancel()
        await super().shutdown(sockets)

    def _hear(self) -> None:
        if self._ending is not None:
            self.should_exit = True
            return
        self.service.drain()
        self._ending = asyncio.create_task(self._end())

    async def _end(self) -> None:
        await self.service.drained()
        self.should_exit = True


def serve(served: Served, bound: socket.socket, announce: Callable[[], None]) -> None:
    """Answer until SIGTERM or Ctrl-C; `announce` is called once connections are taken."""
    app = build_app(served)
    config = uvicorn.Config(
        app,
        lifespan="on",
        ws="none",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=1,
    )
    bound.listen(BACKLOG)
    announce()
    gc.collect()
    gc.freeze()  # PyTorch's objects stay: to look through them for garbage again and again was half of a request's cost
    asyncio.run(DrainingServer(config, app.state.service, served.limits).serve(sockets=[bound]))
