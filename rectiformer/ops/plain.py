"""Attention in torch's own operations: two matrix products, or the softmax of `scaled_dot_product_attention`.

Either may run a few query rows at a time, each computed again for its gradient, so that nothing M x N is held.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from rectiformer.ops.call import AttentionCall
from rectiformer.ops.launching import transforms_active
from rectiformer.ops.reference import clear_padding, dropout_factor, repeat_heads, visible_rows, working_dtype
from rectiformer.ops.simplex_rows import kernels_suit, simplex_weights


def products_attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """Mixed values [B, H, M, Dv] in the dtype of q."""
    k = repeat_heads(clear_padding(k, call.visibility), q.shape[1])
    v = repeat_heads(clear_padding(v, call.visibility), q.shape[1])
    products = q @ k.mT  # [B, H, M, N]
    by_kernel = kernels_suit(q, call) and not transforms_active()
    weights = simplex_weights(products, call) if by_kernel else plain_weights(products, call)
    if call.dropout_p:
        weights = weights.to(working_dtype(q.dtype))
        drop = dropout_factor(call, weights)
        assert drop is not None
        weights = weights * drop
    return weights.to(q.dtype) @ v


def plain_weights(products: Tensor, call: AttentionCall) -> Tensor:
    """Weights in the working dtype, by the variant's own formula."""
    x = products.to(working_dtype(products.dtype)) * call.scale
    if call.attn_bias is not None:
        x = x + call.attn_bias.to(x.dtype)
    seen, rows = visible_rows(call, x)
    if seen is None:
        return call.variant.weights(x, rows)
    return torch.where(seen, call.variant.weights(torch.where(seen, x, 0), rows), call.variant.hidden)


def sdpa_obstacle(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str:
    """Why torch's kernels cannot take this call; empty when they can."""
    if call.variant.name != "softmax":
        return f"variant {call.variant.name!r} is not a softmax"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"it is for 16-bit inputs, and q is {q.dtype}"
    if call.dropout_p:
        return "its dropout drops other cells"
    if call.attn_bias is not None:
        return "it has no gradient for a bias"
    return ""


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """Mixed values [B, H, M, Dv]; a row that sees no key is zero, where torch's own would be the mean or nothing."""
    seen, view = call.visibility, None
    causal = seen.hides_later and not seen.hides_earlier and seen.right == 0 and seen.queries == seen.keys
    causal = causal and seen.key_lengths is None and seen.attn_mask is None
    k, v = clear_padding(k, seen), clear_padding(v, seen)
    blind = None
    if not causal and (view := seen.mask(q.device)) is not None:
        blind = ~view.any(-1, keepdim=True)
        view = (view | blind).expand(*view.shape[:2], seen.queries, seen.keys)
    grouped = k.shape[1] != q.shape[1]
    out = scaled_dot_product_attention(q, k, v, view, is_causal=causal, scale=call.scale, enable_gqa=grouped)
    return out if blind is None else torch.where(blind, 0, out)


MOST_HELD = 1 << 32
"""Bytes that one call may keep for its gradient; where it would keep more, it goes by rows."""
KEPT = 4
"""Tensors like the scores that autograd keeps of a call, about."""

Plain = Callable[[Tensor, Tensor, Tensor, AttentionCall], Tensor]


def rows_at_once(q: Tensor, v: Tensor, call: AttentionCall) -> int:
    """How many query rows of all heads may be computed together."""
    a_cell = 1 if call.variant.has_weights else max(q.shape[3], v.shape[3])  # without weights, a number a column too
    a_row = q.shape[0] * q.shape[1] * call.visibility.keys * a_cell * KEPT * working_dtype(q.dtype).itemsize
    return max(1, MOST_HELD // max(1, a_row))


def attention_by_rows(plain: Plain, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, step: int) -> Tensor:
    """What `plain` gives for the whole call, from `step` query rows at a time."""
    parts = []
    for start in range(0, q.shape[2], step):
        stop = min(start + step, q.shape[2])
        parts.append(
            checkpoint(
                plain, q[:, :, start:stop], k, v, call.rows(start, stop), use_reentrant=False, preserve_rng_state=False
            )
        )
    return torch.cat(parts, 2)
