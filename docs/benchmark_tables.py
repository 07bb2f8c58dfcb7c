"""The tables of attention in docs/benchmarks.md, from the points in benchmarks/results."""

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

Point = dict[str, Any]
RESULTS = Path(__file__).parents[1] / "benchmarks/results"
PASSES = ("forward", "forward+backward")
TARGETS = {"long": 1.2, "forward": 1.05, "backward": 1.0, "short": 2.0, "sigmoid": 1.0, "threshold": 2.0}


def read_points(file: str, section: str, **case: object) -> list[Point]:
    """Points of a section whose case says all of this, the latest of each case."""
    found: dict[str, Point] = {}
    for line in (RESULTS / f"{file}.jsonl").read_text(encoding="utf-8").splitlines():
        point = json.loads(line)
        if point["section"] == section and case.items() <= point["case"].items():
            found[json.dumps(point["case"])] = point
    return list(found.values())


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], points: Sequence[Point]) -> str:
    """A table, and what was run to measure it."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
    runs = dict.fromkeys(f"Commit {point['commit']}, `{point['command']}`." for point in points)
    return "\n".join([*lines, "", *runs])


def number(value: float) -> str:
    """Three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def speedup(ratio: float, target: float | None = None) -> str:
    """The ratio, marked where it misses its target."""
    shown = f"{ratio:.2f}x"
    return shown if target is None or ratio >= target else f"{shown} (missed)"


def shape_of(case: Point) -> str:
    order = ", causal" if case["mask"] == "causal" else ""
    return f"{case['batch']} x {case['heads']} x {case['length']:,} x {case['size']}{order}"


def eager_table(time: str, direction: str) -> str:
    """One row per shape, one column per variant: our time and SDPA's divided by it."""
    points = read_points("eager-h200", "attention", time=time, **{"pass": direction})
    variants = list(dict.fromkeys(point["case"]["variant"] for point in points))
    shapes = list(dict.fromkeys(shape_of(point["case"]) for point in points))
    by_cell = {(shape_of(point["case"]), point["case"]["variant"]): point for point in points}

    def cell(point: Point | None) -> str:
        return "" if point is None else f"{number(point['us']['ours'])} ({point['ratios']['sdpa']:.2f}x)"

    def row(shape: str) -> list[str]:
        own = [by_cell.get((shape, variant)) for variant in variants]
        least = min(point["ratios"]["plain"] for point in own if point)
        return [shape, *map(cell, own), f"{least:.1f}x"]

    header = ["batch x heads x length x head size", *(f"`{variant}`" for variant in variants), "least vs. plain torch"]
    return markdown(header, map(row, shapes), points)


def module_table() -> str:
    """Modules in training vs. torch's, both passes."""
    points = read_points("eager-h200", "module")
    found = {(point["case"]["module"], point["case"]["variant"], point["case"]["pass"]): point for point in points}

    def row(module: str, variant: str) -> list[str]:
        cells = [f"`{module}`, `{variant}`"]
        for way in PASSES:
            us, ratio = (found[module, variant, way][key] for key in ("us", "ratios"))
            target = 1.0 if variant == "rela-g" else None
            cells += [number(us["ours"]), number(us["torch"]), speedup(ratio["torch"], target)]
        return cells

    header = [
        "module",
        *(f"{way}: {what}" for way in ("forward", "both") for what in ("ours, us", "torch's", "speedup")),
    ]
    return markdown(header, [row(*key) for key in dict.fromkeys(key[:2] for key in found)], points)


def packed_eager_table() -> str:
    """Packed sentences launched one by one, vs. the padded batch and torch's packed attention."""
    points = read_points("eager-h200", "packed")

    def row(point: Point) -> list[str]:
        us = point["us"]
        padded = min(us["padded sdpa"], us["padded cudnn"])
        times = [number(each) for each in (us["ours"], us["varlen"], padded)]
        return [point["case"]["attention"], *times, speedup(padded / us["ours"], 1.0)]

    return markdown(["attention", "ours, us", "torch's varlen", "padded SDPA", "speedup"], map(row, points), points)


def huggingface_table() -> str:
    points = [p for task in ("train", "generate") for p in read_points("huggingface-h200", task)]
    works = {"train": "training step", "generate": "64 generated tokens"}

    def row(point: Point) -> list[str]:
        case, ms = point["case"], point["ms"]
        target = 0.97 if case["text"] == "short" else 1.0
        model = {"llama": "Llama-like", "bert": "BERT-like"}[case["model"]]
        what = [f"{model}, {works[case['task']]}", f"{case['batch']} x {case['length']:,}"]
        return [*what, number(ms["ours"]), number(ms["sdpa"]), speedup(point["ratios"]["sdpa"], target)]

    header = ["model and task", "batch x tokens", "ours, ms", "`sdpa`, ms", "speedup"]
    return markdown(header, map(row, points), points)


def dense_table(direction: str) -> str:
    points = read_points("kernels-h200", direction)

    def row(point: Point) -> list[str]:
        case, ms, ratio = point["case"], point["ms"], point["ratios"]["cudnn"]
        target = TARGETS["long"] if direction == "forward" and case["length"] >= 4096 else TARGETS[direction]
        where = [case["mask"], str(case["size"]), f"{case['length']:,}"]
        return [*where, number(ms["ours"]), number(ms["cudnn"]), number(ms["flash"]), speedup(ratio, target)]

    header = ["mask", "D", "N", "ours, ms", "cuDNN, ms", "flash, ms", "vs. cuDNN"]
    return markdown(header, map(row, points), points)


