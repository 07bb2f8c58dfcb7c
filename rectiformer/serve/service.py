"""Requests on their way through the model: admitted or refused, answered in time or dropped, drained at the end.

Everything runs in the event loop; only tasks and their outcomes cross to the model's thread.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rectiformer.errors import RectiformerError
from rectiformer.serve.jobs import Job
from rectiformer.serve.limits import Limits
from rectiformer.serve.monitoring import Metrics
from rectiformer.serve.worker import Entry, Owner, TaskQueue, Worker
from rectiformer.translate.translator import Translator
from rectiformer.web import BUSY, FAILED, INVALID, LATE, UNAVAILABLE, RefusalError

CUT_OFF = "the server stopped before this request was answered; try again"


class ClientGoneError(Exception):
    """The client closed its connection."""


class Ticket(Owner):
    """A request that was admitted."""

    def __init__(self, job: Job, future: asyncio.Future[dict[str, Any]]) -> None:
        super().__init__()
        self.job, self.future = job, future
        self.open = 0
        """Tasks without a result so far."""


class Service:
    """One model, and the requests that wait for it."""

    def __init__(self, translator: Translator, limits: Limits, metrics: Metrics) -> None:
        self.limits, self.metrics = limits, metrics
        self.queue = TaskQueue(limits.batch_tokens)
        self.worker = Worker(
            translator,
            self.queue,
            warm=lambda: self._in_loop(self._get_ready),
            done=lambda batch, seconds: self._in_loop(self._receive, batch, seconds),
            ended=lambda: self._in_loop(self._fail_all),
        )
        self.tickets: set[Ticket] = set()
        self.sentences = 0
        self.state = "starting"
        self._empty = asyncio.Event()
        self._empty.set()
        metrics.add_gauge("queue_requests", "Requests accepted and not answered.", lambda: len(self.tickets))
        metrics.add_gauge("queue_sentences", "Their sentences.", lambda: self.sentences)
        metrics.add_gauge("waiting_tasks", "Tasks that wait for the model.", lambda: len(self.queue))
        metrics.add_gauge("ready", "Whether a request would be accepted.", lambda: not self.unready())

    def start(self) -> None:
        """Start the model's thread; call this inside the event loop."""
        self._loop = asyncio.get_running_loop()
        self.worker.start()

    async def stop(self) -> None:
        """Drop whatever is left, and wait for the thread."""
        self.state = "stopped"
        self.queue.close()
        self._fail_all()
        await asyncio.to_thread(self.worker.join)

    async def drain(self) -> None:
        """Stop accepting requests, and wait until every accepted one is answered, for as long as the limits allow."""
        self.state = "draining"
        with suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), self.limits.drain)

    def unready(self, sentences: int = 1) -> RefusalError | None:
        """Why a request of this many sentences would be refused now; None if it would be accepted."""
        if self.state == "starting" and self.worker.alive:
            return RefusalError(UNAVAILABLE, "the server is starting; try again")
        if self.state != "ready" or not self.worker.alive:
            return RefusalError(UNAVAILABLE, "the server is stopping; use another one")
        limits = self.limits
        if len(self.tickets) >= limits.queue_requests or self.sentences + sentences > limits.queue_sentences:
            return RefusalError(
                BUSY,
                f"{len(self.tickets)} requests of {self.sentences} sentences wait, of at most {limits.queue_requests} "
                f"and {limits.queue_sentences}; try again",
            )
        return None

    async def answer(self, job: Job, gone: asyncio.Future[Any]) -> dict[str, Any]:
        """The answer to a job; RefusalError if there is none in time, ClientGoneError once `gone` is done."""
        if (refusal := self.unready(job.sentences)) is not None:
            raise refusal
        ticket = Ticket(job, self._loop.create_future())
        self.tickets.add(ticket)
        self.sentences += job.sentences
        self._empty.clear()
        try:
            self._put(ticket, job.begin())
            done, _ = await asyncio.wait(
                {ticket.future, gone}, timeout=self.limits.deadline, return_when=asyncio.FIRST_COMPLETED
            )
            if ticket.future in done:
                return ticket.future.result()
            if gone in done:
                self.metrics.abandoned.inc()
                raise ClientGoneError
            raise RefusalError(
                LATE,
                f"no answer within {self.limits.deadline:g} s, so the request was dropped; send less, or try later",
            )
        finally:
            if ticket.open:
                self.queue.drop(ticket)
            self.tickets.remove(ticket)
            self.sentences -= job.sentences
            if not self.tickets:
                self._empty.set()

    def _put(self, ticket: Ticket, tasks: list[Any]) -> None:
        ticket.open += len(tasks)
        if tasks:
            self.queue.put(ticket, tasks)
        elif not ticket.open:
            self.metrics.sentences.inc(ticket.job.sentences)
            ticket.future.set_result(ticket.job.answer())

    def _receive(self, batch: list[Entry], seconds: float) -> None:
        self.metrics.batch_seconds.observe(seconds)
        self.metrics.batch_tokens.observe(sum(entry.task.length for entry in batch))
        for entry in batch:
            ticket = entry.owner
            assert isinstance(ticket, Ticket)
            if ticket.gone or ticket.future.done():
                continue
            if entry.error is None:
                ticket.open -= 1
                self._put(ticket, ticket.job.receive(entry.task, entry.result))
            elif isinstance(entry.error, RectiformerError):
                ticket.future.set_exception(RefusalError(INVALID, str(entry.error)))
            else:
                message = "the model failed on this request; the server goes on"
                ticket.future.set_exception(RefusalError(FAILED, message))

    def _get_ready(self) -> None:
        if self.state == "starting":
            self.state = "ready"

    def _fail_all(self) -> None:
        for ticket in self.tickets:
            if not ticket.future.done():
                ticket.future.set_exception(RefusalError(UNAVAILABLE, CUT_OFF))

    def _in_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is waiting
            self._loop.call_soon_threadsafe(call, *arguments)
