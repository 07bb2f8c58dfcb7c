"""Metrics for Prometheus."""

import time
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKENS = (16, 64, 256, 1_024, 2_048, 4_096, 8_192, 16_384)


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        counter, histogram = partial(Counter, registry=self.registry), partial(Histogram, registry=self.registry)
        self.requests = counter("rectiformer_requests", "Requests to translate, by status.", ["status"])
        self.sentences = counter("rectiformer_sentences", "Sentences answered.")
        self.abandoned = counter("rectiformer_abandoned_requests", "Requests whose client went away first.")
        about = "From a request's first byte to its answer."
        self.seconds = histogram("rectiformer_request_seconds", about, buckets=SECONDS)
        self.batch_seconds = histogram("rectiformer_batch_seconds", "Time of a batch in the model.", buckets=SECONDS)
        about = "Source tokens of a batch, without padding."
        self.batch_tokens = histogram("rectiformer_batch_tokens", about, buckets=TOKENS)

    def add_gauge(self, name: str, about: str, value: Callable[[], float]) -> None:
        """Add a gauge that is read when the metrics are scraped."""
        Gauge(f"rectiformer_{name}", about, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class Counting:
    """Counts the answers of one path on their way out, and times them."""

    def __init__(self, app: ASGIApp, metrics: Metrics, path: str) -> None:
        self.app, self.metrics, self.path = app, metrics, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != self.path:
            return await self.app(scope, receive, send)
        since = time.perf_counter()

        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.requests.labels(str(message["status"])).inc()
                self.metrics.seconds.observe(time.perf_counter() - since)
            await send(message)

        await self.app(scope, receive, count)
