"""Connections of `serve` and `explore`, limited in number, and their headers in size and time.

uvicorn limits neither, and answers in plain text what it cannot read.
"""

import asyncio
import logging
import resource
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from rectiformer.errors import ArgumentError
from rectiformer.web import LARGE_HEADERS, LEFTOVER, NOT_HTTP, SLOW_HEADERS, Reason, RefusalError, WebLimits

LOG = logging.getLogger(__name__)

BACKLOG = 1024
"""Connections that the kernel queues until they are accepted."""
SPARE_FILES = 64
"""Open files that the process needs besides connections."""
KEEP_ALIVE = 30
"""Seconds for which an idle connection stays open."""
SHORTEST_IDLE = 1.0
"""Seconds for which an idle connection is not closed for another: its next request may be on the way."""
RETRY = 0.05
"""Seconds until a connection without a free slot or file is tried again."""


AnyLimits = TypeVar("AnyLimits", bound=WebLimits)


def fit_files(limits: AnyLimits, warn: Callable[[str], None]) -> AnyLimits:
    """The limits, with at most as many connections as this process may open files; `warn` is told if that is fewer."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(1, files - SPARE_FILES)
    if files == resource.RLIM_INFINITY or limits.max_connections <= most:
        return limits
    needed = limits.max_connections + SPARE_FILES
    warn(f"at most {most} connections are accepted, since ulimit -n is {files}; to allow more, raise it to {needed}")
    return replace(limits, max_connections=most)


class Connection(HttpToolsProtocol):
    """A connection that is refused and closed if the headers of a request are too large, too slow or not HTTP."""

    def __init__(
        self, config: uvicorn.Config, state: ServerState, app_state: dict[str, Any], limits: WebLimits
    ) -> None:
        super().__init__(config, state, app_state)
        self.limits = limits
        self.idle_since = self.loop.time()
        self._in_head = True
        self._received = 0  # bytes since the last request was complete
        self._refused = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def data_received(self, data: bytes) -> None:
        """Parse what arrived, or discard it once the connection is refused."""
        self._received += len(data)
        if self._refused:
            if self._received > LEFTOVER:
                self.transport.abort()
            return
        super().data_received(data)
        if self._in_head and self._received > self.limits.max_header_bytes and not self._refused:
            self._refuse(LARGE_HEADERS, self._large())
        if self.idle:
            self._expect_head()

    def on_headers_complete(self) -> None:
        """Begin to answer, unless the headers are too large; they may have come all at once."""
        size = len(self.url) + sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers)
        if size > self.limits.max_header_bytes:
            self._refuse(LARGE_HEADERS, self._large())
            raise ValueError  # which ends the parsing
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Expect the headers of the next request."""
        super().on_message_complete()
        self._in_head, self._received = True, 0

    def on_response_complete(self) -> None:
        """Become idle, unless the next request is already there."""
        self.idle_since = self.loop.time()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what could not be parsed."""
        if not self._refused:
            self._refuse(NOT_HTTP, "this is not an HTTP/1.1 request; the connection is closed")

    def _large(self) -> str:
        return f"the address and the headers have more than {self.limits.max_header_bytes:,} bytes; send fewer"

    def _refuse(self, reason: Reason, message: str) -> None:
        """Answer once, then discard what still arrives: closing with unread bytes would reset the connection."""
        self._refused, self._received = True, 0
        if not self.idle:  # an earlier request, whose answer cannot follow this one
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write(RefusalError(reason, message).to_bytes())
        self.transport.write_eof()
        self._stop_timer()
        self._expect_head()

    def _expect_head(self) -> None:
        if self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(self.limits.body_seconds, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        """Close a connection that waited too long: for headers, for the rest of a body, or for the client to leave."""
        self._timer = None
        if self._in_head and self._received and not self._refused:
            seconds = self.limits.body_seconds
            self._refuse(SLOW_HEADERS, f"the headers took more than {seconds:g} s; send them faster")
        else:
            self.transport.abort()


async def accept(bound: socket.socket, connect: Callable[[], Connection], connections: set[Any], most: int) -> None:
    """Accept connections, one by one, so that there are never more than `most`; the others wait in the kernel.

    Args:
        connect: makes the protocol of a connection, which then is one of `connections`.
    """
    loop = asyncio.get_running_loop()
    bound.setblocking(False)
    told = ""
    while True:
        try:
            accepted, _ = await loop.sock_accept(bound)
            while len(connections) >= most and not close_longest_idle(connections):
                await asyncio.sleep(RETRY)
            await loop.connect_accepted_socket(connect, accepted)
        except OSError as error:  # no file is left, or the client is gone again
            if told != (told := str(error.strerror)):
                LOG.error("cannot accept connections: %s; retrying", told)
            await asyncio.sleep(RETRY)


def close_longest_idle(connections: set[Connection]) -> bool:
    """Close the connection that has been idle longest; False if all are busy or have just come."""
    idle = [each for each in connections if each.idle]
    longest = min(idle, key=lambda each: each.idle_since, default=None)
    if longest is None or longest.loop.time() - longest.idle_since < SHORTEST_IDLE:
        return False
    connections.discard(longest)
    longest.transport.abort()
    return True


class LimitedServer(uvicorn.Server):
    """A server that accepts no more connections, and reads no larger headers, than its limits allow."""

    def __init__(self, app: FastAPI, limits: WebLimits, **options: Any) -> None:
        config = uvicorn.Config(
            app, ws="none", log_level="error", access_log=False, server_header=False, proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE, **options,
        )  # fmt: skip
        super().__init__(config)
        self.limits = limits
        self._accepting: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application and accept connections, instead of letting uvicorn do it."""
        await super().startup(sockets=[])

        def connect() -> Connection:
            return Connection(self.config, self.server_state, self.lifespan.state, self.limits)

        most = self.limits.max_connections
        self._accepting = [
            asyncio.create_task(accept(each, connect, self.server_state.connections, most)) for each in sockets or ()
        ]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, and shut down."""
        for task in self._accepting:
            task.cancel()
        await super().shutdown(sockets)


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the port but not listening yet; port 0 takes a free one."""
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
    """The URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
