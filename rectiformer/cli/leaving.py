"""The command line as a process of its own: `main`, and an end that nothing can spoil where torchrun started it."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from rectiformer.cli import main


def start() -> None:
    """Run a command; a rank of torchrun then ends with its exit code, without Python being finalized.

    torch's gloo groups have threads of their own, which `destroy_process_group` does not end. One of them that lets go
    of a tensor while Python is finalized is killed in the midst of C++ code, and the process with it: "terminate called
    without an active exception" and exit code -6, after a training that was complete.
    """
    try:
        main()
    except SystemExit as end:
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            raise
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, AttributeError):  # of a reader that has gone, or where there is no such stream
                stream.flush()
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
