"""Rectified attention as operators of torch: `rectiformer::rectified` and its backward.

To `torch.compile` each is one opaque call; autograd knows the first and the second derivative. The implementations
behind them live elsewhere (`blocked.py` on the CPU).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rectiformer.ops.activations import Rows
from rectiformer.ops.blocked import blocked_backward, blocked_forward
from rectiformer.ops.reference import AttentionCall
from rectiformer.ops.second import second_derivatives
from rectiformer.ops.variants import VARIANTS
from rectiformer.ops.visibility import Visibility


def rectified_attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """`reference_attention` for rectified variants, without ever holding M x N scores."""
    dtype = q.dtype
    if dtype == torch.float16 or (dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        q, k, v = q.float(), k.float(), v.float()
    if call.scale < 0:  # a positive scale leaves the ReLU, a negative one must not
        q, call = -q, replace(call, scale=-call.scale)
    seen = call.visibility
    numbers = [call.scale, call.dropout_p]
    sizes = [call.variant.power, seen.left, seen.right, *call.origin]
    out = rectified(q, k, v, call.attn_bias, seen.attn_mask, seen.key_lengths, call.seed, numbers, sizes)
    return scale_rows(out, call).to(dtype)


def scale_rows(out: Tensor, call: AttentionCall) -> Tensor:
    """The mixed values times the variant's row scale: it is linear, so it can come last."""
    if call.variant.row_scale is None:
        return out
    count = call.seen.counts(out.device).clamp_min(1)[..., None]
    count = count.to(torch.promote_types(out.dtype, torch.float32))
    return out * call.variant.row_scale(Rows(None, count, call.options))


def describe_call(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    seed: Tensor | None,
    numbers: Sequence[float],
    sizes: Sequence[int],
) -> AttentionCall:
    """The call that an operator's flat arguments stand for; its variant has the right power and no row scale."""
    power, left, right, *origin = sizes
    M, N = q.shape[2], k.shape[2]
    visibility = Visibility(M, N, left, right, key_lengths, mask, first=N - M)
    variant = replace(VARIANTS["rela"], power=power) if power else VARIANTS["softmax"]
    scale, dropout = numbers
    return AttentionCall(variant, visibility, {}, scale, bias, dropout, seed, (origin[0], origin[1]))


@torch.library.custom_op("rectiformer::rectified", mutates_args=(), device_types="cpu")
def rectified(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    seed: Tensor | None,
    numbers: Sequence[float],
    sizes: Sequence[int],
) -> Tensor:
    """sum over visible keys of [scale q k + bias]+ ** power v. numbers: scale, dropout; sizes: power, left, right,
    and the row and column of the dropout pattern."""
    return blocked_forward(q, k, v, describe_call(q, k, bias, mask, key_lengths, seed, numbers, sizes))


@torch.library.custom_op("rectiformer::rectified_backward", mutates_args=(), device_types="cpu")
def rectified_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    seed: Tensor | None,
    numbers: Sequence[float],
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `rectified` for q, k, v and bias; the last is empty without a bias."""
    call = describe_call(q, k, bias, mask, key_lengths, seed, numbers, sizes)
    d_q, d_k, d_v, d_bias = blocked_backward(d_out, q, k, v, call)
    return d_q, d_k, d_v, d_bias


@rectified.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


@rectified_backward.register_fake
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *_: object) -> tuple[Tensor, ...]:
    d_bias = q.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_bias


# autograd calls the next functions with a context of its own, whose type torch does not publish.
def remember(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.is_tensor = [isinstance(value, Tensor) for value in inputs]
    ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))
    ctx.others = [value for value in inputs if not isinstance(value, Tensor)]


def recall(ctx) -> list:  # type: ignore[no-untyped-def]
    tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
    return [next(tensors if is_tensor else others) for is_tensor in ctx.is_tensor]


def _differentiate(ctx, d_out):  # type: ignore[no-untyped-def]
    inputs = recall(ctx)
    d_q, d_k, d_v, d_bias = rectified_backward(d_out.contiguous(), *inputs)
    return d_q, d_k, d_v, None if inputs[3] is None else d_bias, *[None] * 5


def _differentiate_twice(ctx, *cotangents):  # type: ignore[no-untyped-def]
    d_out, q, k, v, bias, *rest = recall(ctx)
    second = second_derivatives(lambda _: describe_call(q, k, None, *rest), [d_out, q, k, v, bias, None], cotangents)
    return *second[:5], *[None] * 5


rectified.register_autograd(_differentiate, setup_context=remember)
rectified_backward.register_autograd(_differentiate_twice, setup_context=remember)
