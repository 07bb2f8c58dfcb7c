"""Runs of several ranks, in processes that can be stopped and killed."""

import contextlib
import os
import signal
from dataclasses import dataclass, field

from end_to_end.tiny import Launcher, overrides


@dataclass
class Ended:
    """How ranks ended, and what they reported."""

    exits: list = field(default_factory=list)
    notes: list = field(default_factory=list)
    errors: dict = field(default_factory=dict)


class RankLauncher(Launcher):
    """Trains with several ranks in child processes of ranks_driver.py."""

    script = "ranks_driver.py"

    def __init__(self):
        super().__init__()
        self.running = []
        self.received = []

    def start(self, folder, ranks, *, data=None, dtype="float32", failpoint="", limit=0, fails=0, **changes):
        """Begin or resume the run in `folder`; the process ids.

        Rank `fails` is killed at the failpoint, or may write no file of more than `limit` bytes.
        """
        job = {"folder": str(folder), "ranks": ranks, "data": data and str(data), "dtype": dtype}
        job |= {"failpoint": failpoint, "limit": limit, "fails": fails, "overrides": overrides(**changes)}
        self._send(job)
        self.received = []
        while not self.running:  # the first rank may report before the last one is there
            line = self._receive()
            self.running = line.get("pids", [])
            self.received += [] if self.running else [line]
        return self.running

    def finish(self):
        ended = Ended()
        while self.running:
            [(event, value)] = (self.received.pop(0) if self.received else self._receive()).items()
            if event == "note":
                ended.notes.append(value)
            elif event == "error":
                ended.errors[value[0]] = value[1]
            else:
                ended.exits, self.running = value, []
        return ended

    def close(self):
        for pid in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.driver.communicate()
