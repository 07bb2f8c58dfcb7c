"""Rows whose contestants take turns, so that a drifting clock or a busy host hits all alike, and the table of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial

from kernel_report import Mark, Point, name_row
from kernel_setup import Row
from kernel_timing import Work
from running import attempt_all, describe, unit_of

ROUNDS = 7


def measure_in_turns(row: Row, rounds: int = ROUNDS, warm_ups: int = 3) -> Point:
    """Median over rounds of every contestant of a row; one that fails is left out aloud."""
    trial = row.build()
    works = attempt_all(row, {name: partial(warm_up, make, warm_ups) for name, make in trial.contestants.items()})
    turns: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            turns[name].append(trial.meter(work))
    errors = attempt_all(row, {name: check for name, check in trial.checks.items() if name in works})
    point = describe(row, trial, {name: statistics.median(own) for name, own in turns.items()}, errors)
    spread = {name: [min(own), max(own)] for name, own in turns.items()}
    return {**point, "rounds": rounds, f"{trial.unit}_least_most": spread}


def warm_up(make: Callable[[], Work], times: int) -> Work:
    """A contestant's work after its first calls, in which kernels are compiled and memory is set aside."""
    work = make()
    for _ in range(times):
        work()
    return work


def write_table(points: list[Point], judge: Callable[[Point], Iterator[Mark]]) -> str:
    """A Markdown row for each figure that `judge` yields; a wrong answer gets none."""
    lines = ["| what | ours | unit | compared with | figure | bar | |", "| --- |" + " --- |" * 6]
    for point in points:
        unit, complaint = unit_of(point), point.get("complaint")
        own = point[unit].get("ours")
        cells = [name_row(point), "" if own is None else f"{own:.4g}", unit]
        if complaint:
            lines.append(f"| {' | '.join(cells)} | wrong answer: {complaint} | | | |")
            continue
        for mark in judge(point):
            bar = "" if mark.reach is None else f"{'<=' if mark.at_most else '>='} {mark.reach:g}"
            lines.append(f"| {' | '.join([*cells, mark.compared_with, f'{mark.value:.3g}', bar, mark.verdict])} |")
            cells = [""] * len(cells)
    return "\n".join(lines)
