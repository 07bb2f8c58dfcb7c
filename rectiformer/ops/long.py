"""Fused attention of long sequences as operators of torch: `rectiformer::long` and its backward.

Rectified rows only. Autograd keeps the inputs and nothing else; the backward pass is deterministic. Results lie in
memory as [B, M, H, D], so that joining the heads afterwards moves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rectiformer.ops.activations import RowScale
from rectiformer.ops.autograd import Describe, recall, remember, second_derivatives
from rectiformer.ops.call import AttentionCall, Packing, Visibility
from rectiformer.ops.launching import heads_last, kernel_obstacle, row_scale_parts
from rectiformer.ops.long_launch import LongCall
from rectiformer.ops.reference import scale_rows
from rectiformer.ops.variants import VARIANTS

LARGEST = 256
"""Largest head size."""
INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? factors, Tensor? key_lengths, Tensor? seed, "
    "Tensor? bounds_q, Tensor? bounds_k, float[] numbers, SymInt[] sizes"
)
"""What every operator on `LongCall` takes: its fields, as torch wants them named."""


def long_obstacle(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str:
    """Why these kernels cannot take this call; empty when they can."""
    obstacle = kernel_obstacle(q, k, v, call)
    if obstacle:
        return obstacle
    if not call.variant.rectified:
        return f"variant {call.variant.name!r} has no fused kernel for long sequences"
    if max(q.shape[3], v.shape[3]) > LARGEST:
        return f"it takes head sizes up to {LARGEST}, and they are {q.shape[3]} and {v.shape[3]}"
    if call.origin != (0, 0):
        return "its dropout begins at the first query and key"
    return ""


def long_attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, packing: Packing | None = None) -> Tensor:
    """`reference_attention` for rectified rows of any length.

    With `packing`, of sequences that lie end to end in [1, H, total, D]; nothing is read on the host.
    """
    q, call = with_positive_scale(q, call)
    tables, numbers, sizes = long_arguments(q, k, call, packing)
    return scale_late(long(q, k, v, call.attn_bias, *tables, numbers, sizes), k, call)


def with_positive_scale(q: Tensor, call: AttentionCall) -> tuple[Tensor, AttentionCall]:
    """The same scores: a positive scale leaves the ReLU, a negative one must not."""
    return (-q, replace(call, scale=-call.scale)) if call.scale < 0 else (q, call)


def long_arguments(
    q: Tensor, k: Tensor, call: AttentionCall, packing: Packing | None
) -> tuple[tuple[Tensor | None, ...], list[float], list[int]]:
    """What an operator is told: mask, factors, key lengths, seed and bounds; then its numbers; then its sizes."""
    seen = call.visibility
    # Where a mask or bias decides how many keys a row sees, its scale is multiplied afterwards.
    exponent, factor, factors = (0.0, 1.0, None) if call.counts_cells else row_scale_parts(q, call)
    grouped = q.shape[1] > k.shape[1]
    bounds = (None, None) if packing is None else (packing.bounds_q, packing.bounds_k)
    tables = (seen.attn_mask, None if grouped else factors, seen.key_lengths, call.seed, *bounds)
    sizes = [call.variant.power, seen.left, seen.right, *call.origin, *longest(call, packing)]
    return tables, [call.scale, call.dropout_p, exponent, factor], sizes


def scale_late(out: Tensor, k: Tensor, call: AttentionCall) -> Tensor:
    """Mixed values with what the kernels left out of the row scale, and why they did."""
    if call.counts_cells:
        return scale_rows(out, call).to(out.dtype)
    if out.shape[1] > k.shape[1]:  # they cannot tell heads that share keys apart in a factor's gradient
        factors = row_scale_parts(out, call)[2]
        return out if factors is None else (out * factors[:, None, None]).to(out.dtype)
    return out


def longest(call: AttentionCall, packing: Packing | None) -> tuple[int, int]:
    """No sequence has more queries and keys than this."""
    queries, keys = call.visibility.queries, call.visibility.keys
    if packing is None:
        return queries, keys
    return (queries if packing.most_q is None else packing.most_q), (keys if packing.most_k is None else packing.most_k)


@torch.library.custom_op("rectiformer::long", mutates_args=(), schema=f"({INPUTS}) -> Tensor")
def long(*inputs: Any) -> Tensor:
    """Sum over visible keys of factors[h] factor n^-exponent [scale q k + bias]+ ** power v.

    numbers: scale, dropout, exponent, factor. sizes: power, left, right, row and column of the dropout pattern, and the
    most queries and keys of a sequence. With bounds, batch row 0 holds sequences end to end.
    """
    return LongCall(*inputs).forward()


@torch.library.custom_op(
    "rectiformer::long_backward",
    mutates_args=(),
    schema=f"(Tensor d_out, {INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def long_backward(d_out: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Gradients of `long` for q, k, v, bias and factors; the last two are empty without them."""
    call = LongCall(*inputs)
    d_q, d_k, d_v = call.backward(d_out)
    d_bias = call.q.new_empty(0) if call.bias is None else call.bias_gradient(d_out)
    return d_q, d_k, d_v, d_bias, factor_gradients(call, d_v)


