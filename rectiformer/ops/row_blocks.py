"""Plain implementations a few query rows at a time, each computed again for its gradient: nothing M x N is held.

For calls whose scores, kept until the backward pass, would fill a device: a third more work, and any length fits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rectiformer.ops.reference import AttentionCall, working_dtype

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
