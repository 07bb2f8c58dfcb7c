"""The fused kernels vs. SDPA, torch's packed attention, FlexAttention, published kernels and plain torch, on one GPU.

    python benchmarks/kernel_speed.py --wheels data/wheels --out benchmarks/results/kernels.jsonl --plot kernels.svg

A point is one shape, bf16, with all contestants one after the other in this process; each is the median over 30 ms of
calls timed by CUDA events, the GPU's cache flushed before each (decoding and short sequences: inside a CUDA graph).
Results of a part of every shape are compared with float64 in the same run. Points are appended as they come; a run
that is started again leaves out those its file has of the same commit and device. At the end the table says of each
ratio whether it reaches what was asked for. The kernel of threshold attention is free for research only and no part of
this repository: its file is read from --peer-folder.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))  # where the package is not installed
from kernel_peers import add_wheels
from kernel_report import Point, draw_rates, write_table
from kernel_rows import (
    dense_rows,
    entmax_rows,
    flex_rows,
    memory_rows,
    plain_rows,
    sigmoid_rows,
    threshold_rows,
    variant_rows,
)
from kernel_sentences import decode_rows, short_rows
from kernel_setup import TINY, Bench, Row, Scale, Trial
from kernel_timing import Work
from running import add_options, attempt_all, describe, describe_run, measure_rows

SECTIONS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "forward": partial(dense_rows, direction="forward"),
    "backward": partial(dense_rows, direction="backward"),
    "short": short_rows,
    "decode": decode_rows,
    "memory": memory_rows,
    "variants": variant_rows,
    "flex": flex_rows,
    "entmax": entmax_rows,
    "plain": plain_rows,
    "sigmoid": sigmoid_rows,
    "threshold": threshold_rows,
}
NEEDED = {
    "entmax": 60,
    "sigmoid": 60,
    "flex": 30,
    "plain": 20,
}  # seconds a row may take where much is compiled; others take 5


def measure(row: Row) -> Point:
    """Every contestant of a row; one that fails is left out aloud."""
    trial = row.build()
    values = attempt_all(row, {n: partial(run_meter, trial, prepare) for n, prepare in trial.contestants.items()})
    errors = attempt_all(row, {name: check for name, check in trial.checks.items() if name in values})
    return describe(row, trial, values, errors)


def run_meter(trial: Trial, prepare: Callable[[], Work]) -> float:
    return trial.meter(prepare())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, SECTIONS, milliseconds=30, seconds=300)
    parser.add_argument("--wheels", type=Path, default=None, help="folder of wheels: AdaSplash, entmax, triton-sigmoid")
    parser.add_argument("--peer-folder", type=Path, default=None, help="folder of triton_threshold_attention.py")
    parser.add_argument("--plot", type=Path, default=None, help="SVG of the rates over lengths")
    return parser.parse_args()


def main() -> None:
    options = parse()
    end = time.monotonic() + options.seconds
    bench = Bench(options.device, TINY if options.tiny else Scale(), options.milliseconds)
    gc.freeze()  # what was imported need not be looked at after every row
    with tempfile.TemporaryDirectory() as unpacked:
        if options.wheels is not None:
            add_wheels(options.wheels, Path(unpacked))
        if options.peer_folder is not None:
            sys.path.insert(0, str(options.peer_folder))
        rows = [row for section in options.sections for row in SECTIONS[section](bench)]
        setting = describe_run("kernels", options.device, ("triton", "adasplash", "triton-sigmoid"))
        points = measure_rows(rows, measure, setting, options, end, NEEDED)
    print(write_table(points))
    if options.plot is not None:
        draw_rates(points, options.plot)


if __name__ == "__main__":
    main()
