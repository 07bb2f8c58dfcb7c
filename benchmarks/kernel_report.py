"""Tables and a plot of the kernel benchmark, with the target next to each ratio.

python benchmarks/kernel_report.py benchmarks/results/kernels.jsonl --plot kernels.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Point = dict[str, Any]
LABELS = {"size": "D", "length": "N", "keys": "N", "batch": "B", "heads": "H", "key_heads": "K", "rows": "B"}
SAID = ("pass", "mask", "variant", "attention", "module", "model", "text", "time")  # whose values speak for themselves
TARGETS = {"short": 2.0, "decode": 1.3, "entmax": 3.0, "flex": 2.0, "sigmoid": 1.0, "threshold": 1.0}
DIRECTIONS = ("forward", "backward")
CONTESTANTS = {"cudnn": "SDPA (cuDNN)", "ours": "rela", "flash": "SDPA (flash)"}
LONG = 4096  # from this length on the targets of forward and backward are higher


@dataclass(frozen=True)
class Mark:
    """One figure, what it is compared with, and its target (None: none)."""

    compared_with: str
    value: float
    reach: float | None = None
    at_most: bool = False

    @property
    def verdict(self) -> str:
        if self.reach is None:
            return ""
        return "reached" if (self.value <= self.reach if self.at_most else self.value >= self.reach) else "missed"


def judge(point: Point, cublas: float | None) -> Iterator[Mark]:
    """The figures of a point that have a target, and those a reader looks for."""
    section, case = point["section"], point["case"]
    if section == "memory":
        yield from (memory_mark(name, percent) for name, percent in point["extra_percent"].items())
    times = point.get("ms", {})
    ratios = point.get("ratios", {})
    if not ratios:
        return
    best = min(ratios, key=ratios.get)
    if section == "forward":
        yield Mark(best, ratios[best], 1.2 if case["length"] >= LONG else 1.05)
        if cublas:
            target = 0.9 if case["length"] >= 4 * LONG and case["mask"] == "full" else None
            yield Mark("cuBLAS rate", point["tflops"]["ours"] / cublas, target)
    elif section == "backward":
        if "cudnn" in ratios:
            yield Mark("cudnn", ratios["cudnn"], 1.15 if case["length"] >= LONG else None)
        if best != "cudnn":
            yield Mark(best, ratios[best])
    elif section in ("flex", "sigmoid", "threshold"):
        yield Mark(best, ratios[best], TARGETS[section])
        if best in point.get("errors", {}):
            target = 1.0 if section == "flex" else None
            yield Mark(f"{best}'s error", point["errors"]["ours"] / point["errors"][best], target, at_most=True)
    elif section in ("entmax", "decode"):
        for name in times:
            if name.startswith("ours"):
                yield Mark(f"{best} / {name}", times[best] / times[name], TARGETS[section])
    elif section in ("variants", "plain"):
        yield from (Mark(name, ratio) for name, ratio in ratios.items())
    else:
        yield Mark(best, ratios[best], TARGETS[section])


def memory_mark(name: str, percent: float) -> Mark:
    return Mark(f"held, {name}, %", percent, 10.0 if name == "ours" else None, at_most=True)


def name_row(point: Point) -> str:
    """Section and case in few words."""
    words = [point["section"]]
    for name, value in point["case"].items():
        if value != point["section"]:
            words.append(str(value) if name in SAID else f"{LABELS.get(name, name)} {value}")
    return " ".join(words)


def write_table(points: list[Point]) -> str:
    """A Markdown row for each figure; a wrong answer gets no ratio."""
    rates = [point["tflops"]["cublas"] for point in points if point["section"] == "matmul" and point["ms"]]
    cublas = rates[-1] if rates else None
    lines = ["| what | ours ms | TFLOP/s | error (eager) | vs. | ratio | target | |", "| --- |" + " --- |" * 7]
    if cublas:
        lines.append(f"| cuBLAS | | {cublas:.0f} | | | | | |")
    for point in points:
        cells = [name_row(point), *figures(point)]
        if point.get("complaint"):
            lines.append(f"| {' | '.join(cells)} | wrong answer: {point['complaint']} | | | |")
            continue
        for mark in judge(point, cublas):
            sign = "<=" if mark.at_most else ">="
            target = "" if mark.reach is None else f"{sign} {mark.reach:g}"
            lines.append(f"| {' | '.join([*cells, mark.compared_with, f'{mark.value:.2f}', target, mark.verdict])} |")
            cells = [""] * len(cells)
    return "\n".join(lines)


def figures(point: Point) -> list[str]:
    """Our time, rate and error, each empty where it was not measured."""
    time, rate, error = (point.get(name, {}).get("ours") for name in ("ms", "tflops", "errors"))
    return [
        "" if time is None else f"{time:.4g}",
        "" if rate is None else f"{rate:.0f}",
        "" if error is None else f"{error:.1e} ({point['eager_error']:.1e})",
    ]


def draw_rates(points: list[Point], path: Path) -> None:
    """TFLOP/s over lengths without a mask: a panel for each head size and direction, cuBLAS's rate as a line across."""
    from rectiformer.studies.figures import collect_lines, draw_panels

    whole = [point for point in points if point["case"].get("mask") == "full"]
    cublas = [point["tflops"]["cublas"] for point in points if point["section"] == "matmul" and point["ms"]]
    titles, lines = [], []
    for size in sorted({point["case"]["size"] for point in whole if point["section"] in DIRECTIONS}):
        for direction in DIRECTIONS:
            own = [p for p in whole if (p["section"], p["case"]["size"]) == (direction, size)]
            titles.append(f"{direction}, head size {size}")
            lines.append(collect_lines(rates_of(own)))
    bands = {"cuBLAS": (cublas[-1] - 3, cublas[-1] + 3)} if cublas else {}
    about = "Rate of the kernels by length"
    draw_panels(path, about, titles, lines, "sequence length", "TFLOP/s", log_x=True, bands=bands)


def rates_of(points: list[Point]) -> Iterator[tuple[str, float, float]]:
    """Contestant, length and rate."""
    for point in points:
        for key, name in CONTESTANTS.items():
            if key in point["tflops"]:
                yield name, point["case"]["length"], point["tflops"][key]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--plot", type=Path, default=None, help="SVG of the rates over lengths")
    options = parser.parse_args()
    found = [json.loads(line) for line in options.file.read_text(encoding="utf-8").splitlines()]
    points = list({name_row(point): point for point in found}.values())  # a later run replaces an earlier one
    print(write_table(points))
    if options.plot is not None:
        draw_rates(points, options.plot)


if __name__ == "__main__":
    main()
