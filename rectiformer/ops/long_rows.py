"""Fused attention that also describes each row of weights, as operators of torch: `rectiformer::long_rows`.

The sums are made in the pass that mixes the values, and their gradients enter the passes that are run anyway. With
R the sum of a row's x, a weight x has slope 1 for R, and (log R - H - log x) / R for the entropy H of the row divided
by R. Nothing is M x N. First derivatives only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rectiformer.ops.autograd import recall, remember
from rectiformer.ops.call import AttentionCall, Packing
from rectiformer.ops.launching import heads_last
from rectiformer.ops.long import (
    INPUTS,
    factor_gradients,
    long_arguments,
    long_obstacle,
    scale_late,
    with_positive_scale,
)
from rectiformer.ops.long_launch import LongCall, scales_inside


def long_rows_obstacle(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str:
    """Why these kernels cannot take this call; empty when they can."""
    if call.attn_bias is not None:
        return "a bias gets no gradient from the sums of rows"
    return long_obstacle(q, k, v, call) or ("" if call.scale else "a scale of 0 leaves no weights to sum up")


def long_rows_attention(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, packing: Packing | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`long_attention`, and of each row of [scale q k]+ ** power its sum and the entropy of the row divided by it:
    float32 [B, H, M]. Rows of zeros have 0 for both."""
    q, call = with_positive_scale(q, call)
    tables, numbers, sizes = long_arguments(q, k, call, packing)
    out, rows = long_rows(q, k, v, None, *tables, numbers, sizes)
    total, entropy = rows.unbind(-1)
    return scale_late(out, k, call), total if scales_inside(q) else total * call.scale**call.variant.power, entropy


@torch.library.custom_op("rectiformer::long_rows", mutates_args=(), schema=f"({INPUTS}) -> (Tensor, Tensor)")
def long_rows(*inputs: Any) -> tuple[Tensor, Tensor]:
    """`long` without a bias, and R and H of each row: float32 [B, H, M, 2].

    They are of [q k]+ ** power, but where `scales_inside` of [scale q k]+ ** power.
    """
    call = LongCall(*inputs)
    rows = call.q.new_empty(*call.q.shape[:3], 2, dtype=torch.float32)
    return call.forward(rows), rows


@torch.library.custom_op(
    "rectiformer::long_rows_backward",
    mutates_args=(),
    schema=f"(Tensor d_out, Tensor slopes, {INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def long_rows_backward(d_out: Tensor, slopes: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Gradients of `long_rows` for q, k, v and factors; the last is empty without them. See `row_slopes`."""
    call = LongCall(*inputs)
    d_q, d_k, d_v = call.backward(d_out, slopes)
    return d_q, d_k, d_v, factor_gradients(call, d_v)


@long_rows.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return heads_last(q, v.shape[3]), q.new_empty(*q.shape[:3], 2, dtype=torch.float32)


@long_rows_backward.register_fake
def _(d_out: Tensor, slopes: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    call = LongCall(*inputs)
    d_qkv = (heads_last(tensor, tensor.shape[3]) for tensor in inputs[:3])
    return *d_qkv, call.q.new_empty(0 if call.factors is None else call.q.shape[1], dtype=torch.float32)


def row_slopes(d_rows: Tensor, rows: Tensor) -> Tensor:
    """a, b [B, H, M, 2]: through R and H, a weight x of a row has gradient a + b log x."""
    (d_total, d_entropy), (total, entropy) = d_rows.unbind(-1), rows.unbind(-1)
    safe = torch.where(total > 0, total, 1)
    rate = d_entropy / safe
    return torch.stack([d_total + rate * (safe.log() - entropy), -rate], -1)


# autograd calls the next functions with a context of its own, whose type torch does not publish.
def _remember(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    remember(ctx, (*inputs, output[1]), output)


def _differentiate(ctx, d_out, d_rows):  # type: ignore[no-untyped-def]
    *inputs, rows = recall(ctx)
    d_q, d_k, d_v, d_factors = long_rows_backward(d_out, row_slopes(d_rows, rows), *inputs)
    return d_q, d_k, d_v, None, None, None if inputs[5] is None else d_factors, *[None] * 6


long_rows.register_autograd(_differentiate, setup_context=_remember)
