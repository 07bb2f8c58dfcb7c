"""Attention as two matrix products in the dtype of the inputs, with everything between them in float32.

What a GPU without a fused kernel should run for 16-bit inputs: the products go to the tensor units, and torch.compile
makes one kernel of what stands between them. A score is rounded to the input dtype, as any matrix product's result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rectiformer.ops.reference import (
    Call,
    clear_padding,
    dropout_factor,
    repeat_heads,
    visible_rows,
    working_dtype,
)


def products_attention(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """Mixed values [B, H, M, Dv] in the dtype of q."""
    k = repeat_heads(clear_padding(k, call.visibility), q.shape[1])
    v = repeat_heads(clear_padding(v, call.visibility), q.shape[1])
    x = (q @ k.mT).to(working_dtype(q.dtype)) * call.scale  # [B, H, M, N]
    if call.bias is not None:
        x = x + call.bias.to(x.dtype)
    seen, rows = visible_rows(call, x)
    if seen is None:
        weights = call.variant.weights(x, rows)
    else:
        weights = torch.where(seen, call.variant.weights(torch.where(seen, x, 0), rows), call.variant.hidden)
    drop = dropout_factor(call, weights)
    if drop is not None:
        weights = weights * drop
    return weights.to(q.dtype) @ v
