"""How far a command is, told on standard error: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS = 10.0
"""Between two lines, where standard error is no terminal; what takes less says nothing."""


@contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """A function that is told how many are done, and of how many; `what` begins a line."""
    from rectiformer.terminal import Terminal

    with Terminal(stderr=True) as terminal:
        begun, said = False, time.monotonic()

        def tell(done: int, total: int) -> None:
            nonlocal begun, said
            if not begun:
                terminal.begin(0, total)
                begun = True
            terminal.advance(done)
            if not terminal.console.is_terminal and time.monotonic() - said >= SECONDS:
                terminal.note(f"{what}: {done:,} of {total:,}")
                said = time.monotonic()

        yield tell
