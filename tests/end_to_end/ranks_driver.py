"""A process that trains on request with several ranks, which it forks with the environment that torchrun gives its own.

Reads jobs as JSON lines; answers in such lines: {"pids": [...]}, {"note": ...} of rank 0, {"error": [rank, text]} of
each rank that raised one, and at the end {"exits": [...]}, negative for a signal. torch is imported only once.
"""

import faulthandler
import json
import os
import resource
import signal
import sys
from pathlib import Path

import sacrebleu  # noqa: F401  these are imported by the first validation otherwise, in every child again
import sentencepiece  # noqa: F401
import torch
import torch._dynamo
import torch.distributed as dist

from rectiformer.errors import RectiformerError, is_from_other_rank
from rectiformer.toml import load_config
from rectiformer.train import fsdp  # noqa: F401  with FSDP2
from rectiformer.train.reporting import Reporter
from rectiformer.train.start import train


def answer(**line):
    os.write(1, json.dumps(line).encode() + b"\n")


class Notes(Reporter):
    def note(self, text):
        answer(note=text)


def run(job, rank):
    torch.set_default_dtype(getattr(torch, job["dtype"]))
    if rank == job["fails"] and job["limit"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["limit"],) * 2)
    data = Path(job["data"]) if job["data"] else None
    try:
        train(load_config(None, job["overrides"]), Path(job["folder"]), resume=True, data=data, reporter=Notes())
    except RectiformerError as error:
        if not is_from_other_rank(error):
            answer(error=[rank, str(error)])
        return error.exit_code
    return 0


def fork(job, rank, port):
    child = os.fork()
    if child:
        return child
    facts = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["ranks"], "MASTER_ADDR": "127.0.0.1"}
    facts |= {"LOCAL_WORLD_SIZE": job["ranks"], "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    facts |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": 0}
    facts |= {"RECTIFORMER_FAILPOINT": job["failpoint"] if rank == job["fails"] else ""}
    os.environ.update({name: str(value) for name, value in facts.items()})
    faulthandler.dump_traceback_later(90, exit=True)  # a rank that hangs says where, and hangs no test
    code = 1
    try:
        code = run(job, rank)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def keep_store():
    """A store for the ranks to meet at, in a process of its own: it has threads, and one that forks must have none."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(store.port).encode())
        signal.pause()
    port = int(os.read(reading, 16))
    os.close(reading)
    os.close(writing)
    return child, port


def main():
    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        keeper, port = keep_store()
        pids = [fork(job, rank, port) for rank in range(job["ranks"])]
        answer(pids=pids)
        answer(exits=[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
        os.kill(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)


if __name__ == "__main__":
    main()
