"""The HTTP application: each path answers in JSON or serves a file of the page."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect

from rectiformer.analyze.recording import model_card
from rectiformer.errors import ArgumentError
from rectiformer.measure.alignment import steps_of
from rectiformer.serve.jobs import AlignPairs
from rectiformer.serve.limits import Limits
from rectiformer.serve.monitoring import Counting, Metrics
from rectiformer.serve.requests import (
    ErrorAnswer,
    JobMaker,
    ModelAnswer,
    State,
    TranslateAnswer,
    body_schema,
    read_request,
)
from rectiformer.serve.service import CUT_OFF, ClientGoneError, Service
from rectiformer.translate.align import check_head, cross_sites, default_head
from rectiformer.translate.translator import Translator
from rectiformer.web import FAILED, UNAVAILABLE, Guard, Lingering, RefusalError, add_page, add_refusals, read_json

PAGE = Path(__file__).parent / "page"
TRANSLATE, ALIVE = "/v1/translate", "/livez"
LARGE = 16_384
"""Bodies of at least this many bytes are tokenized outside the event loop."""


@dataclass(frozen=True)
class Served:
    """A model to serve.

    Args:
        align: layer and head, from 0, and induction that words are linked by; as `default_head` says unless given.
        languages: codes of what it translates from and to, such as "de" and "en"; "" if not known.
    """

    translator: Translator
    name: str
    limits: Limits
    token: str = ""
    align: tuple[int, int | str, str] | None = None
    languages: tuple[str, str] = ("", "")

    def aligner(self) -> AlignPairs | None:
        """How to align words; None if the model has no cross-attention weights."""
        model = self.translator.model
        try:
            cross_sites(model)
        except ArgumentError:
            if self.align is not None:
                raise
            return None
        layer, head, induction = self.align or default_head(self.translator)
        check_head(model, layer, head)
        steps_of(induction)
        return AlignPairs(layer, head, induction)


def build_app(served: Served) -> FastAPI:
    """The application; its `state.service` is what a server drains. ArgumentError if limits do not fit the model."""
    served.limits.check_model(served.translator)
    metrics = Metrics()
    service = Service(served.translator, served.limits, metrics)
    card = model_card(served.translator.model, served.name)
    maker = JobMaker(served.translator, card, served.limits, served.aligner())

    @asynccontextmanager
    async def living(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.stop()

    app = FastAPI(
        title="rectiformer", summary=f"Translations by {served.name}.", version="1",
        docs_url=None, redoc_url=None, lifespan=living,
    )  # fmt: skip
    app.state.service = service
    add_translate(app, service, maker)
    add_states(app, service, metrics)
    add_model(app, served, maker)
    add_page(app, PAGE, (PAGE / "index.html").read_text(encoding="utf-8"), "/page/")
    add_refusals(app)
    app.add_middleware(Counting, metrics=metrics, path=TRANSLATE)
    app.add_middleware(Guard, token=served.token, open_paths=(ALIVE,))
    app.add_middleware(Lingering, seconds=served.limits.body_seconds)
    return app


def add_translate(app: FastAPI, service: Service, maker: JobMaker) -> None:
    """The path that translates."""
    refused = {status: {"model": ErrorAnswer} for status in (400, 401, 403, 408, 413, 415, 422, 429, 500, 503, 504)}

    @app.post(
        TRANSLATE,
        response_model=TranslateAnswer,
        responses=refused,  # type: ignore[arg-type]
        openapi_extra=body_schema(maker.limits),
    )
    async def translate(request: Request) -> Response:
        """Translate sentences or documents; more than the limits allow is refused, never cut."""
        if (refusal := service.unready()) is not None:
            raise refusal  # before the body is read
        gone: asyncio.Task[Any] | None = None
        try:
            content = await read_json(request, maker.limits)
            gone = asyncio.create_task(wait_until_gone(request))
            asked = read_request(content)
            large = int(request.headers.get("content-length", LARGE)) >= LARGE
            job = await run_in_threadpool(maker.make, asked) if large else maker.make(asked)
            answer = {"model": maker.card.name} | await service.answer(job, gone)
            body = await run_in_threadpool(encode, answer) if asked.heads else encode(answer)
        except (ClientDisconnect, ClientGoneError):
            return Response(status_code=499)  # which nobody reads
        except asyncio.CancelledError:  # by the end of the server
            raise RefusalError(UNAVAILABLE, CUT_OFF) from None
        finally:
            if gone is not None:
                gone.cancel()
        return Response(body, media_type="application/json")


async def wait_until_gone(request: Request) -> None:
    """Return when the client closes its connection; the body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def encode(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def add_states(app: FastAPI, service: Service, metrics: Metrics) -> None:
    """Paths for monitoring."""

    @app.get(ALIVE, response_model=State, responses={500: {"model": ErrorAnswer}})
    async def livez() -> Response:
        """Whether the process and the model's thread are alive."""
        if not service.worker.alive:
            raise RefusalError(FAILED, "the model's thread has ended; restart the server")
        return JSONResponse({"status": "alive"})

    @app.get("/readyz", response_model=State, responses={503: {"model": ErrorAnswer}})
    async def readyz() -> Response:
        """Whether a request would be accepted now."""
        reason = service.unready()
        if reason is not None:
            raise RefusalError(UNAVAILABLE, str(reason))
        return JSONResponse({"status": "ready"})

    @app.get("/metrics", response_class=Response, responses={200: {"content": {CONTENT_TYPE_LATEST: {}}}})
    async def figures() -> Response:
        """Metrics for Prometheus."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)


def add_model(app: FastAPI, served: Served, maker: JobMaker) -> None:
    """The path that describes the model."""
    card = maker.card
    answer = ModelAnswer(
        name=card.name, source_language=served.languages[0], target_language=served.languages[1],
        variants=card.variants, layers=card.layers, heads=card.heads,
        segment=served.translator.segment_length, aligns=maker.align is not None,
        limits=dataclasses.asdict(served.limits),
    )  # fmt: skip

    @app.get("/v1/model")
    async def model() -> ModelAnswer:
        """The model and the limits of this server."""
        return answer
