"""What an ordinary call from Python costs, without torch.compile and CUDA graphs: host time and wall time.

    python benchmarks/eager.py --out benchmarks/results/eager.jsonl

Host time is how long a call takes until it returns to Python, with the GPU's queue nearly empty; wall time is that of
one call among many in a row. bf16 on a GPU. Contestants of a row take turns in one process; a point is the median over
rounds. Points are appended as they come; a run that is started again leaves out those its file has of the same commit
and device. At the end the table says of each figure whether it reaches its bar.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))  # where the package is not installed
from kernel_errors import part_errors
from kernel_peers import PLAIN, plain, sdpa
from kernel_report import Mark, Point
from kernel_rows import WORKS, threshold_arguments
from kernel_sentences import decode_trial, short_trial
from kernel_setup import TINY, Bench, Case, Row, Scale, Trial, enter
from kernel_timing import Work, both_work, forward_work, host_us, wall_us
from running import add_options, describe_run, measure_rows
from turns import ROUNDS, measure_in_turns, write_table

from rectiformer import VARIANTS, MultiheadAttention, RectifiedAttention, attention

Shape = tuple[int, int, int, int, bool]  # B, H, N, D, causal
SHAPES: tuple[Shape, ...] = (
    (8, 8, 128, 64, False),  # the first is where host time is measured: the device is never what is waited for
    (8, 8, 512, 64, True),
    (4, 16, 2048, 128, False),
    (4, 16, 2048, 128, True),
    (8, 16, 1024, 64, False),
    (8, 16, 1024, 64, True),
    (1, 16, 4096, 64, False),
    (1, 16, 8192, 64, False),
)
TINY_SHAPES: tuple[Shape, ...] = ((2, 2, 16, 16, False), (2, 2, 32, 16, True))
METERS = {"host": host_us, "wall": wall_us}
HOST_BARS = {"forward": 45.0, "forward+backward": 220.0}  # microseconds
DIRECTIONS = ("forward", "forward+backward")
MODULES = (
    (RectifiedAttention, "rela-g"),
    (RectifiedAttention, "rela"),
    (RectifiedAttention, "softmax"),
    (MultiheadAttention, "rela-g"),
)


def is_tiny(bench: Bench) -> bool:
    return bench.scale is TINY


def meter(bench: Bench, clock: str) -> Callable[[Work], float]:
    """Microseconds of one round, by one of `METERS`."""
    return partial(METERS[clock], device=bench.device, milliseconds=bench.milliseconds / ROUNDS)


def attention_rows(bench: Bench) -> Iterator[Row]:
    """The function itself vs. SDPA, with the backend it picks, and vs. plain torch."""
    shapes = TINY_SHAPES if is_tiny(bench) else SHAPES
    for variant in PLAIN:
        if variant not in VARIANTS:
            print(f"attention: {variant}: left out: the table has no such variant", flush=True)
            continue
        for clock, shape, direction in product(METERS, shapes, DIRECTIONS):
            if clock == "host" and shape != shapes[0]:
                continue
            B, H, N, D, causal = shape
            case = {"variant": variant, "time": clock, "pass": direction, "mask": "causal" if causal else "full"}
            case |= {"batch": B, "heads": H, "length": N, "size": D}
            yield Row("attention", case, partial(attention_trial, bench, variant, clock, direction, shape))


def attention_trial(bench: Bench, variant: str, clock: str, direction: str, shape: Shape) -> Trial:
    *sizes, causal = shape
    tensors = [bench.draw(*sizes, seed=seed) for seed in range(4)]
    arguments: Case = threshold_arguments() if variant == "threshold" else {}
    arguments["causal"] = causal

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, variant, **arguments)

    peers = {"sdpa": lambda: sdpa("sdpa", is_causal=causal), "plain": lambda: plain(variant, causal)}
    checked = direction.removeprefix("forward+")
    return Trial(
        enter(WORKS[direction], tensors, ours=lambda: ours, **peers),
        meter(bench, clock),
        unit="us",
        checks={"ours": lambda: part_errors(ours, tensors, checked, variant, **arguments)},
    )


def module_rows(bench: Bench) -> Iterator[Row]:
    """Modules in training vs. torch.nn.MultiheadAttention."""
    for (build, variant), direction in product(MODULES, DIRECTIONS):
        case = {"module": build.__name__, "variant": variant, "time": "wall", "pass": direction}
        yield Row("module", case, partial(module_trial, bench, build, variant, direction))


def module_trial(bench: Bench, build: type[nn.Module], variant: str, direction: str) -> Trial:
    B, N, E, H = (2, 8, 32, 2) if is_tiny(bench) else (16, 128, 512, 8)
    x, upstream = (bench.draw(B, N, E, seed=seed) for seed in range(2))
    settings = {"batch_first": True} if issubclass(build, nn.MultiheadAttention) else {}

    def prepare(module: nn.Module) -> Work:
        module = module.to(bench.device, bench.dtype).train()
        one = isinstance(module, RectifiedAttention)
        call = module if one else lambda x: module(x, x, x, need_weights=False)[0]
        if direction == "forward":
            return lambda: call(x)  # with a graph for the backward pass, as in training
        return both_work(lambda x, *_: call(x), [x, *module.parameters(), upstream])

    contestants = {
        "ours": lambda: prepare(build(E, H, variant=variant, **settings)),
        "torch": lambda: prepare(nn.MultiheadAttention(E, H, batch_first=True)),
    }
    return Trial(contestants, meter(bench, "wall"), unit="us")


def packed_rows(bench: Bench) -> Iterator[Row]:
    """Packed sentences vs. padded ones and torch's own packed attention."""
    for kind in ("self", "causal", "cross"):
        case = {"attention": kind, "time": "wall", "pass": "forward+backward"}
        yield Row("packed", case, partial(packed_trial, bench, kind))


