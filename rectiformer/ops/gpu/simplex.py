"""Sparsemax and 1.5-entmax of whole rows: `rectiformer::simplex` and its backward.

One kernel each way instead of a sort and a dozen passes over the scores; the definition is ops/simplex.py. A program
holds rows [ROWS, BLOCK_N] in registers. No row is sorted: the sum of [x - tau]+ ** power falls as tau grows and is
convex in it, so Newton's steps from below reach the threshold without passing it, and stop where float32 has no step
left. Scores and weights are in the dtype of the inputs, what stands between them is float32, and autograd keeps the
weights and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rectiformer.ops.autograd import operator, recall, register_derivative
from rectiformer.ops.call import UNBOUNDED, AttentionCall
from rectiformer.ops.gpu import SIMPLEX_POWERS
from rectiformer.ops.gpu.common import block_size, pointer

BLOCK_NUMBERS = 2048
"""Numbers that a program holds, or one row where that is longer."""


def simplex_weights(products: Tensor, call: AttentionCall) -> Tensor:
    """Weights [B, H, M, N] from what the product of queries and keys gave, in its dtype."""
    seen, power = call.visibility, SIMPLEX_POWERS[call.variant.rowwise]
    if call.attn_bias is None and seen.attn_mask is None:
        return simplex(products, seen.key_lengths, call.scale, power, seen.first, seen.left, seen.right)
    scores = products.to(torch.promote_types(products.dtype, torch.float32)) * call.scale
    scores = scores if call.attn_bias is None else scores + call.attn_bias.to(scores.dtype)
    mask = call.seen.mask(products.device)
    shown = scores if mask is None else torch.where(mask, scores, -torch.inf)
    return simplex(shown, None, 1.0, power, 0, UNBOUNDED, UNBOUNDED).to(products.dtype)


@operator(
    "simplex(Tensor scores, Tensor? key_lengths, float scale, int power, SymInt first_position, SymInt window_left, "
    "SymInt window_right) -> Tensor"
)
def simplex(
    scores: Tensor,
    key_lengths: Tensor | None,
    scale: float,
    power: int,
    first_position: int,
    window_left: int,
    window_right: int,
) -> Tensor:
    """[scale scores / power - tau]+ ** power, each row with its own tau, such that it sums to 1; 0 in a row that sees
    nothing. The first query stands at key `first_position`."""
    scores = scores.contiguous()
    weights = torch.empty_like(scores)
    _, heads, queries, keys = scores.shape
    count, blocks = scores.numel() // max(1, keys), block_config(keys)
    if count:
        with torch.cuda.device_of(scores):  # Triton launches on the current device
            simplex_kernel[(-(-count // blocks["ROWS"]),)](
                scores, pointer(key_lengths, scores), weights, count, queries, keys, heads * queries,
                first_position, window_left, window_right, scale,
                LENGTHS=key_lengths is not None, POWER=power, **blocks,
            )  # fmt: skip
    return weights


@operator("simplex_backward(Tensor d_weights, Tensor weights, float scale, int power) -> Tensor")
def simplex_backward(d_weights: Tensor, weights: Tensor, scale: float, power: int) -> Tensor:
    """The gradient for the scores."""
    d_weights, weights = d_weights.contiguous(), weights.contiguous()
    d_scores = torch.empty_like(weights)
    keys = weights.shape[-1]
    count, blocks = weights.numel() // max(1, keys), block_config(keys)
    if count:
        with torch.cuda.device_of(weights):
            simplex_backward_kernel[(-(-count // blocks["ROWS"]),)](
                d_weights, weights, d_scores, count, keys, scale, POWER=power, **blocks
            )
    return d_scores


def block_config(keys: int) -> dict[str, int]:
    """Rows a program holds at once, 16 numbers for each of its threads."""
    row = block_size(keys)
    rows = max(1, BLOCK_NUMBERS // row)
    return {"ROWS": rows, "BLOCK_N": row, "num_warps": rows * row // 512}


def plain_backward(d_weights: Tensor, weights: Tensor, scale: float, power: int) -> Tensor:
    """What the backward kernel computes, in plain torch."""
    positive = weights > 0
    slope = positive.to(weights.dtype) if power == 1 else torch.where(positive, weights, 1).sqrt() * positive
    mean = (slope * d_weights).sum(-1, keepdim=True) / slope.sum(-1, keepdim=True).clamp_min(1e-30)
    return scale * slope * (d_weights - mean)


@torch.library.register_fake("rectiformer::simplex")
def _(scores: Tensor, *_: object) -> Tensor:
    return scores.new_empty(scores.shape)


@torch.library.register_fake("rectiformer::simplex_backward")
def _(d_weights: Tensor, weights: Tensor, *_: object) -> Tensor:
    return weights.new_empty(weights.shape)


# autograd calls the next functions with a context of its own, whose type torch does not publish.
def _keep_weights(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.scale, ctx.power = inputs[2:4]


def _differentiate(ctx: Any, d_weights: Tensor) -> tuple[Tensor | None, ...]:
    return simplex_backward(d_weights, *ctx.saved_tensors, ctx.scale, ctx.power), *[None] * 6


def _differentiate_twice(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
    *held, scale, power = recall(ctx)
    with torch.enable_grad():
        leaves = [tensor.detach().float().requires_grad_() for tensor in held]
        first = plain_backward(leaves[0], leaves[1], scale, power)
        second = torch.autograd.grad(first, leaves, cotangent.float(), allow_unused=True)
    found = [None if grad is None else grad.to(like) for grad, like in zip(second, held, strict=True)]
    return *found, None, None


register_derivative(simplex, _differentiate, _keep_weights)
register_derivative(simplex_backward, _differentiate_twice)


@triton.jit
def simplex_kernel(
    scores_ptr, lengths_ptr, weights_ptr, count, queries, keys, rows_per_batch, first, left, right, scale,
    LENGTHS: tl.constexpr, POWER: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_N)[None, :]
    own = (rows % queries + first)[:, None]  # the query's position among the keys
    inside = (rows < count)[:, None] & (columns < keys)
    seen = inside & (columns >= own - left) & (columns <= own + right)
    if LENGTHS:
        seen = seen & (columns < tl.load(lengths_ptr + rows // rows_per_batch, mask=rows < count, other=0)[:, None])
    offsets = rows.to(tl.int64)[:, None] * keys + columns
    scores = tl.load(scores_ptr + offsets, mask=seen, other=0.0).to(tl.float32)
    seen = seen & (scores != -float("inf"))  # what the caller has hidden
    x = tl.where(seen, scores, 0.0) * (scale / POWER)
    top = tl.max(tl.where(seen, x, -float("inf")), 1)[:, None]
    x = tl.where(seen, x - top, -2.0)  # 1 below the top a weight is 0
    tau = tl.full([ROWS], -1.0, tl.float32)
    moving = True
    while moving:
        gap = tl.maximum(x - tau[:, None], 0.0)
        if POWER == 1:
            step = (tl.sum(gap, 1) - 1.0) / tl.maximum(tl.sum((gap > 0).to(tl.float32), 1), 1.0)
        else:
            step = (tl.sum(gap * gap, 1) - 1.0) / tl.maximum(2.0 * tl.sum(gap, 1), 1e-30)
        moved = tl.maximum(tau + step, tau)
        moving = tl.max((moved > tau).to(tl.int32), 0) > 0
        tau = moved
    gap = tl.maximum(x - tau[:, None], 0.0, propagate_nan=tl.PropagateNan.ALL)
    weights = gap if POWER == 1 else gap * gap
    tl.store(weights_ptr + offsets, weights.to(weights_ptr.dtype.element_ty), mask=inside)


@triton.jit
def simplex_backward_kernel(
    d_weights_ptr, weights_ptr, d_scores_ptr, count, keys, scale,
    POWER: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Each weight's slope times its gradient less the row's mean of gradients, weighed by the slopes."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_N)[None, :]
    offsets = rows.to(tl.int64)[:, None] * keys + columns
    inside = (rows < count)[:, None] & (columns < keys)
    weights = tl.load(weights_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    slope = (weights > 0).to(tl.float32) if POWER == 1 else tl.sqrt(weights)
    passed = tl.load(d_weights_ptr + offsets, mask=inside & (weights > 0), other=0.0).to(tl.float32)
    mean = tl.sum(slope * passed, 1) / tl.maximum(tl.sum(slope, 1), 1e-30)
    d_scores = scale * slope * (passed - mean[:, None])
    tl.store(d_scores_ptr + offsets, d_scores.to(d_scores_ptr.dtype.element_ty), mask=inside)
