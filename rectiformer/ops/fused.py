"""Which fused kernel takes a call."""

from __future__ import annotations

from torch import Tensor

from rectiformer.ops.call import AttentionCall, Packing
from rectiformer.ops.long import long_attention, long_obstacle
from rectiformer.ops.short import short_attention, short_obstacle


def fused_attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, packing: Packing | None = None) -> Tensor:
    """`reference_attention` by kernels that never hold M x N of anything in memory."""
    short = not short_obstacle(q, k, v, call, packing)
    return (short_attention if short else long_attention)(q, k, v, call, packing)


def fused_obstacle(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, packing: Packing | None = None) -> str:
    """Why no fused kernel can take this call; empty when one can."""
    return short_obstacle(q, k, v, call, packing) and long_obstacle(q, k, v, call)
