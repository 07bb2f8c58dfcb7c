"""Rows measured one after the other until the time is over; a second run leaves out what its file already has."""

from __future__ import annotations

import argparse
import gc
import json
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from kernel_errors import Errors
from kernel_report import Point, name_row
from kernel_setup import Row, Trial
from points import add_result_options, append_point, describe_machine

UNITS = ("ms", "us", "extra_percent")
WITHOUT_OURS = ("matmul", "profile")  # sections whose points are kept though nobody is compared with ours


class OutOfTime(BaseException):
    """The seconds are over. Not an Exception, so that no contestant is blamed for it."""


def stop(*_: object) -> None:
    raise OutOfTime


def measure_until(row: Row, measure: Callable[[Row], Point], end: float) -> Point:
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
    point: Point = {"section": row.section, "case": row.case, **trial.facts, trial.unit: values}
    if trial.flops:
        point["tflops"] = {name: trial.flops / ms / 1e9 for name, ms in values.items()}
    if trial.unit in ("ms", "us") and "ours" in values:
        point["ratios"] = {name: own / values["ours"] for name, own in values.items() if not name.startswith("ours")}
    if errors:
        point["errors"] = {name: error.own for name, error in errors.items()}
        point["eager_error"] = next(iter(errors.values())).eager
        point["complaint"] = "; ".join(e.complaint for name, e in errors.items() if "ours" in name and e.complaint)
    return point


def unit_of(point: Point) -> str:
    return next(unit for unit in UNITS if unit in point)


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


def describe_run(benchmark: str, device: str, packages: Iterable[str] = ("triton",)) -> Point:
    """The machine and the versions of `packages`, which are in every point of a run."""
    versions: Point = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    if device == "cuda":
        versions["cudnn"] = torch.backends.cudnn.version()
    return {"benchmark": benchmark, **describe_machine(device), **versions}


def measure_rows(
    rows: list[Row],
    measure: Callable[[Row], Point],
    setting: Point,
    options: argparse.Namespace,
    end: float,
    needed: Mapping[str, float] = {},
) -> list[Point]:
    """Every row there is time for; those of this run or, where its file has them, of an earlier one.

    A row is not begun unless there is time for what its section `needed`, in seconds: 5 unless it is said.
    """
    known = {identify(point): point for point in read_points(options.out)}
    points: list[Point] = []
    left: list[Point] = []
    for index, row in enumerate(rows):
        named = {"section": row.section, "case": row.case}
        earlier = known.get(identify({**named, **setting}))
        if earlier is not None:
            points.append(earlier)
            continue
        if not options.tiny and time.monotonic() + needed.get(row.section, 5) > end:
            left.append(named)
            continue
        try:
            point = {**measure_until(row, measure, end), **setting}
        except OutOfTime:
            left += [{"section": later.section, "case": later.case} for later in rows[index:]]
            break
        print(summarize(point), flush=True)
        if row.section in WITHOUT_OURS or "ours" in point[unit_of(point)]:
            append_point(options.out, point)
            points.append(point)
    if left:
        print(f"{options.seconds:g} seconds are over; left: {'; '.join(map(name_row, left))}", flush=True)
    return points


def add_options(parser: argparse.ArgumentParser, sections: Iterable[str], milliseconds: float, seconds: float) -> None:
    """The options that every benchmark made of rows has."""
    sections = list(sections)
    parser.add_argument("--sections", nargs="+", choices=sections, default=sections, metavar="NAME")
    parser.add_argument("--seconds", type=float, default=seconds, help="stop before so many have passed")
    parser.add_argument(
        "--milliseconds", type=float, default=milliseconds, help="how long to measure a contestant of a row"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="sizes to try the script with")
    add_result_options(parser)