def packed_trial(bench: Bench, kind: str) -> Trial:
    return replace(short_trial(bench, kind, "python"), meter=meter(bench, "wall"), unit="us")


def decode_rows(bench: Bench) -> Iterator[Row]:
    """One query per row against a cache, vs. SDPA on the same cache."""
    scale = bench.scale
    heads, (sentences, beam), keys = scale.decode_heads[0], scale.decode_rows[1], scale.decode_keys[:2][-1]
    for clock in METERS:
        case = {"time": clock, "rows": sentences * beam, "beam": beam, "heads": heads[0], "keys": keys}
        yield Row("decode", case, partial(cached_trial, bench, clock, heads, sentences, beam, keys))


def cached_trial(bench: Bench, clock: str, heads: tuple[int, int, int], sentences: int, beam: int, keys: int) -> Trial:
    trial = decode_trial(bench, heads, sentences, beam, keys)
    measure = meter(bench, clock)  # of a step of all layers
    return replace(trial, meter=lambda work: measure(work) / bench.scale.layers, unit="us")


def norm_rows(bench: Bench) -> Iterator[Row]:
    """The gated norm of ReLA vs. torch's RMSNorm, which has no gate."""
    for direction in DIRECTIONS:
        yield Row("norm", {"time": "host", "pass": direction}, partial(norm_trial, bench, direction))


def norm_trial(bench: Bench, direction: str) -> Trial:
    from rectiformer.model.norms import EPSILON
    from rectiformer.ops.norm import rms_norm

    rows, width = (16, 32) if is_tiny(bench) else (2048, 512)
    z, upstream = (bench.draw(rows, width, seed=seed) for seed in range(2))
    gain, gate = (bench.draw(width, seed=seed) for seed in (2, 3))
    work = forward_work if direction == "forward" else both_work

    def torch_norm(z: Tensor, gain: Tensor) -> Tensor:
        return F.rms_norm(z, (width,), gain, EPSILON)

    entered = enter(work, [z, gain, gate, upstream], ours=lambda: partial(rms_norm, epsilon=EPSILON))
    entered |= enter(work, [z, gain, upstream], torch=lambda: torch_norm)
    return Trial(entered, meter(bench, "host"), unit="us")


