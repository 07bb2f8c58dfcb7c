"""Ctrl-C before a command has begun and after it has ended: exit code 130 and nothing else.

Importing torch takes most of a command's first seconds. A KeyboardInterrupt in there would be a traceback of torch's
import, or be swallowed by what is being imported. Nothing is open yet, so the process may end on the spot. Importing
this module is enough, as that has to come before all other imports; it needs few itself.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys

INTERRUPTED = 130  # as a shell says it


def quit_at_once(*_: object) -> None:
    """The handler: no exception, which somebody could catch."""
    os._exit(INTERRUPTED)


def is_command() -> bool:
    """Whether this process is `rectiformer` or `python -m rectiformer`, not a program that imports the package."""
    name = os.path.basename(getattr(sys, "argv", [""])[0])
    if name != "-m":  # which stands there as long as the package is being imported
        return name == __package__
    given = sys.orig_argv
    return ("-m", __package__) in itertools.pairwise(given) or f"-m{__package__}" in given


def exchange(old: object, new: signal._HANDLER) -> bool:
    """Handle Ctrl-C by `new` if that was done by `old` till now; whether it was."""
    found = signal.getsignal(signal.SIGINT) is old
    if found:
        signal.signal(signal.SIGINT, new)
    return found


if is_command():
    exchange(signal.default_int_handler, quit_at_once)
