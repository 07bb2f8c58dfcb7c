"""What training reports while it runs; the command line turns it into a progress bar or plain lines."""

import time
from collections.abc import Mapping
from typing import Any

LOOK_SECONDS = 10.0
"""After which it is known how many cores the threads get."""
ENOUGH_CORES = 0.7
"""Share of a core per thread. Waiting threads spin, so they take nearly all of theirs where nobody else wants it."""


class Reporter:
    """Receives the progress of a training, and shows nothing of it; subclasses show what they want to."""

    def note(self, text: str) -> None:
        """One line worth reading."""

    def preparing(self, stage: str, count: int) -> None:
        """So many lines of a stage of data preparation are done."""

    def begin(self, step: int, steps: int) -> None:
        """Training starts, with `step` updates of `steps` already done."""

    def advance(self, step: int) -> None:
        """One more update is done."""

    def logged(self, record: Mapping[str, Any]) -> None:
        """Metrics of the latest updates, as in metrics.jsonl."""

    def validated(self, record: Mapping[str, Any]) -> None:
        """Metrics of a validation, as in metrics.jsonl."""

    def end(self) -> None:
        """Training is over, for whatever reason."""


class CoreWatch:
    """Notices threads that wait for cores which other processes use.

    After every parallel operation all threads wait for the slowest, at best until the scheduler's next time slice. One
    busy process more than there are cores makes updates 10 to 30 times as long; with fewer threads they are as fast as
    their cores.
    """

    def __init__(self, threads: int) -> None:
        self.threads, self.told = threads, False
        self.start()

    def start(self) -> None:
        """Count from now on: what came before was no training."""
        self._wall, self._own = time.perf_counter(), time.process_time()

    def look(self) -> str:
        """A warning, once; "" otherwise."""
        wall = time.perf_counter() - self._wall
        if self.told or self.threads < 2 or wall < LOOK_SECONDS:
            return ""
        cores = (time.process_time() - self._own) / wall
        self.start()
        self.told = cores < ENOUGH_CORES * self.threads
        if not self.told:
            return ""
        return (
            f"warning: {self.threads} threads get {cores:.1f} cores, because other processes use them too, and mostly "
            f"wait for each other; with OMP_NUM_THREADS={max(1, int(cores))} updates may be several times as fast"
        )
