"""Sparsemax and 1.5-entmax of whole rows as operators of torch, `rectiformer::simplex` and its backward.

Triton only: one kernel each way instead of a sort and a dozen passes over the scores. Scores and weights are in the
dtype of the inputs, what stands between them is float32, and autograd keeps the weights and nothing else. The
definition is `simplex.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rectiformer.ops import launching
from rectiformer.ops.call import UNBOUNDED, AttentionCall

POWERS = {"sparsemax": 1, "entmax15": 2}
"""Variants whose weights are [x - tau]+ to a power."""
WIDEST = 8192
"""Longest row that one program can hold."""
TILE = 2048
"""Cells that a program holds, or one row where that is longer."""


def kernels_suit(q: Tensor, call: AttentionCall) -> bool:
    """Whether the kernels can weigh the rows of this call."""
    if call.variant.name not in POWERS or not launching.TRITON or q.dtype not in launching.DTYPES:
        return False
    return (q.device.type == "cuda" or launching.interpreting()) and 0 < call.visibility.keys <= WIDEST


def simplex_weights(products: Tensor, call: AttentionCall) -> Tensor:
    """Weights [B, H, M, N] from what the product of queries and keys gave, in its dtype."""
    seen, power = call.visibility, POWERS[call.variant.name]
    if call.attn_bias is None and seen.attn_mask is None:
        places = [seen.first, seen.left, seen.right]
        return simplex(products, seen.key_lengths, call.scale, power, places)
    scores = products.to(torch.promote_types(products.dtype, torch.float32)) * call.scale
    scores = scores if call.attn_bias is None else scores + call.attn_bias.to(scores.dtype)
    mask = call.seen.mask(products.device)
    shown = scores if mask is None else torch.where(mask, scores, -torch.inf)
    return simplex(shown, None, 1.0, power, [0, UNBOUNDED, UNBOUNDED]).to(products.dtype)


@torch.library.custom_op("rectiformer::simplex", mutates_args=())
def simplex(scores: Tensor, key_lengths: Tensor | None, scale: float, power: int, places: Sequence[int]) -> Tensor:
    """[scale scores / power - tau]+ ** power, each row with its own tau, such that it sums to 1; 0 in a row that sees
    nothing. places: key position of query 0, and how many keys a query sees before and after its own."""
    from rectiformer.ops.kernels.simplex import simplex_forward

    scores = scores.contiguous()
    weights = torch.empty_like(scores)
    _, heads, queries, keys = scores.shape
    count, blocks = scores.numel() // max(1, keys), block_shape(keys)
    if count:
        with torch.cuda.device_of(scores):  # Triton launches on the current device
            simplex_forward[(-(-count // blocks["ROWS"]),)](
                scores, launching.table(key_lengths, scores), weights, count, queries, keys, heads * queries,
                *places, scale, LENGTHS=key_lengths is not None, POWER=power, **blocks,
            )  # fmt: skip
    return weights


@torch.library.custom_op("rectiformer::simplex_backward", mutates_args=())
def simplex_backward(d_weights: Tensor, weights: Tensor, scale: float, power: int) -> Tensor:
    """The gradient for the scores."""
    from rectiformer.ops.kernels.simplex import simplex_backward as kernel

    d_weights, weights = d_weights.contiguous(), weights.contiguous()
    d_scores = torch.empty_like(weights)
    keys = weights.shape[-1]
    count, blocks = weights.numel() // max(1, keys), block_shape(keys)
    if count:
        with torch.cuda.device_of(weights):
            kernel[(-(-count // blocks["ROWS"]),)](
                d_weights, weights, d_scores, count, keys, scale, POWER=power, **blocks
            )
    return d_scores


def block_shape(keys: int) -> dict[str, int]:
    """Rows a program holds at once, 16 numbers for each of its threads."""
    row = launching.block(keys)
    rows = max(1, TILE // row)
    return {"ROWS": rows, "BLOCK_N": row, "num_warps": rows * row // 512}


def plain_backward(d_weights: Tensor, weights: Tensor, scale: float, power: int) -> Tensor:
    """What the backward kernel computes, in plain torch."""
    positive = weights > 0
    slope = positive.to(weights.dtype) if power == 1 else torch.where(positive, weights, 1).sqrt() * positive
    mean = (slope * d_weights).sum(-1, keepdim=True) / slope.sum(-1, keepdim=True).clamp_min(1e-30)
    return scale * slope * (d_weights - mean)


@simplex.register_fake
def _(scores: Tensor, *_: object) -> Tensor:
    return scores.new_empty(scores.shape)


@simplex_backward.register_fake
def _(d_weights: Tensor, weights: Tensor, *_: object) -> Tensor:
    return weights.new_empty(weights.shape)


# autograd calls the next functions with a context of its own, whose type torch does not publish.
def _keep_weights(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(output)
    ctx.numbers = inputs[2], inputs[3]


def _differentiate(ctx, d_weights):  # type: ignore[no-untyped-def]
    return simplex_backward(d_weights, *ctx.saved_tensors, *ctx.numbers), None, None, None, None


def _keep_inputs(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:2])
    ctx.numbers = inputs[2:]


def _differentiate_twice(ctx, cotangent):  # type: ignore[no-untyped-def]
    with torch.enable_grad():
        leaves = [tensor.detach().float().requires_grad_() for tensor in ctx.saved_tensors]
        first = plain_backward(*leaves, *ctx.numbers)
        second = torch.autograd.grad(first, leaves, cotangent.float(), allow_unused=True)
    found = [None if grad is None else grad.to(like) for grad, like in zip(second, ctx.saved_tensors, strict=True)]
    return *found, None, None


simplex.register_autograd(_differentiate, setup_context=_keep_weights)
simplex_backward.register_autograd(_differentiate_twice, setup_context=_keep_inputs)
