"""The softmax by torch's own fused kernels, for what ours do not take: long sequences in 16 bits.

It is the peer that rectified attention is compared with, so it has to be as good as people have it. Dropout, a bias and
second derivatives are left to plain products: torch's kernels drop cells of their own choice, and differentiate once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rectiformer.ops.reference import AttentionCall, clear_padding


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
