"""Named moments at which a test can have this process killed."""

from __future__ import annotations

import os
import signal
from collections import Counter

FAILPOINTS = ("mid-tensor", "before-manifest", "before-rename", "before-latest", "mid-prune")
"""Those of a checkpoint being saved, in their order; "before-config" is of a run being resumed with other settings."""

_hits: Counter[str] = Counter()


def failpoint(name: str) -> None:
    """Kill this process if RECTIFORMER_FAILPOINT is `name`, or is `name:n` and this is the n-th time here."""
    wanted, _, turn = os.environ.get("RECTIFORMER_FAILPOINT", "").partition(":")
    if not name or wanted != name:
        return
    _hits[name] += 1
    if turn in ("", str(_hits[name])):
        os.kill(os.getpid(), signal.SIGKILL)
