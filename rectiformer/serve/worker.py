"""The queue of tasks, and the one thread that uses the model: it takes a batch, runs it and reports each result.

Requests share the model fairly, as in start-time fair queueing: each task starts, in virtual time, where the one before
it of the same request ended, and the earliest start is next. A later sentence thus overtakes a long
document, which still never starves. Tasks of similar length join the next one until the batch is full.
"""

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rectiformer.errors import RectiformerError
from rectiformer.serve.jobs import Task, TranslateLines
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator

LOG = logging.getLogger(__name__)


class Owner:
    """Who waits for tasks."""

    def __init__(self) -> None:
        self.reached = 0.0
        """Virtual time at which its last task ends."""
        self.gone = False
        """Whether the results are no longer wanted."""


@dataclass(eq=False)
class Entry:
    """A task in the queue and, once it ran, its result or why there is none."""

    owner: Owner
    task: Task
    start: float
    result: Any = None
    error: Exception | None = None


class TaskQueue:
    """The tasks of all requests, between the event loop and the model's thread.

    Args:
        batch_tokens: padded tokens of a batch; a longer task makes a batch of its own.
    """

    def __init__(self, batch_tokens: int) -> None:
        self.batch_tokens = batch_tokens
        self._entries: list[Entry] = []  # as they came, which decides among equals
        self._changed = threading.Condition()
        self._closed = False
        self._now = 0.0  # virtual time

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, owner: Owner, tasks: Sequence[Task]) -> None:
        """Add tasks; the service limits how many."""
        with self._changed:
            owner.reached = max(owner.reached, self._now)
            for task in tasks:
                self._entries.append(Entry(owner, task, owner.reached))
                owner.reached += task.length
            self._changed.notify()

    def drop(self, owner: Owner) -> None:
        """Remove the tasks of an owner who is gone."""
        with self._changed:
            owner.gone = True
            self._entries = [entry for entry in self._entries if entry.owner is not owner]

    def close(self) -> None:
        """Give out no more tasks."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def take(self) -> list[Entry]:
        """The next batch, as soon as there is one; empty once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._entries or self._closed)
            if self._closed:
                return []
            batch = self._choose()
            chosen = set(batch)
            self._entries = [entry for entry in self._entries if entry not in chosen]
            return batch

    def _choose(self) -> list[Entry]:
        first = min(self._entries, key=lambda entry: entry.start)
        self._now = max(self._now, first.start)
        alike = [entry for entry in self._entries if entry.task.operation == first.task.operation]
        alike.remove(first)
        alike.sort(key=lambda entry: (abs(entry.task.length - first.task.length), entry.start))
        batch, longest = [first], first.task.length
        for entry in alike:
            longest = max(longest, entry.task.length)
            if (len(batch) + 1) * longest > self.batch_tokens:
                break
            batch.append(entry)
        return batch


def trim_heap() -> None:
    """Return freed memory to the system: glibc keeps that of tensors of up to 32 MiB, which adds up with a beam."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)


class Worker(threading.Thread):
    """The thread that uses the model, until the queue is closed.

    Args:
        warm: called once the model has translated for the first time, from the thread.
        done: called with each batch and the seconds it took, from the thread.
        ended: called when the thread ends, from the thread.
    """

    def __init__(
        self,
        translator: Translator,
        queue: TaskQueue,
        *,
        warm: Callable[[], None],
        done: Callable[[list[Entry], float], None],
        ended: Callable[[], None],
    ) -> None:
        super().__init__(name="model", daemon=True)
        self.translator, self.queue = translator, queue
        self._tell_warm, self._tell_done, self._tell_ended = warm, done, ended
        self._takes = True

    @property
    def alive(self) -> bool:
        """Whether the thread runs and takes batches; one that is about to end takes none."""
        return self._takes and self.is_alive()

    def run(self) -> None:
        try:
            TranslateLines(SearchOptions()).run(self.translator, ["a"], self.queue.batch_tokens, lambda _: True)
            self._tell_warm()
            while batch := self.queue.take():
                since = time.perf_counter()
                self._work(batch)
                self._tell_done(batch, time.perf_counter() - since)
                if not self.queue:  # it takes milliseconds, and nobody waits now
                    trim_heap()
        finally:
            self._takes = False  # before `ended` is called, so that whoever is admitted until then hears of it
            self._tell_ended()

    def _work(self, batch: list[Entry]) -> None:
        """Run a batch; one that fails is halved, so that a task the model cannot take fails alone.

        Decoding for owners who are gone is given up on the way; their results are arbitrary.
        """
        contents = [entry.task.content for entry in batch]
        try:
            results = batch[0].task.operation.run(
                self.translator, contents, self.queue.batch_tokens, lambda index: not batch[index].owner.gone
            )
            for entry, result in zip(batch, results, strict=True):
                entry.result = result
        except Exception as error:
            if len(batch) > 1:
                middle = len(batch) // 2
                self._work(batch[:middle])
                self._work(batch[middle:])
                return
            if not isinstance(error, RectiformerError):
                LOG.error("a batch failed: %s", type(error).__name__)  # its message might hold a user's text
            batch[0].error = error
