"""The explorer: the report's page, live, for this machine only. It asks api/translate, and a model answers."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from rectiformer.analyze.html_report import PAGE, live_html
from rectiformer.analyze.record import AttentionRecord, to_json
from rectiformer.analyze.recording import capture_examples, model_card
from rectiformer.analyze.switching import Head, switched_off, without_heads
from rectiformer.connections import BACKLOG, LimitedServer
from rectiformer.errors import ArgumentError, RectiformerError
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator
from rectiformer.web import INVALID, Guard, Lingering, RefusalError, WebLimits, add_page, add_refusals, read_json

HOST = "127.0.0.1"
LIMITS = WebLimits(max_bytes=500_000, max_connections=64)
"""Enough for two texts of `LONGEST` characters of up to four bytes, and heads."""
LONGEST = 20_000
"""Most characters of a text; live.js says the same."""
SUBWORDS = 512
"""Most subwords of a side: a softmax record of more would not fit a browser."""
MOST_OFF = 10_000


@dataclass(frozen=True)
class Question:
    """What the page asks of a model."""

    source: str
    target: str | None
    """What to force the model to generate; its own translation if None."""
    off: frozenset[Head]
    model: int

    @classmethod
    def from_json(cls, content: Any) -> Question:
        """The question in a request; ArgumentError, in one line, if it is invalid."""
        if not isinstance(content, dict):
            raise ArgumentError("the request is not a JSON object; send {source, target, off, model}")
        target, model = content.get("target"), content.get("model", 0)
        if type(model) is not int:
            raise ArgumentError(f"model is {show(model)}; it is the number of a model, from 0")
        return cls(
            check_text("source", content.get("source")),
            None if target is None else check_text("target", target),
            parse_heads(content.get("off", [])),
            model,
        )


def check_text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ArgumentError(f"{name} is {show(value)}; it needs some text")
    if len(value) > LONGEST:
        raise ArgumentError(f"{name} has {len(value):,} characters, but at most {LONGEST:,} are read; shorten it")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ArgumentError(f"{name} has half of a surrogate pair, which is not a character; remove it")
    return value


def parse_heads(value: Any) -> frozenset[Head]:
    if not isinstance(value, list) or len(value) > MOST_OFF:
        raise ArgumentError(f"off is {show(value)}; it is a list of at most {MOST_OFF:,} [kind, layer, head]")
    for each in value:
        if not isinstance(each, list) or [type(part) for part in each] != [str, int, int]:
            raise ArgumentError(f"off has {show(each)}; each head is [kind, layer, head]")
    return frozenset(Head(*each) for each in value)


def show(value: Any) -> str:
    """The beginning of any value, on one line."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


class Answerer:
    """A model that answers; its records call it `name`."""

    def __init__(self, translator: Translator, name: str) -> None:
        self.translator = translator
        self.card = model_card(translator.model, name)

    def answer(self, question: Question) -> dict[str, Any]:
        """The model's own translation, its score, and what the heads do under it or under the forced target."""
        self.check_lengths(question)
        with switched_off(self.translator.model, question.off):
            (own,) = self.translator.translate([question.source], SearchOptions(), too_long="error")
            target = own.text if question.target is None else question.target
            (example,) = capture_examples(self.translator, [(question.source, target)])
        example = dataclasses.replace(
            example,
            forced=question.target is not None,
            translation=own.text,
            sites=[without_heads(site, question.off) for site in example.sites],
        )
        record = to_json(AttentionRecord(self.card, [example]))
        return {"translation": own.text, "score": own.candidates[0].score, "record": record}

    def check_lengths(self, question: Question) -> None:
        sides = (("source", self.translator.source), ("target", self.translator.target))
        for (name, vocabulary), text in zip(sides, (question.source, question.target), strict=True):
            subwords = len(vocabulary.encode(text or ""))
            if subwords > SUBWORDS:
                raise ArgumentError(f"{name} has {subwords:,} subwords, but at most {SUBWORDS} are shown; shorten it")


@dataclass(frozen=True)
class Text:
    """What the models were trained to translate."""

    languages: tuple[str, str] = ("", "")
    examples: Sequence[tuple[str, str]] = ()
    """Pairs that the page offers to choose from."""


def build_app(models: Sequence[Answerer], text: Text) -> FastAPI:
    """The application that serves the page for one model, or two to compare."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    turn = asyncio.Lock()

    @app.post("/api/translate")
    async def translate(request: Request) -> Response:
        try:
            question = Question.from_json(await read_json(request, LIMITS))
            if question.model not in range(len(models)):
                raise ArgumentError(f"there is no model {question.model}; there are {len(models)}, counted from 0")
            async with turn:  # a model is switched and observed by one question at a time
                answer = await run_in_threadpool(models[question.model].answer, question)
        except RectiformerError as error:
            raise RefusalError(INVALID, str(error)) from error
        except ClientDisconnect:
            return Response(status_code=499)  # which nobody reads
        return JSONResponse(answer)

    page = live_html([model.card.name for model in models], text.languages, text.examples)
    add_page(app, PAGE, page, "/")
    add_refusals(app)
    app.add_middleware(Guard, hosts=(HOST, "localhost"), image_sources="data: blob:")
    app.add_middleware(Lingering, seconds=LIMITS.body_seconds)
    return app


def serve(models: Sequence[Answerer], text: Text, bound: socket.socket, announce: Callable[[], None]) -> None:
    """Answer until Ctrl-C; `announce` is called once connections are accepted."""
    bound.listen(BACKLOG)
    announce()
    with suppress(KeyboardInterrupt):
        asyncio.run(LimitedServer(build_app(models, text), LIMITS).serve(sockets=[bound]))


def open_browser(address: str) -> None:
    """Show the page if there is a screen: a text browser would take over the terminal."""
    screen = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if screen:
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
