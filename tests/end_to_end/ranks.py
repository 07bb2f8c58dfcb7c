"""Runs of several ranks, in processes that can be stopped and killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from end_to_end.tiny import overrides


@dataclass
class Ended:
    """How ranks ended, and what they said."""

    exits: list = field(default_factory=list)
    notes: list = field(default_factory=list)
    errors: dict = field(default_factory=dict)


class Ranks:
    """Trains with several ranks in child processes of ranks_driver.py."""

    def __init__(self):
        self.driver = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("ranks_driver.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.running = []
        self.said = []

    def start(self, folder, ranks, *, data=None, dtype="float32", failpoint="", limit=0, fails=0, **changes):
        """Begin or resume the run in `folder`; the process ids.

        Rank `fails` is killed at the failpoint, or may write no file of more than `limit` bytes.
        """
        job = {"folder": str(folder), "ranks": ranks, "data": data and str(data), "dtype": dtype}
        job |= {"failpoint": failpoint, "limit": limit, "fails": fails, "overrides": overrides(**changes)}
        self.driver.stdin.write(json.dumps(job) + "\n")
        self.driver.stdin.flush()
        self.said = []
        while not self.running:  # the first rank may speak before the last one is there
            line = self._hear()
            self.running = line.get("pids", [])
            self.said += [] if self.running else [line]
        return self.running

    def finish(self):
        ended = Ended()
        while self.running:
            [(kind, value)] = (self.said.pop(0) if self.said else self._hear()).items()
            if kind == "note":
                ended.notes.append(value)
            elif kind == "error":
                ended.errors[value[0]] = value[1]
            else:
                ended.exits, self.running = value, []
        return ended

    def train(self, folder, ranks, **options):
        self.start(folder, ranks, **options)
        return self.finish()

    def close(self):
        for pid in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.driver.communicate()

    def _hear(self):
        line = self.driver.stdout.readline()
        assert line, "the driver has died"
        return json.loads(line)
