"""Fused attention of short sequences as operators of torch: `rectiformer::short` and its backward.

One kernel each way, Triton only; one for each size of block where sequences are packed. Autograd keeps the inputs and
nothing else. Results lie in memory as [B, M, H, D], so that joining the heads afterwards moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rectiformer.ops.activations import RowScale
from rectiformer.ops.autograd import recall, remember
from rectiformer.ops.call import AttentionCall, Packing, Visibility
from rectiformer.ops.launching import block, heads_last, kernel_obstacle, row_scale_parts, table
from rectiformer.ops.reference import reference_attention
from rectiformer.ops.variants import VARIANTS

LARGEST = {torch.float32: 64, torch.bfloat16: 128, torch.float16: 128}
"""Most queries or keys, and largest head size: what one program can hold and, in float32, compile in seconds."""
BUCKETS = (32, 64, 128)
"""Packed sequences are as long as one of these at most."""
INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? factors, Tensor? key_lengths, Tensor? seed, Tensor? bounds_q, "
    "Tensor? bounds_k, float[] numbers, SymInt[] sizes"
)
"""What every operator on a `Problem` takes: its fields, as torch wants them named."""


def short_attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, packing: Packing | None = None) -> Tensor:
    """`reference_attention` for rectified rows and softmax of short sequences, as `LARGEST` says.

    With `packing`, of sequences that lie end to end in [1, H, total, D]; nothing is read on the host.
    """
    q, factors, numbers, sizes = flat_arguments(q, call)
    if packing is None:
        return short(q, k, v, factors, call.visibility.key_lengths, call.seed, None, None, numbers, sizes)
    assert packing.most_q is not None
    assert packing.most_k is not None
    sizes = [*sizes[:3], bucket(packing.most_q), bucket(packing.most_k)]
    return short(q, k, v, factors, None, call.seed, packing.bounds_q, packing.bounds_k, numbers, sizes)


def flat_arguments(q: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None, list[float], list[int]]:
    """Queries, factors of the heads, numbers and sizes as the operators take them."""
    if call.scale < 0:  # a positive scale leaves the ReLU, a negative one must not
        q, call = -q, replace(call, scale=-call.scale)
    exponent, factor, factors = row_scale_parts(q, call)
    seen = call.visibility
    sizes = [call.variant.power, seen.left, seen.right, seen.queries, seen.keys]
    return q, factors, [call.scale, call.dropout_p, exponent, factor], sizes


def rows_for_gradients(rows: int, keys: int) -> int:
    """Queries in a block of a backward pass that holds `keys` keys.

    With fewer than 64 beside 64 keys, the ptxas 12.8 of Triton 3.6 makes code that reads a register nobody wrote, and
    the gradient of the queries is wrong (docs/log.md; tests/machine_code.py looks for such code).
    """
    return max(rows, 64) if keys == 64 else rows


def bucket(length: int) -> int:
    """The smallest of `BUCKETS` that holds `length`: a few comparisons, so that a compiled caller stays as it is."""
    for size in BUCKETS:
        if length <= size:
            return size
    raise AssertionError(f"{length} is longer than any bucket")


def short_obstacle(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, packing: Packing | None = None) -> str:
    """Why these kernels cannot take this call; empty when they can."""
    obstacle = kernel_obstacle(q, k, v, call)
    if obstacle:
        return obstacle
    if call.counts_cells:
        return "it has no bias or mask"
    queries, keys = call.visibility.queries, call.visibility.keys
    if packing is not None:
        if packing.most_q is None or packing.most_k is None:
            return "it needs max_seqlen_q and max_seqlen_k"
        queries, keys = packing.most_q, packing.most_k
    elif call.dropout_p and call.origin != (0, 0):
        return "its dropout begins at the first query and key"
    if max(queries, keys, q.shape[3], v.shape[3]) > LARGEST[q.dtype]:
        return f"in {q.dtype} it takes up to {LARGEST[q.dtype]} queries and keys, and head sizes up to that"
    return ""


@dataclass(frozen=True)
class Problem:
    """What the kernels of one call are given besides results and their gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    factors: Tensor | None
    key_lengths: Tensor | None
    seed: Tensor | None
    bounds_q: Tensor | None
    bounds_k: Tensor | None
    numbers: Sequence[float]
    sizes: Sequence[int]

    def launch(
        self,
        kernel: Any,
        programs: int,
        strided: list[Tensor],
        flat: list[Tensor | None],
        room: dict[str, int],
    ) -> None:
        """Run `programs` of a kernel that takes tensors with strides, tensors without, this problem and a room."""
        q, D, Dv = self.q, self.q.shape[3], self.v.shape[3]
        strides = [stride for tensor in strided for stride in tensor.stride()]
        flat = [*flat, self.factors, self.key_lengths, self.seed]
        pointers = [table(tensor, q) for tensor in flat]
        with torch.cuda.device_of(q):  # Triton launches on the current device
            kernel[(programs,)](
                *strided,
                *pointers,
                *strides,
                *self.scalars(),
                **self.flags(),
                **room,
                BLOCK_D=block(D),
                BLOCK_DV=block(Dv),
                num_stages=2,
            )

    def scalars(self) -> list[float]:
        scale, dropout, exponent, factor = self.numbers
        power, left, right, M, N = self.sizes
        # All that scales a rectified weight is one number. A softmax is taken in base 2.
        gain = (factor * scale**power if power else 1.0) / (1 - dropout)
        threshold = round(dropout * 2**32) - 2**31
        H, D, Dv = self.q.shape[1], self.q.shape[3], self.v.shape[3]
        return [H, M, N, D, Dv, left, right, scale * math.log2(math.e), gain, exponent, threshold]

    def flags(self) -> dict[str, int]:
        power, left, right, M, N = self.sizes
        return {
            "POWER": power,
            "ROW_SCALE": {0.0: 0, 0.5: 1, 1.0: 2}.get(self.numbers[2], 3),
            "PER_HEAD": self.factors is not None,
            "BANDED": Visibility(M, N, left, right, first=N - M).banded,
            "RAGGED": self.key_lengths is not None,
            "DROPS": self.seed is not None and self.numbers[1] > 0,
            "GROUP": self.q.shape[1] // self.k.shape[1],
        }

    def rooms(self) -> Iterator[dict[str, int]]:
        """Blocks of each launch, and the packed sequences it does: those of over LEAST and up to MOST rows."""
        (M, N), packed = self.sizes[3:], self.bounds_q is not None
        least, most = 0, max(block(M), block(N))  # the same for all lengths of a block: each value is compiled anew
        if packed and most == 128:  # a launch of their own, so that short sequences cost no long block
            least = 64
            yield {"PACKED": True, "LEAST": 0, "MOST": 64, "ROWS": min(M, 64), "BLOCK_N": min(N, 64)}
        yield {"PACKED": packed, "LEAST": least, "MOST": most, "ROWS": block(M), "BLOCK_N": block(N)}

    def tune(self, room: dict[str, int], backward: bool) -> dict[str, int]:
        """Queries that a program holds at a time, its warps and registers, as measured on an H200 (docs/log.md)."""
        longest, largest = max(room["ROWS"], room["BLOCK_N"]), max(self.q.shape[3], self.v.shape[3])
        if longest <= 64 or largest > 64:
            rows = rows_for_gradients(room["ROWS"], room["BLOCK_N"]) if backward else room["ROWS"]
            return {"ROWS": rows, "BLOCK_M": rows, "num_warps": self.warps(longest, heavy=self.grouped and backward)}
        if backward:  # with no more registers, two programs run at once
            return {"BLOCK_M": min(room["ROWS"], 32), "num_warps": 8, "maxnreg": 128}
        return {"BLOCK_M": min(room["ROWS"], 64), "num_warps": 4}

    def warps(self, longest: int, heavy: bool = False) -> int:
        """heavy: blocks do not fit the registers of one warp, however short the sequences are."""
        exact = self.q.dtype == torch.float32  # products without tensor units hold all their numbers in registers
        few = 4 if heavy or exact or max(self.q.shape[3], self.v.shape[3]) > 64 else 1
        return {16: few, 32: few, 64: 8 if exact else 4, 128: 8}[longest]

    @property
    def grouped(self) -> bool:
        return self.k.shape[1] < self.q.shape[1]

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.bounds_q is None else len(self.bounds_q) - 1


