"""The body of a request: read within bounds of size and time, then parsed strictly; or refused, so that it is heard."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any, NoReturn

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rectiformer.serve.limits import Limits
from rectiformer.serve.refusals import NOT_JSON, NOT_JSON_TYPE, SLOW_BODY, TOO_LARGE, RefusalError

DEEPEST = 16
"""Most lists and objects inside each other; a request has 3."""
LEFTOVER = 16 << 20
"""Bytes of a refused body that are read and thrown away."""


async def read_json(request: Request, limits: Limits) -> Any:
    """The content of a request, whose body is not read on once it is too large or too slow."""
    kind = request.headers.get("content-type", "")
    if kind.split(";")[0].strip().lower() != "application/json":
        raise RefusalError(NOT_JSON_TYPE, f"content type {kind[:60]!a}; send application/json")
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
        raise RefusalError(SLOW_BODY, f"the body took more than {limits.body_seconds:g} s; send it at once") from error
    return parse(bytes(body))


def refuse_size(limits: Limits) -> NoReturn:
    raise RefusalError(TOO_LARGE, f"the body has more than {limits.max_bytes:,} bytes; send several requests")


def parse(body: bytes) -> Any:
    """JSON in UTF-8, without NaN and without endless nesting."""
    try:
        text = body.decode("utf-8")
        content = json.loads(text, parse_constant=refuse_constant)
    except UnicodeDecodeError as error:
        raise RefusalError(NOT_JSON, f"byte {error.start} of the body is not UTF-8; encode it so") from error
    except json.JSONDecodeError as error:
        raise RefusalError(NOT_JSON, f"the body is not JSON: {error.msg} at character {error.pos}") from error
    except (ValueError, RecursionError) as error:
        raise RefusalError(NOT_JSON, "the body has a number or a nesting that is beyond reason; send less") from error
    if is_deep(content):
        raise RefusalError(
            NOT_JSON, f"the body has more than {DEEPEST} lists and objects inside each other; send fewer"
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
    """Ends an answer only when the body of its request was read, within bounds, though nobody wants it any more.

    Most clients write all of a body before they read. To close with bytes unread resets the connection, and such a
    client sees a broken pipe in place of the refusal.

    Args:
        seconds: that the rest of a body may take.
    """

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self.app, self.seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and hold the end of its answer back until its body was read."""
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
            if task is None or not task.cancelling():  # by the end of the server, which does not wait for bodies
                await discard(receive, self.seconds)
            await send({"type": "http.response.body"})


async def discard(receive: Receive, seconds: float) -> None:
    """Read what is left of a body, up to `LEFTOVER` bytes; less if it takes longer, or if the server ends."""
    left = LEFTOVER
    with suppress(TimeoutError, asyncio.CancelledError):
        async with asyncio.timeout(seconds):
            while left > 0 and (message := await receive()).get("more_body"):
                left -= len(message["body"])
