"""Attention as two matrix products in the dtype of the inputs, with everything between them in float32.

What a GPU without a fused kernel should run for 16-bit inputs: the products go to the tensor units, and torch.compile
makes one kernel of what stands between them; sparsemax and 1.5-entmax have kernels of their own. A score is rounded to
the input dtype, as any matrix product's result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rectiformer.ops.launching import transforms_active
from rectiformer.ops.reference import (
    AttentionCall,
    clear_padding,
    dropout_factor,
    repeat_heads,
    visible_rows,
    working_dtype,
)
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
