"""Time every attention variant compared with PyTorch's SDPA on this CPU, forward and forward+backward.

Each contender is first checked against the float64 reference, output and gradients, by the rule of tests/closeness.py;
only what passes is timed. Contender and SDPA take turns, so a ratio is the median over turns of two neighboring times.
Prints tables of SDPA's time over ours (above 1: ours is faster) and appends one JSON line per point to --out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would print two lines per point
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from closeness import assert_no_worse, grid, peak_allocation
from points import add_result_options, describe_machine

from rectiformer import VARIANTS, attention
from rectiformer.ops.attention import check_call, choose
from rectiformer.ops.reference import reference_attention

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PASSES = ("forward", "forward+backward")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """One point of the grid: the number of tokens stays the same while sequences grow longer."""

    dtype: str
    causal: bool
    length: int
    batch: int
    heads: int
    size: int


@dataclass(frozen=True)
class Contender:
    """Something to time: a variant as the library runs it, or a peer's implementation of one."""

    name: str
    variant: str
    attend: Attend
    implementation: str
    widest: int  # bytes of scores and the like that it holds per cell
    peer: bool = False


def contenders(shape: Shape, names: list[str]) -> Iterator[Contender]:
    """The chosen variants, then the entmax package's two maps on plain scores."""
    q = torch.empty(1, 1, 1, shape.size)
    for name in names:
        call = check_call(q, q, q, name, causal=shape.causal)
        implementation = choose(q, q, q, call, "auto")[0].name
        widest = 40 * shape.size if not call.variant.has_weights else 40 if implementation == "reference" else 0
        yield Contender(
            name, name, lambda q, k, v, name=name: attention(q, k, v, name, causal=shape.causal), implementation, widest
        )
    import entmax

    for name, function in (("sparsemax", entmax.sparsemax), ("entmax15", entmax.entmax15)):
        if name in names:
            yield Contender(f"{name} (entmax)", name, plain_attention(function, shape), "entmax package", 60, peer=True)


def plain_attention(normalize: Callable[..., Tensor], shape: Shape) -> Attend:
    """A peer's map between two matrix products, in float32 as its users are advised to run it."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q.float() @ k.float().mT * shape.size**-0.5
        if shape.causal:
            future = torch.ones(shape.length, shape.length, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, -1e4)
        return (normalize(scores, dim=-1) @ v.float()).to(v.dtype)

    return attend


def run_pass(attend: Attend, tensors: list[Tensor], direction: str) -> list[Tensor]:
    """One measured call: the output, and with "forward+backward" the gradients of q, k and v."""
    *inputs, upstream = tensors
    if direction == "forward":
        with torch.no_grad():
            return [attend(*inputs)]
    out = attend(*inputs)
    return [out, *torch.autograd.grad(out, inputs, upstream)]


def check(contender: Contender, tensors: list[Tensor], shape: Shape) -> float:
    """Refuse a wrong answer; return the largest error of the output. One head stands for all: heads are independent."""
    dtype = DTYPES[shape.dtype]
    ours = [result[:1, :1].detach() for result in run_pass(contender.attend, tensors, "forward+backward")]

    def reference(precision: torch.dtype) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            call = check_call(q, k, v, contender.variant, causal=shape.causal)
            return reference_attention(q, k, v, call, precision=precision)

        return attend

    def first_head(dtype: torch.dtype) -> list[Tensor]:
        parts = [tensor[:1, :1].detach().to(dtype) for tensor in tensors]
        return [part.requires_grad_() for part in parts]

    exact = run_pass(reference(torch.float64), first_head(torch.float64), "forward+backward")
    eager = run_pass(reference(dtype), first_head(dtype), "forward+backward")
    for name, mine, plain, truth in zip(("out", "d_q", "d_k", "d_v"), ours, eager, exact, strict=True):
        assert_no_worse(f"{contender.name} {name}", mine, plain.detach(), truth.detach())
    return (ours[0].double() - exact[0]).abs().max().item()


def take_turns(ours: Callable[[], object], theirs: Callable[[], object], seconds: float) -> list[tuple[float, float]]:
    """Pairs of times in milliseconds, ours and theirs, until `seconds` have passed; at least three."""

    def timed(work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1e3

    ours(), theirs()
    pairs: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while len(pairs) < 3 or time.perf_counter() < end:
        pairs.append((timed(ours), timed(theirs)))
    return pairs


def spread(values: list[float]) -> dict[str, float]:
    p20, p50, p80 = torch.tensor(values).double().quantile(torch.tensor([0.2, 0.5, 0.8]).double()).tolist()
    return {"p20": round(p20, 4), "p50": round(p50, 4), "p80": round(p80, 4)}


def measure(contender: Contender, shape: Shape, tensors: list[Tensor], seconds: float) -> Iterator[dict]:
    """Check, then time both passes; one record each. A wrong answer of ours is an error, a peer's has no records."""
    try:
        error = check(contender, tensors, shape)
    except AssertionError as wrong:
        if not contender.peer:
            raise
        print(f"{contender.name} at {shape.length}: left out, {wrong}")
        return

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal)

    for direction in PASSES:
        pairs = take_turns(
            lambda: run_pass(contender.attend, tensors, direction),  # noqa: B023 called before the loop moves on
            lambda: run_pass(sdpa, tensors, direction),  # noqa: B023
            seconds,
        )
        held = peak_allocation(lambda: run_pass(contender.attend, tensors, direction))  # noqa: B023
        results = tensors[0].nbytes * (1 if direction == "forward" else 4)
        yield {
            "name": contender.name,
            "implementation": contender.implementation,
            "pass": direction,
            **asdict(shape),
            "ms": spread([ours for ours, _ in pairs]),
            "sdpa_ms": spread([theirs for _, theirs in pairs]),
            "ratio": spread([theirs / ours for ours, theirs in pairs]),
            "turns": len(pairs),
            "extra_mib": round((held - results) / 2**20, 2),
            "error": error,
        }


