"""Commands of rectiformer as one of several ranks, one after the other; tests start it as often as there are ranks.

    python tests/ranked.py RANK RANKS JOBS

JOBS is a JSON file: a list of {"port", "arguments", "stdin", "out"}. Exit code, and the files `out`.RANK.out and .err
hold what came of each.
"""

import io
import json
import os
import sys
import warnings
from contextlib import redirect_stderr
from pathlib import Path

import torch
import torch.distributed as dist

from rectiformer.cli import main


def run(rank, job):
    os.environ["MASTER_PORT"] = str(job["port"])
    sys.argv = ["rectiformer", *job["arguments"]]
    sys.stdin = io.TextIOWrapper(io.BytesIO(job.get("stdin", "").encode() if rank == 0 else b"not for others"))
    base = f"{job['out']}.{rank}"
    code = 0
    with open(f"{base}.out", "wb") as out, open(f"{base}.err", "w") as err, redirect_stderr(err):
        sys.stdout = io.TextIOWrapper(out)
        try:
            main()
        except SystemExit as exit:
            code = exit.code
        finally:
            sys.stdout.flush()
            sys.stdout.detach()
            sys.stdout = sys.__stdout__
    Path(f"{base}.code").write_text(str(code))


if __name__ == "__main__":
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    for job in json.loads(Path(sys.argv[3]).read_text()):
        run(rank, job)
    sys.exit(dist.is_initialized())  # a group that a command has left behind may abort the process
