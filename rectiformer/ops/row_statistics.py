"""Attention that also tells how heavy each row of weights is and how it spreads, with gradients, and no M x N of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rectiformer.errors import ArgumentError
from rectiformer.ops.activations import Rows
from rectiformer.ops.dispatch import transform_obstacle
from rectiformer.ops.long_rows import long_rows_attention, long_rows_obstacle
from rectiformer.ops.packing import Packing
from rectiformer.ops.reference import AttentionCall, clear_padding, dropout_factor, reference_weights, repeat_heads

BLOCK_CELLS = 1 << 20
"""Weights computed at once where no kernel does it."""


@dataclass(frozen=True)
class RowStatistics:
    """Each row of weights w before dropout, of their size where they are signed, with gradients: float32 [B, H, M]."""

    mass: Tensor
    """The sum of w."""
    entropy: Tensor
    """Entropy in nats of the row divided by its sum; 0 for a row without weights."""
    visible: Tensor
    """Keys the query sees; broadcasts to the others."""

    @property
    def raw_entropy(self) -> Tensor:
        """-sum of w log w, of the weights as they are: a row of mass m has m (entropy - log m)."""
        return self.mass * (self.entropy - nonzero(self.mass).log())


def attention_with_rows(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, packing: Packing | None = None
) -> tuple[Tensor, RowStatistics]:
    """What `dispatch.run` returns, and the statistics of each row of weights; both are differentiable.

    Rectified variants on a GPU get both from one pass of the fused kernels. Others, and the CPU, get them from the
    reference, a few rows at a time, which are computed again for the gradients.
    """
    if not call.variant.has_weights:
        raise ArgumentError(f"variant {call.variant.name!r} subtracts instead of weighing, so its rows have no sums")
    if not (long_rows_obstacle(q, k, v, call) or transform_obstacle()):
        return fused_rows(q, k, v, call, packing)
    if packing is None:
        return plain_rows(q, k, v, call)
    return join([plain_rows(*alone) for alone in packing.split(q, k, v, call)])


def fused_rows(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, packing: Packing | None
) -> tuple[Tensor, RowStatistics]:
    """By the kernels for long sequences, whatever the length."""
    out, total, entropy = long_rows_attention(q, k, v, call, packing)
    visible = call.seen.counts(q.device) if packing is None else packed_counts(call, packing)
    if call.variant.row_scale is None:
        return out, RowStatistics(total, entropy, visible)
    count = visible.clamp_min(1).float()[..., None]
    scale = call.variant.row_scale(Rows(None, count, call.options)).squeeze(-1)
    return out, RowStatistics(scale * total, entropy, visible)


def packed_counts(call: AttentionCall, packing: Packing) -> Tensor:
    """Keys that each query of sequences laid end to end sees, without waiting for their lengths: [1, 1, total]."""
    bounds_q, bounds_k, seen = packing.bounds_q, packing.bounds_k, call.visibility
    query = torch.arange(seen.queries, dtype=bounds_q.dtype, device=bounds_q.device)
    owner = torch.searchsorted(bounds_q, query, right=True)
    keys = bounds_k[owner] - bounds_k[owner - 1]
    position = query - bounds_q[owner] + keys  # a sequence's last query is aligned with its last key
    stop = torch.minimum(position + seen.right + 1, keys)
    return (stop - (position - seen.left).clamp_min(0)).clamp_min(0)[None, None]


def plain_rows(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, RowStatistics]:
    """By the reference, a block of query rows at a time; of several, none is kept for the backward pass."""
    M = q.shape[2]
    step = max(1, BLOCK_CELLS // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    if step >= M:
        return sum_rows(q, k, v, call)
    parts = []
    for start in range(0, M, step):
        stop = min(start + step, M)
        rows = (q[:, :, start:stop], k, v, call.rows(start, stop))
        # Dropout is a function of its seed, so there is no state of a generator to keep.
        parts.append(checkpoint(sum_rows, *rows, use_reentrant=False, preserve_rng_state=False))
    return join(parts)


def sum_rows(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, RowStatistics]:
    """Mixed values and sums of some rows from all their weights, in the dtype the reference works in."""
    with torch.autocast(q.device.type, enabled=False):
        weights = reference_weights(q, k, call)
        v = repeat_heads(clear_padding(v, call.visibility), q.shape[1]).to(weights.dtype)
        out = call.variant.mix(weights, v, dropout_factor(call, weights)).to(q.dtype)
    size = weights.abs()
    mass = size.sum(-1)
    share = size / nonzero(mass)[..., None]
    entropy = -(share * nonzero(share).log()).sum(-1)
    return out, RowStatistics(mass, entropy, call.seen.counts(q.device))


def nonzero(values: Tensor) -> Tensor:
    """The values with 1 for 0: its logarithm is 0 and has no slope."""
    return torch.where(values > 0, values, 1)


def join(parts: list[tuple[Tensor, RowStatistics]]) -> tuple[Tensor, RowStatistics]:
    """Rows that follow each other as one."""
    outs, rows = zip(*parts, strict=True)
    fields = [[each.mass for each in rows], [each.entropy for each in rows], [each.visible for each in rows]]
    return torch.cat(outs, 2), RowStatistics(*(torch.cat(field, 2) for field in fields))
