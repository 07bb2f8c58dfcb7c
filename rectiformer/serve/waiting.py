"""Tasks that wait for the model: who is next, and who goes along.

Requests share the model fairly, as in start-time fair queueing: each task starts, in virtual time, where the one before
it of the same request ended, and the earliest start is next. A long document is thus overtaken by a sentence that comes
later, but never stands still. Those of like length go along with the next one, until the batch is full.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from rectiformer.serve.tasks import Task


class Owner:
    """Whose tasks wait."""

    def __init__(self) -> None:
        self.reached = 0.0
        """Virtual time up to which its tasks use the model."""
        self.gone = False
        """Whether nobody wants the results any more."""


@dataclass(frozen=True, eq=False)
class Entry:
    """A task that waits."""

    owner: Owner
    task: Task
    start: float
    number: int


class WaitingLine:
    """The tasks of all requests, between the threads that accept them and the one that has the model.

    Args:
        batch_tokens: padded tokens of a batch; a longer task makes a batch of its own.
    """

    def __init__(self, batch_tokens: int) -> None:
        self.batch_tokens = batch_tokens
        self._entries: list[Entry] = []
        self._changed = threading.Condition()
        self._closed = False
        self._now = 0.0  # virtual time
        self._number = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, owner: Owner, tasks: Sequence[Task]) -> None:
        """Let tasks wait; how many may is for others to say."""
        with self._changed:
            owner.reached = max(owner.reached, self._now)
            for task in tasks:
                self._entries.append(Entry(owner, task, owner.reached, self._number))
                owner.reached += task.length
                self._number += 1
            self._changed.notify()

    def drop(self, owner: Owner) -> None:
        """Forget the tasks of one who is gone."""
        with self._changed:
            owner.gone = True
            self._entries = [entry for entry in self._entries if entry.owner is not owner]

    def close(self) -> None:
        """No task is given out any more."""
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
            chosen = {entry.number for entry in batch}
            self._entries = [entry for entry in self._entries if entry.number not in chosen]
            return batch

    def _choose(self) -> list[Entry]:
        first = min(self._entries, key=lambda entry: (entry.start, entry.number))
        self._now = max(self._now, first.start)
        alike = [entry for entry in self._entries if entry is not first and entry.task.kind == first.task.kind]
        alike.sort(key=lambda entry: (abs(entry.task.length - first.task.length), entry.start, entry.number))
        batch, longest = [first], first.task.length
        for entry in alike:
            longest = max(longest, entry.task.length)
            if (len(batch) + 1) * longest > self.batch_tokens:
                break
            batch.append(entry)
        return batch
