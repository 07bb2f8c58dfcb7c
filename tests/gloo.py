"""Ranks of torch.distributed in processes of their own, which gloo joins; they keep what they found for all tests."""

import fcntl
import multiprocessing
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

SECONDS = 60
"""A rank that waits longer for the others fails."""


def run_ranks(find, size, results):
    """What `find(rank, size)` gives on each rank; they run once, whoever of pytest-xdist's workers asks first.

    `find` stands in a module that started processes can import by its name; `results` is the folder to keep it in.
    """
    with results.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not results.exists():
            results.mkdir()
            multiprocessing.set_forkserver_preload(["torch", "torch.distributed"])  # imported once, not by each rank
            torch.multiprocessing.start_processes(work, (find, size, results), size, start_method="forkserver")
    return [torch.load(results / f"{rank}.pt", weights_only=True) for rank in range(size)]


def work(rank, find, size, results):
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{results}/meeting", timedelta(seconds=SECONDS), world_size=size, rank=rank)
    torch.save(find(rank, size), results / f"{rank}.pt")
    dist.destroy_process_group()
