"""Attention in torch's own operations: two matrix products, the softmax of `scaled_dot_product_attention`, by rows.

The products are in the dtype of the inputs, so that 16-bit ones go to the tensor cores; what stands between them is in
float32, and torch.compile makes one kernel of it. Calls whose scores, kept until the backward pass, would fill a device
go a few query rows at a time, each computed again for its gradient: a third more work, and any length fits.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from rectiformer.ops.call import AttentionCall, Run
from rectiformer.ops.gpu import simplex_suits, transforms_active
from rectiformer.ops.reference import clear_padding, dropout_factor, repeat_heads, weigh, working_dtype

MOST_HELD = 1 << 32
"""Bytes that one call may keep for its gradient; where it would keep more, it goes by rows."""
KEPT = 4
"""Tensors like the scores that autograd keeps of a call, about."""
T = TypeVar("T")


def choose_products(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Run | str:
    """`products_attention`, or why it cannot take this call."""
    if "products" not in call.variant.implementations:
        return f"variant {call.variant.name!r} is not made of two matrix products"
    return products_attention


def products_attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """Mixed values [B, H, M, Dv] in the dtype of q."""
    k = repeat_heads(clear_padding(k, call.visibility), q.shape[1])
    v = repeat_heads(clear_padding(v, call.visibility), q.shape[1])
    products = q @ k.mT  # [B, H, M, N]
    if simplex_suits(q, call) and not transforms_active():
        from rectiformer.ops.gpu.simplex import simplex_weights

        weights = simplex_weights(products, call)
    else:
        weights = plain_weights(products, call)
    if call.dropout_p:
        weights = weights.to(working_dtype(q.dtype))
        drop = dropout_factor(call, weights)
        assert drop is not None
        weights = weights * drop
    return weights.to(q.dtype) @ v


def plain_weights(products: Tensor, call: AttentionCall) -> Tensor:
    """Weights in the working dtype, by the variant's own formula."""
    return weigh(products.to(working_dtype(products.dtype)) * call.scale, call)


def choose_sdpa(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Run | str:
    """`sdpa_attention`, or why torch's kernels cannot take this call."""
    if call.variant.name != "softmax":
        return f"variant {call.variant.name!r} is not a softmax"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"it is for 16-bit inputs, and q is {q.dtype}"
    if call.dropout_p:
        return "its dropout drops other cells"
    if call.attn_bias is not None:
        return "it has no gradient for a bias"
    return sdpa_attention


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """Mixed values [B, H, M, Dv]; a row that sees no key is zero, where torch's own would be the mean or NaN.

    It is the peer of rectified attention for long sequences in 16 bits. Dropout, a bias and second derivatives are left
    to plain products: torch's kernels drop cells of their own choice, and differentiate once.
    """
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


def rows_at_once(q: Tensor, v: Tensor, call: AttentionCall) -> int:
    """How many query rows of all heads may be computed together."""
    per_cell = 1 if call.variant.has_weights else max(q.shape[3], v.shape[3])  # without weights, one per column too
    per_row = q.shape[0] * q.shape[1] * call.visibility.keys * per_cell * KEPT * working_dtype(q.dtype).itemsize
    return max(1, MOST_HELD // max(1, per_row))


def by_rows(function: Callable[..., T], q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, step: int) -> list[T]:
    """What `function` makes of `step` query rows at a time, each computed again for its gradient."""
    # Dropout is a function of its seed, so there is no state of a generator to keep.
    again = partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
    return [again(q[:, :, rows], k, v, part) for rows, part in call.blocks(step)]