def factor_gradients(call: LongCall, d_v: Tensor) -> Tensor:
    """Mixed values are linear in v, so <d_out, out> is <d_v, v>, head by head."""
    if call.factors is None:
        return d_v.new_empty(0, dtype=torch.float32)
    return (d_v.float() * call.v.float()).sum((0, 2, 3)) / call.factors


@long.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return heads_last(q, v.shape[3])


@long_backward.register_fake
def _(d_out: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    call = LongCall(*inputs)
    d_bias = call.q.new_empty(0) if call.bias is None else call.bias.new_empty(call.bias.shape)
    d_qkv = (heads_last(tensor, tensor.shape[3]) for tensor in inputs[:3])
    return *d_qkv, d_bias, call.q.new_empty(0 if call.factors is None else call.q.shape[1], dtype=torch.float32)


# autograd calls the next functions with a context of its own, whose type torch does not publish.
def _differentiate(ctx, d_out):  # type: ignore[no-untyped-def]
    inputs = recall(ctx)
    d_q, d_k, d_v, d_bias, d_factors = long_backward(d_out, *inputs)
    bias, factors = inputs[3], inputs[5]
    return d_q, d_k, d_v, None if bias is None else d_bias, None, None if factors is None else d_factors, *[None] * 6


def _differentiate_twice(ctx, *cotangents):  # type: ignore[no-untyped-def]
    d_out, q, k, v, bias, mask, factors, key_lengths, seed, bounds_q, bounds_k, numbers, sizes = recall(ctx)
    M, N = q.shape[2], k.shape[2]
    visibility = Visibility(M, N, sizes[1], sizes[2], key_lengths, mask, first=N - M)

    def describe(factors: Tensor | None) -> AttentionCall:
        return describe_call(visibility, factors, seed, numbers, sizes)

    inputs = [d_out, q, k, v, bias, factors]
    if bounds_q is None:
        second = second_derivatives(describe, inputs, cotangents)
    else:
        second = packed_second_derivatives(describe, Packing(bounds_q, bounds_k), inputs, cotangents)
    return *second[:5], None, second[5], *[None] * 7


def describe_call(
    visibility: Visibility,
    factors: Tensor | None,
    seed: Tensor | None,
    numbers: Sequence[float],
    sizes: Sequence[int],
) -> AttentionCall:
    """The call that the operator's flat arguments stand for, without its bias."""
    scale, dropout, exponent, factor = numbers
    row = RowScale(lambda options: exponent, lambda options: factor if factors is None else factor * factors)
    variant = replace(VARIANTS["rela"], power=sizes[0], row_scale=row)
    return AttentionCall(variant, visibility, {}, scale, None, dropout, seed, (sizes[3], sizes[4]))


def packed_second_derivatives(
    describe: Describe, packing: Packing, inputs: Sequence[Tensor | None], cotangents: Sequence[Tensor]
) -> list[Tensor | None]:
    """`second_derivatives`, one sequence after the other."""
    totals = [None if tensor is None else torch.zeros_like(tensor) for tensor in inputs]
    d_out, q, k, v = (tensor for tensor in inputs[:4] if tensor is not None)
    for q_part, k_part, v_part, alone in packing.split(q, k, v, describe(None)):
        start, key_start = alone.origin
        rows = slice(None), slice(None), slice(start, start + q_part.shape[2])
        keys = slice(None), slice(None), slice(key_start, key_start + k_part.shape[2])

        def describe_alone(factors: Tensor | None, alone: AttentionCall = alone) -> AttentionCall:
            return replace(describe(factors), visibility=alone.visibility, origin=alone.origin)

        parts = [d_out[rows], q_part, k_part, v_part, None, inputs[5]]
        sides = [cotangents[0][rows], cotangents[1][keys], cotangents[2][keys], None, *cotangents[4:]]
        found = second_derivatives(describe_alone, parts, sides)
        for total, grad, part in zip(totals, found, (rows, rows, keys, keys, None, None), strict=True):
            if total is not None and grad is not None:
                (total if part is None else total[part]).add_(grad)
    return totals


long.register_autograd(_differentiate, setup_context=remember)
long_backward.register_autograd(_differentiate_twice, setup_context=remember)
