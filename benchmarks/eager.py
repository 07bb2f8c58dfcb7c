"""What an ordinary call from Python costs: eager mode, no CUDA graph, no torch.compile.

    python benchmarks/eager.py --out benchmarks/results/eager.jsonl

Every row has a peer: SDPA and three lines of plain torch for `attention`, `torch.nn.MultiheadAttention` for the module,
padded SDPA for packed sentences, SDPA over the same cache for decoding. Contestants take turns in one process; a number
is the median over turns, in microseconds. "Host" is how long Python is busy with a call, "wall" the time per call when
many follow each other and the device is waited for at the end. A run that is started again leaves out the rows that its
file has of the same commit and device.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))  # where the package is not installed
from kernel_timing import Work, both_work, forward_work
from points import append_point, describe_machine

from rectiformer import VARIANTS, MultiheadAttention, RectifiedAttention, attention, attention_varlen, decode_attention
from rectiformer.ops.norm import rms_norm

VARIANT_NAMES = ("rela", "relu2", "sigmoid", "threshold")
SHAPES = [  # B, H, N, D, causal: those of a sentence, a paragraph, a page and a document
    (1, 8, 128, 64, False),
    (8, 8, 128, 64, False),
    (8, 8, 512, 64, True),
    (8, 16, 1024, 64, False),
    (8, 16, 1024, 64, True),
    (4, 16, 2048, 128, False),
    (4, 16, 2048, 128, True),
    (1, 16, 4096, 64, False),
    (1, 16, 8192, 64, False),
]
TINY_SHAPES = [(1, 2, 8, 16, False), (1, 2, 8, 16, True)]
HOST_BARS = {"forward": 45.0, "both": 220.0}
"""Microseconds of the host, where the device does almost nothing."""


@dataclass
class Row:
    """One comparison: what each contestant runs, and what ours has to reach."""

    section: str
    case: dict[str, object]
    contestants: dict[str, Callable[[], Work]]
    bars: dict[str, float] = field(default_factory=dict)
    """Least ratio of a peer's wall time to ours."""


@dataclass
class Bench:
    device: str
    tiny: bool
    turns: int

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16, requires_grad=True)

    def lower_triangle(self, size: int) -> Tensor:
        return torch.ones(size, size, dtype=torch.bool, device=self.device).tril()


def plain_weights(variant: str, scores: Tensor) -> Tensor:
    """What a user would write instead, for whole rows of scores."""
    n = scores.shape[-1]
    if variant == "sigmoid":
        return torch.sigmoid(scores - torch.log(torch.tensor(n, dtype=torch.float32)).item())
    if variant == "threshold":
        return torch.relu(scores - (2 * torch.log(torch.tensor(n, dtype=torch.float32)).item()) ** 0.5).square()
    return torch.relu(scores).square() / n if variant == "relu2" else torch.relu(scores)


def attention_rows(bench: Bench) -> Iterator[Row]:
    for B, H, N, D, causal in TINY_SHAPES if bench.tiny else SHAPES:
        tensors = [bench.draw(B, H, N, D) for _ in range(4)]
        mask = bench.lower_triangle(N) if causal else None
        for variant in [name for name in VARIANT_NAMES if name in VARIANTS]:

            def ours(q, k, v, variant=variant, causal=causal):
                return attention(q, k, v, variant, causal=causal)

            def plain(q, k, v, variant=variant, mask=mask, D=D):
                weights = plain_weights(variant, q @ k.mT * D**-0.5)
                return (weights if mask is None else weights.masked_fill(~mask, 0)) @ v

            def sdpa(q, k, v, causal=causal):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

            for direction, work in (("forward", forward_work), ("both", both_work)):
                case = {"variant": variant, "B": B, "H": H, "N": N, "D": D, "causal": causal, "direction": direction}
                bars = {"plain": 1.0}
                if direction == "both" and (N, D) == (2048, 128):
                    bars["sdpa"] = 1.0
                if N >= 4096:
                    bars["sdpa"] = 1.1
                named = {"ours": ours, "sdpa": sdpa, "plain": plain}
                prepared = {name: lambda f=f, w=work, t=tensors: w(f, t) for name, f in named.items()}
                yield Row("attention", case, prepared, bars)


