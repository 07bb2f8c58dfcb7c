"""A process that trains on request. It forks a child for each run, so that torch is imported only once.

Reads jobs as JSON lines; answers in such lines: {"pid": ...}, {"note": ...} and {"error": ...} of the child,
and at its end {"exit": ...}, negative for a signal. `moments` of a job says when the child sends which signal to
itself: {"advance 37": "SIGTERM"}, {"open valid/source.txt": "SIGKILL 2"} (the second time).
"""

import json
import os
import re
import signal
import sys
from collections import Counter
from pathlib import Path

import sacrebleu  # noqa: F401  these three are imported by the first validation otherwise, in every child again
import sentencepiece  # noqa: F401
import torch
import torch._dynamo

from rectiformer.errors import RectiformerError
from rectiformer.toml import load_config
from rectiformer.train.reporting import Reporter
from rectiformer.train.start import train


def answer(**line):
    os.write(1, json.dumps(line).encode() + b"\n")


class Moments(Reporter):
    """Sends this process signals: after an update ("advance 37"), before a file is opened ("open valid/source.txt")."""

    def __init__(self, moments):
        self.moments = moments
        self.times = Counter()

    def meet(self, moment):
        self.times[moment] += 1
        name, _, time = self.moments.get(moment, "").partition(" ")
        if name and self.times[moment] == int(time or 1):
            os.kill(os.getpid(), getattr(signal, name))

    def advance(self, step):
        self.meet(f"advance {step}")

    def note(self, text):
        answer(note=text)

    def audit(self, event, arguments):
        """Python calls this before it opens a file; here it goes by its folder and name, process ids left out."""
        if event == "open" and isinstance(arguments[0], str | Path):
            self.meet("open " + re.sub(r"tmp-[0-9]+", "tmp", "/".join(str(arguments[0]).split("/")[-2:])))


def run(job):
    os.environ["RECTIFORMER_FAILPOINT"] = job["failpoint"]
    moments = Moments(job["moments"])
    sys.addaudithook(moments.audit)
    data = Path(job["data"]) if job["data"] else None
    try:
        train(load_config(None, job["overrides"]), Path(job["folder"]), resume=True, data=data, reporter=moments)
    except RectiformerError as error:
        answer(error=str(error))
        return error.exit_code
    return 0


def main():
    torch.set_num_threads(1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 1
            answer(pid=os.getpid())
            try:
                code = run(json.loads(line))
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(code)
        answer(exit=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    main()
