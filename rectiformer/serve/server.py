"""The server process: it runs the application and, when stopped, finishes every accepted request."""

import asyncio
import gc
import ipaddress
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fastapi import FastAPI

from rectiformer.connections import BACKLOG, LimitedServer
from rectiformer.errors import ArgumentError
from rectiformer.serve.app import Served, build_app
from rectiformer.serve.limits import Limits
from rectiformer.serve.service import Service

TOKEN_VARIABLE = "RECTIFORMER_TOKEN"
SHORTEST_TOKEN = 16


class DrainingServer(LimitedServer):
    """On a signal it accepts nothing more, finishes what it accepted, then stops; a second signal stops it at once."""

    def __init__(self, app: FastAPI, limits: Limits) -> None:
        super().__init__(app, limits, lifespan="on", timeout_graceful_shutdown=1)
        self.service: Service = app.state.service
        self._ending: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """While it serves, SIGTERM and SIGINT are handled here."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._hear)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Cancel unfinished requests, so that their clients hear at once, and stop."""
        for task in self.server_state.tasks:
            task.cancel()
        await super().shutdown(sockets)

    def _hear(self) -> None:
        if self._ending is not None:
            self.should_exit = True
            return
        self._ending = asyncio.create_task(self._end())

    async def _end(self) -> None:
        await self.service.drain()
        self.should_exit = True


def serve(served: Served, bound: socket.socket, announce: Callable[[], None]) -> None:
    """Answer until SIGTERM or Ctrl-C; `announce` is called once connections are accepted."""
    server = DrainingServer(build_app(served), served.limits)
    bound.listen(BACKLOG)
    announce()
    gc.collect()
    gc.freeze()  # PyTorch's objects stay: collecting garbage among them was half of a request's cost
    asyncio.run(server.serve(sockets=[bound]))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address to listen on."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_token(host: str, file: Path | None) -> str:
    """The token from a file or the environment; ArgumentError if one is needed and there is none."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if file is not None:
        try:
            token = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ArgumentError(f"cannot read --token-file {file}: {reason}") from error
    if not token and file is None and is_loopback(host):
        return ""
    if not token and file is None:
        raise ArgumentError(
            f"--host {host} can be reached from elsewhere; set --token-file or {TOKEN_VARIABLE}, or leave --host out"
        )
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ArgumentError(
            f"{file or TOKEN_VARIABLE}: the token has {len(token)} characters; it needs at least {SHORTEST_TOKEN}, "
            "printable ASCII, no spaces"
        )
    return token