def module_rows(bench: Bench) -> Iterator[Row]:
    B, N, E, heads = (2, 4, 32, 2) if bench.tiny else (16, 128, 512, 8)
    x, upstream = bench.draw(B, N, E), bench.draw(B, N, E)
    modules: dict[str, torch.nn.Module] = {
        "torch": torch.nn.MultiheadAttention(E, heads, batch_first=True),
        "ours": RectifiedAttention(E, heads, "rela-g"),
        "ours rela": RectifiedAttention(E, heads, "rela"),
        "ours softmax": RectifiedAttention(E, heads, "softmax"),
        "ours drop-in": MultiheadAttention(E, heads, batch_first=True, variant="rela-g"),
    }
    for direction in ("forward", "both"):
        prepared = {
            name: lambda m=module, d=direction: module_work(m.to(bench.device, torch.bfloat16), d, x, upstream)
            for name, module in modules.items()
        }
        yield Row("module", {"B": B, "N": N, "E": E, "heads": heads, "direction": direction}, prepared, {"torch": 1.0})


def module_work(module: torch.nn.Module, direction: str, x: Tensor, upstream: Tensor) -> Work:
    def run() -> Tensor:
        if isinstance(module, RectifiedAttention):
            return module(x)
        return module(x, x, x, need_weights=False)[0]

    if direction == "forward":
        return forward_work(lambda _: run(), [x, upstream])
    leaves = [x, *module.parameters()]
    return lambda: torch.autograd.grad(run(), leaves, upstream)


def packed_rows(bench: Bench) -> Iterator[Row]:
    """Sentences of 8 to 128 tokens end to end, 25k tokens in all, and the same padded."""
    count, most, heads, D = (3, 16, 2, 16) if bench.tiny else (370, 128, 8, 64)
    generator = torch.Generator().manual_seed(1)
    for kind in ("self", "causal", "cross"):
        lengths = [torch.randint(min(8, most), most + 1, (count,), generator=generator) for _ in range(2)]
        lengths[1] = lengths[1] if kind == "cross" else lengths[0]
        bounds = [
            torch.cat([torch.zeros(1, dtype=torch.long), each.cumsum(0)]).to(bench.device, torch.int32)
            for each in lengths
        ]
        totals = [int(each[-1]) for each in (bounds[0], bounds[1], bounds[1], bounds[0])]
        tensors = [bench.draw(total, heads, D) for total in totals]
        padded = [bench.draw(count, heads, most, D) for _ in range(4)]
        real = (torch.arange(most, device=bench.device) < lengths[1].to(bench.device)[:, None])[:, None, None]
        mask = real & bench.lower_triangle(most) if kind == "causal" else real

        def ours(q, k, v, bounds=bounds, causal=kind == "causal", most=most):
            return attention_varlen(q, k, v, *bounds, causal=causal, max_seqlen_q=most, max_seqlen_k=most)

        def padded_sdpa(q, k, v, mask=mask):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

        for direction, work in (("forward", forward_work), ("both", both_work)):
            prepared = {
                "ours": lambda f=ours, w=work, t=tensors: w(f, t),
                "padded sdpa": lambda f=padded_sdpa, w=work, t=padded: w(f, t),
            }
            bars = {"padded sdpa": 1.0} if direction == "both" else {}
            yield Row("packed", {"attention": kind, "sequences": count, "direction": direction}, prepared, bars)


def step_rows(bench: Bench) -> Iterator[Row]:
    """One decoding step: over a cache of fixed length, and over keys that grow by one from call to call."""
    B, H, N, D = (1, 2, 8, 16) if bench.tiny else (8, 8, 512, 64)
    q, k, v = (bench.draw(B, H, n, D).detach() for n in (1, N + 300, N + 300))
    lengths = torch.full((B,), N, device=bench.device)
    fixed, lengthened = [k[:, :, :N].contiguous(), v[:, :, :N].contiguous()], iter(range(10**9))

    def grown(attend: Callable[..., Tensor]) -> Work:
        def work() -> Tensor:
            keys = N + next(lengthened) % 300
            with torch.no_grad():
                return attend(q, k[:, :, :keys], v[:, :, :keys])

        return work

    def quiet(attend: Callable[[], Tensor]) -> Work:
        def work() -> Tensor:
            with torch.no_grad():
                return attend()

        return work

    sdpa = F.scaled_dot_product_attention
    yield Row(
        "step", {"B": B, "H": H, "keys": N, "cache": "fixed"},
        {
            "ours": lambda: quiet(lambda: decode_attention(q, *fixed, key_lengths=lengths)),
            "sdpa": lambda: quiet(lambda: sdpa(q, *fixed)),
        },
    )  # fmt: skip
    contestants = {"ours": lambda: grown(attention), "sdpa": lambda: grown(sdpa)}
    yield Row("step", {"B": B, "H": H, "keys": N, "cache": "growing"}, contestants)


