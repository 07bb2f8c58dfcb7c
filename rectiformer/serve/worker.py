"""The one thread that uses the model: takes a batch, runs it, tells what became of each task."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rectiformer.errors import RectiformerError
from rectiformer.serve.tasks import Task, TranslateLines
from rectiformer.serve.waiting import Entry, Owner, WaitingLine
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What became of a task."""

    owner: Owner
    task: Task
    result: Any = None
    error: Exception | None = None


@dataclass(frozen=True)
class Ran:
    """A batch that is done."""

    outcomes: list[Outcome]
    tokens: int
    """Of all its tasks, without padding."""
    seconds: float


def give_memory_back() -> None:
    """Return freed memory to the system: glibc keeps that of tensors of up to 32 MiB, which adds up with a beam."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)


class Worker:
    """A thread with a model.

    Args:
        warm: called once the model has translated for the first time, from the thread.
        done: called with each batch, from the thread.
        ended: called when the thread ends, from the thread.
    """

    def __init__(
        self,
        translator: Translator,
        line: WaitingLine,
        *,
        warm: Callable[[], None],
        done: Callable[[Ran], None],
        ended: Callable[[], None],
    ) -> None:
        self.translator, self.line = translator, line
        self._tell_warm, self._tell_done, self._tell_ended = warm, done, ended
        self._takes = True
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the thread runs, and takes batches: one that is about to end takes none any more."""
        return self._takes and self._thread.is_alive()

    def start(self) -> None:
        """Begin to take batches."""
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the thread, which comes when the line is closed and its batch done or given up."""
        self._thread.join()

    def _run(self) -> None:
        try:
            TranslateLines(SearchOptions()).run(self.translator, ["a"], self.line.batch_tokens, lambda _: True)
            self._tell_warm()
            while batch := self.line.take():
                since = time.perf_counter()
                outcomes = self._work(batch)
                tokens = sum(entry.task.length for entry in batch)
                self._tell_done(Ran(outcomes, tokens, time.perf_counter() - since))
                if not self.line:  # nobody waits for the milliseconds that this takes
                    give_memory_back()
        finally:
            self._takes = False  # before it is told, so that whoever is admitted until then hears of the end
            self._tell_ended()

    def _work(self, batch: Sequence[Entry]) -> list[Outcome]:
        """Run a batch; one that fails is halved, so that a task which no model can take fails alone.

        What is decoded for owners who are gone is given up on the way; what they then get is as good as any.
        """
        contents = [entry.task.content for entry in batch]
        try:
            results = batch[0].task.kind.run(
                self.translator, contents, self.line.batch_tokens, lambda index: not batch[index].owner.gone
            )
        except Exception as error:
            if len(batch) > 1:
                middle = len(batch) // 2
                return self._work(batch[:middle]) + self._work(batch[middle:])
            if not isinstance(error, RectiformerError):
                LOG.error("a batch failed: %s", type(error).__name__)  # its message might hold what a user wrote
            return [Outcome(batch[0].owner, batch[0].task, error=error)]
        return [Outcome(entry.owner, entry.task, result) for entry, result in zip(batch, results, strict=True)]