@torch.library.custom_op("rectiformer::short", mutates_args=(), schema=f"({INPUTS}) -> Tensor")
def short(*inputs: Any) -> Tensor:
    """Sum over visible keys of factors[h] factor n^-exponent [scale q k]+ ** power v; power 0 is a softmax.

    numbers: scale, dropout, exponent, factor. sizes: power, left, right, and the most queries and keys of a sequence.
    With bounds, batch row 0 holds sequences end to end.
    """
    from rectiformer.ops.kernels.short import short_forward

    problem = Problem(*inputs)
    q, k, v = problem.q, problem.k, problem.v
    out, flat = heads_last(q, v.shape[3]), [problem.bounds_q, problem.bounds_k]
    for room in problem.rooms():
        room |= problem.tune(room, backward=False)
        problem.launch(short_forward, problem.sequences * q.shape[1], [q, k, v, out], flat, room)
    return out


@torch.library.custom_op(
    "rectiformer::short_backward",
    mutates_args=(),
    schema=f"(Tensor d_out, {INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def short_backward(d_out: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `short` for q, k, v and factors; the last is empty without factors."""
    from rectiformer.ops.kernels import short as kernels

    problem = Problem(*inputs)
    q, k, v = problem.q, problem.k, problem.v
    d_q, d_k, d_v = (heads_last(tensor, tensor.shape[3]) for tensor in (q, k, v))
    # Packed sequences that are empty on both sides add nothing, and nothing is written for them.
    room_for_sums = q.new_empty if problem.bounds_q is None else q.new_zeros
    shape = (problem.sequences, q.shape[1]) if problem.factors is not None else (0, 0)
    by_sequence = room_for_sums(shape, dtype=torch.float32)
    strided, flat = [d_out, q, k, v, d_q, d_k, d_v], [by_sequence, problem.bounds_q, problem.bounds_k]
    programs = problem.sequences * k.shape[1]
    for room in problem.rooms():
        problem.launch(kernels.short_backward, programs, strided, flat, room | problem.tune(room, backward=True))
    return d_q, d_k, d_v, by_sequence.sum(0)


@short.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return heads_last(q, v.shape[3])


@short_backward.register_fake
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, factors: Tensor | None, *_: object) -> tuple[Tensor, ...]:
    d_factors = q.new_empty(0 if factors is None else q.shape[1], dtype=torch.float32)
    return *(heads_last(tensor, tensor.shape[3]) for tensor in (q, k, v)), d_factors


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factors: Tensor | None,
    key_lengths: Tensor | None,
    seed: Tensor | None,
    bounds_q: Tensor | None,
    bounds_k: Tensor | None,
    numbers: Sequence[float],
    sizes: Sequence[int],
) -> Tensor:
    """What `short` computes, by the reference."""
    (scale, dropout, exponent, factor), (power, left, right) = numbers, sizes[:3]
    row = RowScale(lambda options: exponent, lambda options: factor if factors is None else factor * factors)
    variant = replace(VARIANTS["rela"], power=power, row_scale=row) if power else VARIANTS["softmax"]
    M, N = q.shape[2], k.shape[2]
    seen = Visibility(M, N, left, right, key_lengths, first=N - M)
    call = AttentionCall(variant, seen, {}, scale, dropout_p=dropout, seed=seed)
    if bounds_q is None or bounds_k is None:
        return reference_attention(q, k, v, call)
    return torch.cat([reference_attention(*alone) for alone in Packing(bounds_q, bounds_k).split(q, k, v, call)], 2)


def _differentiate(ctx, d_out):  # type: ignore[no-untyped-def]
    inputs = recall(ctx)
    d_q, d_k, d_v, d_factors = short_backward(d_out, *inputs)
    return d_q, d_k, d_v, None if inputs[3] is None else d_factors, *[None] * 6


def _differentiate_twice(ctx, *cotangents):  # type: ignore[no-untyped-def]
    """Differentiate the reference's own backward pass; sequences are short, so its scores are affordable."""
    tensors = recall(ctx)
    with torch.enable_grad():
        tensors[:5] = [None if x is None else x.detach().requires_grad_() for x in tensors[:5]]
        held = [tensor for tensor in tensors[:5] if tensor is not None]
        first = torch.autograd.grad(plain_attention(*tensors[1:]), held[1:], held[0], create_graph=True)
        second = torch.autograd.grad(first, held, cotangents[: len(first)], allow_unused=True)
    return *second, *[None] * (11 - len(second))


short.register_autograd(_differentiate, setup_context=remember)
short_backward.register_autograd(_differentiate_twice, setup_context=remember)
