"""The page, live: its files and api/translate, for this machine only.

Any page in the browser can send requests to a loopback port. Those that came by another name (DNS rebinding) or from
another page are refused, and no header allows other pages to read an answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
import webbrowser
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from rectiformer.analyze.report import PAGE, live_html
from rectiformer.errors import ArgumentError, RectiformerError
from rectiformer.explore.answers import Answerer, Question

HOST = "127.0.0.1"
NAMES = ("127.0.0.1", "localhost")
BODY = 500_000
"""Most bytes of a request: two texts of the most characters, of four bytes each, and heads."""
TYPES = {".js": "text/javascript", ".css": "text/css"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

Handler = Callable[[Request], Awaitable[Response]]


def build_app(models: Sequence[Answerer]) -> FastAPI:
    """The application that serves the page for one model, or two to compare."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    files = {path.name: path.read_bytes() for path in PAGE.iterdir() if path.suffix in TYPES}
    index = live_html([model.card.name for model in models])
    turn = asyncio.Lock()

    @app.middleware("http")
    async def guard(request: Request, handle: Handler) -> Response:
        refused = foreign(request)
        response = refusal(refused, 403) if refused else await handle(request)
        response.headers.update(HEADERS)
        return response

    @app.get("/")
    async def page() -> Response:
        return Response(index, media_type="text/html")

    @app.post("/api/translate")
    async def translate(request: Request) -> Response:
        try:
            question = Question.from_json(await read_json(request))
            if question.model not in range(len(models)):
                raise ArgumentError(f"there is no model {question.model}; there are {len(models)}, counted from 0")
            async with turn:  # a model is switched and watched by one question at a time
                answer = await run_in_threadpool(models[question.model].answer, question)
        except RectiformerError as error:
            return refusal(str(error), 400)
        return JSONResponse(answer)

    @app.get("/{name}")
    async def file(name: str) -> Response:
        if name not in files:
            return refusal("there is no such file", 404)
        return Response(files[name], media_type=TYPES[Path(name).suffix])

    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> Response:
        return refusal("the server failed; its terminal says why", 500)

    return app


def foreign(request: Request) -> str:
    """Why a request is not from this server's own page; empty if it may be."""
    host = request.headers.get("host", "")
    if host.rpartition(":")[0] not in NAMES and host not in NAMES:
        return f"host {host[:60]!a} is not this server; open http://{HOST} with its port"
    origin = request.headers.get("origin")
    if origin is not None and origin != f"http://{host}":
        return f"origin {origin[:60]!a} is another page, and only this server's own may ask"
    return ""


def refusal(line: str, status: int) -> JSONResponse:
    return JSONResponse({"detail": " ".join(line.split("\n"))}, status)


async def read_json(request: Request) -> Any:
    """The body, which is not read on once it is too large; ArgumentError where it is that, or not JSON."""
    kind = request.headers.get("content-type", "")
    if kind.split(";")[0].strip().lower() != "application/json":
        raise ArgumentError(f"content type {kind[:60]!a}; send application/json")
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > BODY:
                raise ArgumentError(f"the request has more than {BODY:,} bytes; shorten its texts")
    except ClientDisconnect as error:
        raise ArgumentError("the page was closed before it had asked") from error
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ArgumentError("the request is not JSON in UTF-8; send {source, target, off, model}") from error


def listen(port: int) -> socket.socket:
    """A socket that listens on the loopback interface; port 0 takes a free one."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # else asyncio's answers wait
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
        listening.listen()
    except OSError as error:
        listening.close()
        raise ArgumentError(
            f"cannot listen on {HOST}:{port}: {error.strerror}; name another --port, or 0 for a free one"
        ) from error
    return listening


def serve(models: Sequence[Answerer], listening: socket.socket) -> None:
    """Answer until Ctrl-C."""
    config = uvicorn.Config(
        build_app(models), log_level="error", access_log=False, server_header=False, proxy_headers=False
    )
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listening])


def open_browser(address: str) -> None:
    """Show the page, where there is a screen: a text browser would take the terminal."""
    screen = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if screen:
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
