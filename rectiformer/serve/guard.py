"""Who may ask: this machine's own pages and programs, or those that have the token.

Any page in a browser can send requests to a loopback port. Without a token, those that came by another name (DNS
rebinding) or from another page are refused, and no header allows other pages to read an answer.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
from collections.abc import Callable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rectiformer.errors import ArgumentError
from rectiformer.serve.refusals import FORBIDDEN, UNAUTHORIZED, UNAVAILABLE, RefusalError

TOKEN_VARIABLE = "RECTIFORMER_TOKEN"
SHORTEST_TOKEN = 16
NAMES = ("127.0.0.1", "localhost", "[::1]")
OPEN = "/livez"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
RAW_HEADERS = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]


class Guard:
    """Refuses whom it does not know, and adds headers that keep a page to itself.

    Args:
        token: what a client has to send as bearer; "" admits this machine's own.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *RAW_HEADERS]
            await send(message)

        refusal = None if scope["path"] == OPEN else self.refuse(Headers(scope=scope))
        app = self.app if refusal is None else refusal.response()
        await app(scope, receive, answer)

    def refuse(self, headers: Headers) -> RefusalError | None:
        """Why a request is refused; None if it is not."""
        if self.token:
            given = headers.get("authorization", "")
            known = hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode())
            return (
                None if known else RefusalError(UNAUTHORIZED, "send Authorization: Bearer and the token of this server")
            )
        host, origin = headers.get("host", ""), headers.get("origin")
        if host.rpartition(":")[0] not in NAMES and host not in NAMES:
            return RefusalError(FORBIDDEN, f"host {host[:60]!a} is not this server; call it by {' or '.join(NAMES)}")
        if origin is not None and origin != f"http://{host}":
            return RefusalError(
                FORBIDDEN, f"origin {origin[:60]!a} is another page, and only this server's own may ask"
            )
        return None


class Gate:
    """Turns requests to one path away before anything of them is read, while none is accepted.

    Those that the end of the server cuts off, which cancels them, are told so.

    Args:
        refuse: why none is; None if one would be.
    """

    def __init__(self, app: ASGIApp, path: str, refuse: Callable[[], RefusalError | None]) -> None:
        self.app, self.path, self.refuse = app, path, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or turn it away."""
        asked = scope["type"] == "http" and scope["path"] == self.path and scope["method"] == "POST"
        refusal = self.refuse() if asked else None
        app = self.app if refusal is None else refusal.response()
        started = False

        async def answer(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await app(scope, receive, answer)
        except asyncio.CancelledError:
            if not started:
                cut_off = RefusalError(UNAVAILABLE, "the server ended before this request was answered; ask again")
                await cut_off.response()(scope, receive, send)


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_token(host: str, file: Path | None) -> str:
    """The token in a file or in the environment; ArgumentError where one is needed and there is none."""
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