def norm_rows(bench: Bench) -> Iterator[Row]:
    rows, width = (4, 32) if bench.tiny else (2048, 512)
    tensors = [bench.draw(rows, width), bench.draw(width), bench.draw(width), bench.draw(rows, width)]
    for direction, work in (("forward", forward_work), ("both", both_work)):
        prepared = {
            "ours": lambda w=work: w(lambda z, gain, gate: rms_norm(z, gain, gate, 1e-8), tensors),
            "torch, no gate": lambda w=work: w(
                lambda z, gain: F.rms_norm(z, (width,), gain), [tensors[0], tensors[1], tensors[3]]
            ),
        }
        yield Row("norm", {"rows": rows, "width": width, "direction": direction}, prepared)


SECTIONS = {
    "attention": attention_rows,
    "module": module_rows,
    "packed": packed_rows,
    "step": step_rows,
    "norm": norm_rows,
}


def measure(row: Row, bench: Bench) -> dict[str, object]:
    """Host and wall microseconds of each contestant, the median over turns."""
    works = {name: prepare() for name, prepare in row.contestants.items()}
    calls = {name: count_calls(work, bench) for name, work in works.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(bench.turns):
        for name, work in works.items():
            times[name].append(time_turn(work, calls[name], bench))
    point: dict[str, object] = {"benchmark": "eager", "section": row.section, "case": row.case}
    for index, kind in enumerate(("host_us", "wall_us")):
        point[kind] = {name: statistics.median(turn[index] for turn in turns) for name, turns in times.items()}
    return point


def synchronize(bench: Bench) -> None:
    if bench.device == "cuda":
        torch.cuda.synchronize()


def count_calls(work: Work, bench: Bench) -> int:
    """Calls of one turn: about 10 ms, and few enough that the host never waits for a place in the device's queue."""
    for _ in range(3):
        work()
    synchronize(bench)
    _, wall = time_turn(work, 3, bench)
    return 2 if bench.tiny else max(4, min(100, int(10_000 / wall)))


def time_turn(work: Work, calls: int, bench: Bench) -> tuple[float, float]:
    synchronize(bench)
    start = time.perf_counter()
    for _ in range(calls):
        work()
    host = time.perf_counter() - start
    synchronize(bench)
    return host / calls * 1e6, (time.perf_counter() - start) / calls * 1e6


def describe_case(point: dict) -> str:
    return " ".join([point["section"], *(f"{name} {value}" for name, value in point["case"].items())])


def write_line(point: dict, bars: dict[str, float]) -> str:
    """A row of the table: ours and every peer, host / wall, and whether the bars are reached."""
    ours = point["wall_us"]["ours"]
    cells = [f"{name} {point['host_us'][name]:.0f} / {wall:.0f}" for name, wall in point["wall_us"].items()]
    verdicts = []
    for peer, least in bars.items():
        ratio = point["wall_us"][peer] / ours
        verdicts.append(f"{ratio:.2f}x {peer} ({'reached' if ratio >= least else 'MISSED'}: {least:g}x)")
    case = point["case"]
    if point["section"] == "attention" and case["N"] <= 128:
        most = HOST_BARS[case["direction"]]
        host = point["host_us"]["ours"]
        verdicts.append(f"host {host:.0f} us ({'reached' if host <= most else 'MISSED'}: {most:g} us)")
    return f"{describe_case(point)}: {', '.join(cells)}; {'; '.join(verdicts)}"


def read_points(path: Path | None) -> list[dict]:
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=300, help="stop before so many have passed")
    parser.add_argument("--turns", type=int, default=15, help="how often each contestant is timed")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="sizes to try the script with")
    parser.add_argument("--out", type=Path, default=None, help="JSON lines to append to")
    options = parser.parse_args()
    bench, end = Bench(options.device, options.tiny, 2 if options.tiny else options.turns), time.monotonic()
    end += options.seconds
    setting = describe_machine(options.device)
    gc.freeze()  # what was imported need not be looked at again
    known = {
        json.dumps([point["section"], point["case"]])
        for point in read_points(options.out)
        if (point["commit"], point["device"]) == (setting["commit"], setting["device"])
    }
    for row in (row for section in options.sections for row in SECTIONS[section](bench)):
        if json.dumps([row.section, row.case]) in known:
            continue
        if time.monotonic() > end:
            print(f"{options.seconds:g} seconds are over; the rest is left", flush=True)
            break
        point = {**measure(row, bench), **setting}
        append_point(options.out, point)
        print(write_line(point, row.bars), flush=True)


if __name__ == "__main__":
    main()
