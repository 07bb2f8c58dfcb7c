"""The HTTP side that `serve` and `explore` share: who may ask, bodies within limits, refusals in JSON, pages.

Any page in a browser can send requests to a loopback port. Without a token, those that came by another name (DNS
rebinding) or from another page are refused, and no header allows other pages to read an answer.
"""

import asyncio
import hmac
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, NoReturn

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css"}
LONGEST_MESSAGE = 300
DEEPEST = 16
"""Most levels of nested lists and objects; a request has 3."""
LEFTOVER = 16 << 20
"""Most bytes of a refused body that are read and discarded."""


@dataclass(frozen=True, kw_only=True)
class WebLimits:
    """How much of a request is read before its content is known, and how many connections are held."""

    max_header_bytes: int = 16_384
    """Bytes of a request's address and headers, counted while they arrive, before the token is checked."""
    max_bytes: int = 262_144
    """Bytes of a request's body, counted while it arrives."""
    max_connections: int = 512
    """Open connections; for one more the longest idle is closed, or it waits until one can be."""
    body_seconds: float = 10.0
    """Seconds for the headers to arrive, and again for the body."""


@dataclass(frozen=True)
class Reason:
    """Why a request can be refused: an HTTP status and a code for programs."""

    status: int
    code: str
    closes: bool = False
    """Whether the connection is closed, because the request was not read to its end."""
    retry_after: int | None = None
    """Seconds after which it may be worth trying again."""


NOT_HTTP = Reason(400, "not_http", closes=True)
NOT_JSON = Reason(400, "not_json")
UNAUTHORIZED = Reason(401, "unauthorized")
FORBIDDEN = Reason(403, "forbidden")
NOT_FOUND = Reason(404, "not_found")
NO_METHOD = Reason(405, "method_not_allowed")
SLOW_HEADERS = Reason(408, "slow_headers", closes=True)
SLOW_BODY = Reason(408, "slow_body", closes=True)
TOO_LARGE = Reason(413, "too_large", closes=True)
NOT_JSON_TYPE = Reason(415, "unsupported_type", closes=True)
INVALID = Reason(422, "invalid")
OVER_LIMIT = Reason(422, "over_limit")
LARGE_HEADERS = Reason(431, "large_headers", closes=True)
BUSY = Reason(429, "busy", retry_after=1)
FAILED = Reason(500, "failed")
UNAVAILABLE = Reason(503, "unavailable", retry_after=1)
LATE = Reason(504, "deadline")