def show(console: Console, records: list[dict], lengths: list[int]) -> None:
    """One table for each dtype, mask and pass: SDPA's time over ours, and its spread over turns."""
    keys = dict.fromkeys((r["dtype"], r["causal"], r["pass"]) for r in records)
    for dtype, causal, direction in keys:
        table = Table(title=f"{dtype}, {'causal' if causal else 'full'}, {direction}: SDPA's time / ours (p20-p80)")
        table.add_column("attention", no_wrap=True)
        for length in lengths:
            table.add_column(str(length), justify="right")
        chosen = [r for r in records if (r["dtype"], r["causal"], r["pass"]) == (dtype, causal, direction)]
        for name in dict.fromkeys(r["name"] for r in chosen):
            cells = {r["length"]: r["ratio"] for r in chosen if r["name"] == name}
            table.add_row(name, *(cell(cells.get(length)) for length in lengths))
        console.print(table)


def cell(ratio: dict | None) -> str:
    return "-" if ratio is None else f"{ratio['p50']:.2f} ({ratio['p20']:.2f}-{ratio['p80']:.2f})"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--lengths", nargs="+", type=int, default=[32, 128, 512, 1024, 2048, 4096])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--masks", nargs="+", choices=["full", "causal"], default=["full"])
    parser.add_argument("--tokens", type=int, default=4096, help="tokens in a batch; longer sequences, fewer of them")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--size", type=int, default=64, help="size of a head")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long to take turns at one point")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory", type=float, default=6.0, help="GiB above which a contender is left out")
    add_result_options(parser, Path("benchmarks/results/attention-cpu.jsonl"))
    return parser.parse_args()


def shapes(options: argparse.Namespace) -> Iterator[Shape]:
    for dtype in options.dtypes:
        for mask in options.masks:
            for length in options.lengths:
                batch = max(1, options.tokens // length)
                yield Shape(dtype, mask == "causal", length, batch, options.heads, options.size)


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    console = Console(highlight=False)
    records: list[dict] = []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    setting = describe_machine()
    for shape in shapes(options):
        axes = (shape.batch, shape.heads, shape.length, shape.size)
        tensors = [grid(*axes, seed=seed, dtype=DTYPES[shape.dtype]).requires_grad_() for seed in range(4)]
        for contender in contenders(shape, options.variants):
            need = contender.widest * shape.batch * shape.heads * shape.length**2 / 2**30
            if need > options.memory:
                console.print(f"{contender.name} at {shape.length}: left out, would hold about {need:.3g} GiB")
                continue
            for record in measure(contender, shape, tensors, options.seconds):
                records.append({**record, **setting})
                with options.out.open("a") as file:
                    file.write(json.dumps(records[-1]) + "\n")
                mask = "causal" if shape.causal else "full"
                point = f"{shape.dtype} {mask} {shape.length} {record['pass']} {contender.name}"
                console.print(f"{point}: {cell(record['ratio'])}")
    show(console, records, options.lengths)


if __name__ == "__main__":
    main()