def packed_table() -> str:
    points = read_points("kernels-h200", "short", launch="graph")

    def row(point: Point) -> list[str]:
        ms = point["ms"]
        padded = min(ms["padded sdpa"], ms["padded cudnn"])
        times = [number(each) for each in (ms["ours"], ms["varlen"], padded)]
        return [point["case"]["attention"], *times, speedup(padded / ms["ours"], TARGETS["short"])]

    header = ["attention", "ours, ms", "torch's varlen, ms", "padded SDPA, ms", "speedup"]
    return markdown(header, map(row, points), points)


def decode_table() -> str:
    """Dense and sparse scores vs. the best of SDPA."""
    points = read_points("kernels-h200", "decode")

    def row(point: Point) -> list[str]:
        case, ms = point["case"], point["ms"]
        best = min(ms["sdpa"], ms["cudnn"])
        heads = f"{case['heads']} of {case['size']}"
        grouped = heads if case["key_heads"] == case["heads"] else f"{heads}, {case['key_heads']} key heads"
        rows = f"{case['rows']}" if case["beam"] == 1 else f"{case['rows']}, beam {case['beam']}"
        times = [f"{1000 * value:.1f}" for value in (ms["ours"], ms["ours sparse"], best)]
        sparse = speedup(best / ms["ours sparse"], 1.3 if case["keys"] >= 2048 else None)
        return [grouped, rows, f"{case['keys']:,}", *times, speedup(best / ms["ours"], 1.0), sparse]

    header = ["heads", "rows", "cached keys", "dense, us", "sparse, us", "SDPA, us", "vs. SDPA, dense", "sparse"]
    return markdown(header, map(row, points), points)


def pointwise_table() -> str:
    points = [p for section in ("sigmoid", "threshold") for p in read_points("kernels-pointwise-h200", section)]
    peers = {"sigmoid": "triton sigmoid", "threshold": "tda"}

    def row(point: Point) -> list[str]:
        section, case, ms = point["section"], point["case"], point["ms"]
        peer = peers[section]
        where = [case["pass"], case["mask"], str(case["size"]), f"{case['length']:,}"]
        target = TARGETS[section]
        return [f"`{section}`", *where, number(ms["ours"]), number(ms[peer]), speedup(point["ratios"][peer], target)]

    header = ["variant", "pass", "mask", "D", "N", "ours, ms", "published kernel, ms", "speedup"]
    return markdown(header, map(row, points), points)


def read_cpu_points(file: str, **case: object) -> list[Point]:
    """Points of benchmarks/attention.py of which all of this holds, the latest of each setting."""
    found: dict[tuple[object, ...], Point] = {}
    for line in (RESULTS / f"{file}.jsonl").read_text(encoding="utf-8").splitlines():
        point = json.loads(line)
        if case.items() <= point.items():
            found[tuple(point[key] for key in ("name", "pass", "dtype", "causal", "length"))] = point
    return list(found.values())


def cpu_table(file: str, **case: object) -> str:
    """SDPA's time divided by ours: one row per variant and pass, one column per length."""
    points = read_cpu_points(file, **case)
    lengths = sorted({point["length"] for point in points})
    ratios = {(point["name"], point["pass"], point["length"]): point["ratio"]["p50"] for point in points}

    def row(name: str, way: str) -> list[str]:
        shown = name if "(" in name else f"`{name}`"
        cells = (ratios.get((name, way, length)) for length in lengths)
        return [shown, way, *("" if ratio is None else speedup(ratio) for ratio in cells)]

    rows = dict.fromkeys((point["name"], point["pass"]) for point in points)
    header = ["variant", "pass", *(f"{length:,}" for length in lengths)]
    return markdown(header, [row(*each) for each in rows], points)


def cpu_memory_table() -> str:
    """Main memory beyond inputs and results at the longest length, and what the scores alone would take."""
    points = read_cpu_points("attention-cpu", length=4096, causal=False)
    extra = {(point["name"], point["dtype"], point["pass"]): point["extra_mib"] for point in points}

    rows = {(p["name"], p["dtype"]): p["batch"] * p["heads"] * p["length"] ** 2 for p in points}

    def row(name: str, dtype: str) -> list[str]:
        scores = rows[name, dtype] * (4 if dtype == "fp32" else 2) / 2**20
        return [f"`{name}`", dtype, *(f"{extra[name, dtype, way]:.1f}" for way in PASSES), f"{scores:.0f}"]

    header = ["variant", "dtype", "forward, MiB", "forward+backward, MiB", "all scores, MiB"]
    return markdown(header, [row(*each) for each in rows], points)


TABLES: dict[str, Callable[[], str]] = {
    **{f"eager {time} {way}": lambda time=time, way=way: eager_table(time, way)
       for time, way in product(("host", "wall"), PASSES)},
    "eager modules": module_table,
    "eager packed": packed_eager_table,
    "huggingface": huggingface_table,
    "kernels forward": lambda: dense_table("forward"),
    "kernels backward": lambda: dense_table("backward"),
    "kernels packed": packed_table,
    "kernels decode": decode_table,
    "kernels pointwise": pointwise_table,
    **{f"cpu {dtype} {mask}": lambda dtype=dtype, mask=mask:
       cpu_table("attention-cpu", dtype=dtype, causal=mask == "causal")
       for dtype, mask in product(("fp32", "bf16"), ("full", "causal"))},
    "cpu memory": cpu_memory_table,
    "cpu all": lambda: cpu_table("attention-cpu-all"),
}  # fmt: skip