class RefusalError(Exception):
    """A request that is refused: the reason, and a line for people."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def response(self) -> JSONResponse:
        """The response: one line of bounded length, whatever the request contained."""
        reason, line = self.reason, " ".join(str(self).split())
        message = line if len(line) <= LONGEST_MESSAGE else f"{line[:LONGEST_MESSAGE]}..."
        headers = {"Connection": "close"} if reason.closes else {}
        if reason.retry_after is not None:
            headers["Retry-After"] = str(reason.retry_after)
        if reason is UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse({"error": {"code": reason.code, "message": message}}, reason.status, headers)

    def to_bytes(self) -> bytes:
        """The response as bytes, for a connection that never reached the application."""
        response = self.response()
        status = f"HTTP/1.1 {response.status_code} {HTTPStatus(response.status_code).phrase}".encode()
        fields = [b"%s: %s" % field for field in (*response.raw_headers, *raw_headers())]
        return b"\r\n".join([status, *fields, b"", bytes(response.body)])


def add_refusals(app: FastAPI) -> None:
    """Answer every error in the same form."""

    @app.exception_handler(RefusalError)
    async def refuse(_: Request, refusal: RefusalError) -> Response:
        return refusal.response()

    @app.exception_handler(HTTPException)
    async def no_path(_: Request, error: HTTPException) -> Response:
        reasons = {404: NOT_FOUND, 405: NO_METHOD}
        response = RefusalError(reasons.get(error.status_code, INVALID), str(error.detail)).response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def fail(_: Request, error: Exception) -> Response:
        return RefusalError(FAILED, "the server failed; see its terminal").response()


def add_page(app: FastAPI, folder: Path, index: str, prefix: str) -> None:
    """Serve the page `index` at /, and the scripts and styles of its folder, read once, under `prefix`."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in MEDIA_TYPES}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(index, media_type="text/html")

    @app.get(f"{prefix}{{name}}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in files:
            raise RefusalError(NOT_FOUND, "there is no such file")
        return Response(files[name], media_type=MEDIA_TYPES[Path(name).suffix])


def raw_headers(image_sources: str = "data:") -> list[tuple[bytes, bytes]]:
    """The headers of every response, as ASGI expects them."""
    return [
        (name.lower().encode(), value.replace("img-src data:", f"img-src {image_sources}").encode())
        for name, value in HEADERS.items()
    ]


class Guard:
    """Refuses strangers, and adds headers that isolate the page.

    Args:
        token: what clients send as bearer token; "" admits this machine only.
        hosts: the names by which this machine may call the server.
        open_paths: paths open to everybody.
        image_sources: where the page's images may come from.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str = "",
        hosts: Sequence[str] = LOCAL_HOSTS,
        open_paths: Sequence[str] = (),
        image_sources: str = "data:",
    ) -> None:
        self.app, self.token, self.hosts, self.open_paths = app, token, hosts, open_paths
        self.headers = raw_headers(image_sources)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *self.headers]
            await send(message)

        refusal = None if scope["path"] in self.open_paths else self.refuse(Headers(scope=scope))
        app = self.app if refusal is None else refusal.response()
        await app(scope, receive, answer)

    def refuse(self, headers: Headers) -> RefusalError | None:
        """Why a request is refused; None if it is not."""
        if self.token:
            given = headers.get("authorization", "")
            if hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
                return None
            return RefusalError(UNAUTHORIZED, "send the header Authorization: Bearer TOKEN with this server's token")
        host, origin = headers.get("host", ""), headers.get("origin")
        if host.rpartition(":")[0] not in self.hosts and host not in self.hosts:
            return RefusalError(
                FORBIDDEN, f"host {host[:60]!a} is not this server; call it by {' or '.join(self.hosts)}"
            )
        if origin is not None and origin != f"http://{host}":
            return RefusalError(
                FORBIDDEN, f"origin {origin[:60]!a} is another site; only this server's own page may ask"
            )
        return None


async def read_json(request: Request, limits: WebLimits) -> Any:
    """The content of a request; reading stops once the body is too large or too slow."""
    media_type = request.headers.get("content-type", "")
    if media_type.split(";")[0].strip().lower() != "application/json":
        raise RefusalError(NOT_JSON_TYPE, f"content type {media_type[:60]!a}; send application/json")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > limits.max_bytes:
        refuse_size(limits)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                body += part
                if len(body) > limits.max_bytes:
                    refuse_size(limits)
    except TimeoutError as error:
        raise RefusalError(SLOW_BODY, f"the body took more than {limits.body_seconds:g} s; send it faster") from error
    return parse_json(bytes(body))


def refuse_size(limits: WebLimits) -> NoReturn:
    raise RefusalError(TOO_LARGE, f"the body has more than {limits.max_bytes:,} bytes; split the request")


def parse_json(body: bytes) -> Any:
    """JSON in UTF-8, without NaN or excessive nesting."""
    try:
        text = body.decode("utf-8")
        content = json.loads(text, parse_constant=refuse_constant)
    except UnicodeDecodeError as error:
        raise RefusalError(NOT_JSON, f"byte {error.start} of the body is not UTF-8; encode it as UTF-8") from error
    except json.JSONDecodeError as error:
        raise RefusalError(NOT_JSON, f"the body is not JSON: {error.msg} at character {error.pos}") from error
    except (ValueError, RecursionError) as error:
        raise RefusalError(
            NOT_JSON, "the body has a number that is too long or nesting that is too deep; send less"
        ) from error
    if is_deep(content):
        raise RefusalError(
            NOT_JSON, f"the body nests lists and objects more than {DEEPEST} levels deep; send fewer levels"
        )
    return content


def refuse_constant(name: str) -> NoReturn:
    raise RefusalError(NOT_JSON, f"the body has {name}, which is not JSON; send a number")


def is_deep(content: Any) -> bool:
    """Whether lists and objects go deeper than `DEEPEST`."""
    level = [content]
    for _ in range(DEEPEST):
        lists = [each for each in level if isinstance(each, list)]
        objects = [each for each in level if isinstance(each, dict)]
        level = [inner for each in lists for inner in each] + [inner for each in objects for inner in each.values()]
        if not level:
            return False
    return any(isinstance(each, list | dict) for each in level)


class Lingering:
    """Ends a response only after the body of its request was read, within limits, even if nobody needs it.

    Most clients send the whole body before they read. Closing with unread bytes resets the connection, and such a
    client would see a broken pipe instead of the refusal.

    Args:
        seconds: for the rest of a body to arrive.
    """

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self.app, self.seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        unread, held = True, False

        async def hear() -> Message:
            nonlocal unread
            message = await receive()
            unread = bool(message.get("more_body"))
            return message

        async def answer(message: Message) -> None:
            nonlocal held
            held = unread and message["type"] == "http.response.body" and not message.get("more_body")
            await send({**message, "more_body": True} if held else message)

        await self.app(scope, hear, answer)
        if held:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # by a server that stops, which does not wait for bodies
                await discard(receive, self.seconds)
            await send({"type": "http.response.body"})


async def discard(receive: Receive, seconds: float) -> None:
    """Read the rest of a body, up to `LEFTOVER` bytes; less if it takes too long or the server stops."""
    left = LEFTOVER
    with suppress(TimeoutError, asyncio.CancelledError):
        async with asyncio.timeout(seconds):
            while left > 0 and (message := await receive()).get("more_body"):
                left -= len(message["body"])
