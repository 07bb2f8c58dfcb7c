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
    """TFLOP/s over lengths, a panel for each head size and mask: forward solid, backward dashed."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    import matplotlib.pyplot as plt

    dense = [point for point in points if point["section"] in ("forward", "backward")]
    found = {(point["case"]["size"], point["case"]["mask"]) for point in dense}
    panels = sorted(found, key=lambda panel: (panel[0], panel[1] == "causal"))
    columns = max(1, len({mask for _, mask in panels}))
    height = max(1, -(-len(panels) // columns))
    figure, axes = plt.subplots(height, columns, figsize=(4.5 * columns, 3.2 * height), sharey=True, squeeze=False)
    cublas = [point["tflops"]["cublas"] for point in points if point["section"] == "matmul" and point["ms"]]
    for axis, (size, mask) in zip(axes.flat, panels, strict=False):
        for direction, line in (("forward", "-"), ("backward", "--")):
            own = [p for p in dense if (p["section"], p["case"]["size"], p["case"]["mask"]) == (direction, size, mask)]
            draw_lines(axis, own, direction, line)
        if cublas:
            axis.axhline(cublas[-1], color="0.6", linewidth=1, label="cuBLAS")
        axis.set_title(f"head size {size}, {mask}", fontsize=10)
        lengths = sorted({point["case"]["length"] for point in dense})
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axis.grid(color="0.92")
    for axis in axes[-1]:
        axis.set_xlabel("sequence length")
    for axis in axes[:, 0]:
        axis.set_ylabel("TFLOP/s")
        axis.set_ylim(bottom=0)
    labels = dict(zip(*reversed(axes[0, 0].get_legend_handles_labels()), strict=True))
    figure.legend(labels.values(), labels.keys(), loc="lower center", ncols=4, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw_lines(axis: Any, points: list[Point], direction: str, line: str) -> None:
    """One line a contestant."""
    colors = {"ours": "tab:red", "cudnn": "tab:blue", "flash": "tab:green"}
    for name, color in colors.items():
        rates = sorted((p["case"]["length"], p["tflops"][name]) for p in points if name in p["tflops"])
        if rates:
            axis.plot(
                *zip(*rates, strict=True), line, color=color, marker="o", markersize=3, label=f"{name} {direction}"
            )


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
