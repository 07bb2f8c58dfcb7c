"""The fused kernels vs. SDPA, torch's packed attention, AdaSplash, FlexAttention and plain torch, on one GPU.

    python benchmarks/kernel_speed.py --wheels data/wheels --out benchmarks/results/kernels.jsonl --plot kernels.svg

A point is one shape, bf16, with all contestants one after the other in this process; each is the median over 30 ms of
calls timed by CUDA events, the GPU's cache flushed before each (decoding and short sequences: inside a CUDA graph).
Results of a part of every shape are compared with float64 in the same run. Points are appended as they come; a run
that is started again leaves out those its file has of the same commit and device. At the end the table says of each
ratio whether it reaches what was asked for.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))  # where the package is not installed
from kernel_errors import Errors
from kernel_peers import add_wheels
from kernel_report import Point, draw_rates, name_row, write_table
from kernel_rows import dense_rows, entmax_rows, flex_rows, memory_rows, plain_rows, variant_rows
from kernel_sentences import decode_rows, short_rows
from kernel_setup import TINY, Bench, Row, Scale, Trial
from kernel_timing import Work
from points import append_point, describe_machine

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
}
NEEDED = {"entmax": 60, "flex": 30, "plain": 20}  # seconds a row may take where much is compiled; others take 5


class OutOfTime(BaseException):
    """The seconds are over. Not an Exception, so that no contestant is blamed for it."""


def stop(*_: object) -> None:
    raise OutOfTime


def measure_until(row: Row, end: float) -> Point:
    """`measure`, given up with OutOfTime at the time `end`."""
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(1e-6, end - time.monotonic()))
    try:
        return measure(row)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def measure(row: Row) -> Point:
    """Every contestant of a row; one that fails is left out aloud."""
    trial = row.build()
    values = attempt_all(row, {n: partial(run_meter, trial, prepare) for n, prepare in trial.contestants.items()})
    errors = attempt_all(row, {name: check for name, check in trial.checks.items() if name in values})
    return describe(row, trial, values, errors)


def run_meter(trial: Trial, prepare: Callable[[], Work]) -> float:
    return trial.meter(prepare())


def attempt_all(row: Row, tasks: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """What each returned; of one that fails the reason is printed, once a section."""
    results = {}
    for name, task in tasks.items():
        try:
            results[name] = task()
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            say_once(row.section, f"{name}: left out: {type(error).__name__}: {reason}")
    return results


@cache
def say_once(section: str, line: str) -> None:
    print(f"{section}: {line}", flush=True)


def describe(row: Row, trial: Trial, values: dict[str, float], errors: dict[str, Errors]) -> Point:
    """What was measured, as a line of the results file."""
    point: Point = {"benchmark": "kernels", "section": row.section, "case": row.case, **trial.facts}
    point[trial.unit] = values
    if trial.flops:
        point["tflops"] = {name: trial.flops / ms / 1e9 for name, ms in values.items()}
    if trial.unit == "ms" and "ours" in values:
        point["ratios"] = {name: ms / values["ours"] for name, ms in values.items() if not name.startswith("ours")}
    if errors:
        point["errors"] = {name: error.own for name, error in errors.items()}
        point["eager_error"] = next(iter(errors.values())).eager
        point["complaint"] = "; ".join(e.complaint for name, e in errors.items() if "ours" in name and e.complaint)
    return point


def unit_of(point: Point) -> str:
    return "ms" if "ms" in point else "extra_percent"


def summarize(point: Point) -> str:
    unit = unit_of(point)
    values = ", ".join(f"{name} {value:.4g}" for name, value in point[unit].items())
    return f"{name_row(point)}: {values} {unit}"


def identify(point: Point) -> str:
    """What makes two points the same: a later run of another commit or device measures again."""
    return json.dumps([point.get(name) for name in ("section", "case", "commit", "device")], sort_keys=True)


def read_points(path: Path | None) -> list[Point]:
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def describe_run(options: argparse.Namespace) -> Point:
    versions = {}
    for package in ("triton", "adasplash"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    if options.device == "cuda":
        versions["cudnn"] = torch.backends.cudnn.version()
    return {**describe_machine(options.device), **versions}


def measure_rows(rows: list[Row], options: argparse.Namespace, end: float) -> list[Point]:
    """Every row there is time for; those of this run or, where its file has them, of an earlier one."""
    setting = describe_run(options)
    known = {identify(point): point for point in read_points(options.out)}
    points: list[Point] = []
    left: list[Point] = []
    for index, row in enumerate(rows):
        named = {"section": row.section, "case": row.case}
        earlier = known.get(identify({**named, **setting}))
        if earlier is not None:
            points.append(earlier)
            continue
        if not options.tiny and time.monotonic() + NEEDED.get(row.section, 5) > end:
            left.append(named)
            continue
        try:
            point = {**measure_until(row, end), **setting}
        except OutOfTime:
            left += [{"section": later.section, "case": later.case} for later in rows[index:]]
            break
        print(summarize(point), flush=True)
        if row.section == "matmul" or "ours" in point[unit_of(point)]:
            append_point(options.out, point)
            points.append(point)
    if left:
        print(f"{options.seconds:g} seconds are over; left: {'; '.join(map(name_row, left))}", flush=True)
    return points


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=300, help="stop before so many have passed")
    parser.add_argument("--milliseconds", type=float, default=30, help="how long to measure a contestant")
    parser.add_argument("--wheels", type=Path, default=None, help="folder of AdaSplash's and entmax's wheels")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="sizes to try the script with")
    parser.add_argument("--out", type=Path, default=None, help="JSON lines to append to")
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
        rows = [row for section in options.sections for row in SECTIONS[section](bench)]
        points = measure_rows(rows, options, end)
    print(write_table(points))
    if options.plot is not None:
        draw_rates(points, options.plot)


if __name__ == "__main__":
    main()