def profile_rows(bench: Bench) -> Iterator[Row]:
    """Where the host time of one call goes: in the short kernels, and in the long ones."""
    for shape in (TINY_SHAPES if is_tiny(bench) else SHAPES)[:2]:
        case = {"variant": "rela", "time": "host", "length": shape[2]}
        yield Row("profile", case, partial(profile_trial, bench, "rela", shape))


def profile_trial(bench: Bench, variant: str, shape: Shape) -> Trial:
    from rectiformer.ops.attention import check_call, choose, find_plan

    *sizes, causal = shape
    tensors = [bench.draw(*sizes, seed=seed) for seed in range(4)]
    inputs, d_out = tensors[:3], tensors[3]

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, variant, causal=causal)

    def choosing() -> Work:
        call = check_call(*inputs, variant, causal=causal)
        return lambda: choose(*inputs, call, "auto")

    def planned(direction: str) -> Work:
        """The launches of one direction, without autograd."""
        plan = find_plan(*inputs, check_call(*inputs, variant, causal=causal), "auto")
        if plan is None:
            raise RuntimeError("the call has no plan on this device")
        held = [tensor.detach() for tensor in inputs]
        return partial(plan.forward, held) if direction == "forward" else partial(plan.backward, d_out.detach(), held)

    pieces: dict[str, Callable[[], Work]] = {
        "check_call": lambda: lambda: check_call(*inputs, variant, causal=causal),
        "choose": choosing,
        "forward of the plan": lambda: planned("forward"),
        "backward of the plan": lambda: planned("backward"),
        "call, no_grad": lambda: forward_work(ours, tensors),
        "call, with grad": lambda: lambda: ours(*inputs),
        "backward": lambda: WORKS["backward"](ours, tensors),
        "call, with grad, and backward": lambda: both_work(ours, tensors),
    }
    return Trial(pieces, meter(bench, "host"), unit="us")


SECTIONS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "attention": attention_rows,
    "module": module_rows,
    "packed": packed_rows,
    "decode": decode_rows,
    "norm": norm_rows,
    "profile": profile_rows,
}


def bar_of(point: Point, peer: str) -> float | None:
    """What the ratio to a peer has to reach, where anything was asked for."""
    section, case = point["section"], point["case"]
    if section == "module":
        return 1.0 if case["variant"] == "rela-g" else None
    if section == "packed":
        return 1.0 if peer == "padded sdpa" else None
    if section != "attention" or case["time"] != "wall":
        return None
    if peer == "plain":
        return 1.0
    if case["length"] >= 4096:
        return 1.1
    return 1.0 if case["length"] == 2048 and case["pass"] == "forward+backward" else None


def judge(point: Point) -> Iterator[Mark]:
    """The ratios of a point, and the host time itself, with their bars."""
    if point["section"] == "profile":
        yield from (Mark(f"{piece}, us", microseconds) for piece, microseconds in point["us"].items())
    if point["section"] == "attention" and point["case"]["time"] == "host":
        yield Mark("host time, us", point["us"]["ours"], HOST_BARS[point["case"]["pass"]], at_most=True)
    yield from (Mark(peer, ratio, bar_of(point, peer)) for peer, ratio in point.get("ratios", {}).items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, SECTIONS, milliseconds=200, seconds=600)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    bench = Bench(options.device, TINY if options.tiny else Scale(), options.milliseconds)
    gc.freeze()  # what was imported need not be looked at after every row
    rows = [row for section in options.sections for row in SECTIONS[section](bench)]
    points = measure_rows(rows, measure_in_turns, describe_run("eager", options.device), options, end)
    print(write_table(points, judge))


if __name__ == "__main__":
    main()
