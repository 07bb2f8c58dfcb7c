"""Points for the cost model, on this CPU: updates against tokens and length, collectives against bytes and ranks.

    python benchmarks/scaling_points.py --out benchmarks/results/scaling-cpu.jsonl

Updates are timed in CPU seconds of one thread, so that a busy machine does not count; collectives of gloo ranks over
the loopback by wall time, the fastest of several. They show nothing of a network.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))  # where the package is not installed
from cost_fits import COLLECTIVES
from marian import SIZES
from points import add_result_options, append_point, describe_machine
from training import draw_batch, our_update

SHAPES = [(32, 16), (128, 16), (16, 64), (64, 64), (8, 128), (4, 256), (16, 256), (2, 512), (1, 1024), (3, 1024)]
"""Sentences and their length."""
BYTES = [1 << power for power in range(12, 25, 2)]
"""What each rank holds before an all-gather or all-reduce, and after a reduce-scatter."""


def time_updates(size: str, repeats: int, out: Path | None) -> None:
    """CPU seconds of an update, the least of several."""
    for sentences, length in SHAPES:
        batch = draw_batch(sentences, length, SIZES[size]["vocabulary"])
        update = our_update(SIZES[size], "rela-g", batch, "cpu", "fp32")
        update()
        seconds = []
        for _ in range(repeats):
            start = time.process_time()
            update()
            seconds.append(time.process_time() - start)
        shape = {"size": size, "sentences": sentences, "length": length}
        point = {"benchmark": "update", **shape, "seconds": min(seconds), **describe_machine()}
        append_point(out, point)
        print(f"update of {sentences} x {length}: {min(seconds) * 1e3:.1f} ms", flush=True)


def time_collectives(rank: int, ranks: int, folder: str, repeats: int, out: Path | None) -> None:
    """Seconds of each collective on rank 0, the least of several."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/{ranks}", timedelta(seconds=300), world_size=ranks, rank=rank)
    for name in COLLECTIVES:
        for size in BYTES:
            own, others = torch.zeros(size // 4), list(torch.zeros(ranks, size // 4))
            seconds = []
            for _ in range(repeats):
                dist.barrier()
                start = time.perf_counter()
                if name == "all_gather":
                    dist.all_gather(others, own)
                elif name == "reduce_scatter":
                    dist.reduce_scatter(own, others)
                else:
                    dist.all_reduce(own)
                seconds.append(time.perf_counter() - start)
            if rank == 0:
                shape = {"collective": name, "ranks": ranks, "bytes": size}
                append_point(out, {"benchmark": "collective", **shape, "seconds": min(seconds), **describe_machine()})
                print(f"{name} of {size:,} bytes on {ranks} ranks: {min(seconds) * 1e3:.2f} ms", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=5)
    add_result_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    time_updates(options.size, options.repeats, options.out)
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            work = (ranks, folder, 4 * options.repeats, options.out)
            torch.multiprocessing.spawn(time_collectives, work, nprocs=ranks)


if __name__ == "__main__":
    main()
