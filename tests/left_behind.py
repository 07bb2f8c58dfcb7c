"""A rank that ends while a thread of its gloo group waits for Python: `left_behind.py RANK PORT`, as ranks 0 and 1.

Rank 0 lets go of a tensor that the group still holds, and of Python's lock no more until its end. Meanwhile rank 1 has
the collective done, so that the group's thread is to free the tensor, for which it needs that lock.
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from rectiformer import cli

LATER, END = 0.3, 1.0  # seconds from when the ranks have met
rank, port = int(sys.argv[1]), int(sys.argv[2])
os.environ["TORCHELASTIC_RUN_ID"] = "test"


def command():
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 1, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.barrier()
    end = time.monotonic() + END
    sys.setswitchinterval(100)
    time.sleep(LATER * rank)
    dist.all_reduce(torch.ones(9), async_op=True)
    while time.monotonic() < end:
        rank and time.sleep(0.1)
    sys.exit(0)


cli.main = command
cli.start()
