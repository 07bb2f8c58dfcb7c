"""The definition: every variant in plain torch, readable, exact, differentiable as often as you like.

Whatever is faster elsewhere is compared with this file, value and gradients, over the whole table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rectiformer.ops.activations import Rows, Value
from rectiformer.ops.dropout import keep_cells
from rectiformer.ops.variant import Variant
from rectiformer.ops.visibility import Visibility, shown_by


@dataclass(frozen=True)
class AttentionCall:
    """One attention call after its arguments were checked: what every implementation is handed."""

    variant: Variant
    visibility: Visibility
    options: dict[str, Value]
    scale: float
    attn_bias: Tensor | None = None  # four axes, broadcasts to [B, H, M, N]
    dropout_p: float = 0.0
    seed: Tensor | None = None
    origin: tuple[int, int] = (0, 0)
    """Row and column of cell (0, 0) in the dropout pattern of a packed batch."""

    @property
    def seen(self) -> Visibility:
        """What `visibility` shows, less the keys that the bias hides. Its mask is as large as the bias: ask once."""
        if self.attn_bias is None:
            return self.visibility
        shown, mask = shown_by(self.attn_bias), self.visibility.attn_mask
        return replace(self.visibility, attn_mask=shown if mask is None else mask & shown)

    @property
    def counts_cells(self) -> bool:
        """Whether a row's keys can only be counted one by one: a mask or a bias may hide any of them."""
        return self.attn_bias is not None or self.visibility.attn_mask is not None

    def rows(self, start: int, stop: int) -> AttentionCall:
        """The same call for queries `start` to `stop` only."""
        attn_bias = self.attn_bias
        if attn_bias is not None and attn_bias.shape[2] > 1:
            attn_bias = attn_bias[:, :, start:stop]
        origin = (self.origin[0] + start, self.origin[1])
        return replace(self, visibility=self.visibility.rows(start, stop), attn_bias=attn_bias, origin=origin)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """16-bit inputs are computed in float32; wider ones in their own dtype."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def repeat_heads(kv: Tensor, heads: int) -> Tensor:
    """Keys or values [B, K, N, D] once for each of `heads` query heads: query head h reads head h // (heads / K)."""
    B, K, N, D = kv.shape
    if heads == K:
        return kv
    # In the sizes of the queries: where sizes are symbolic, K * (heads // K) is not known to be `heads`.
    return kv[:, :, None].expand(B, K, heads // K, N, D).reshape(B, heads, N, D)


def clear_padding(kv: Tensor, visibility: Visibility) -> Tensor:
    """Keys or values with zeros beyond each sequence's length, so that no NaN in the padding can reach a sum."""
    if visibility.key_lengths is None:
        return kv
    real = torch.arange(kv.shape[2], device=kv.device) < visibility.key_lengths.to(kv.device)[:, None]
    return torch.where(real[:, None, :, None], kv, 0)


def visible_rows(call: AttentionCall, like: Tensor) -> tuple[Tensor | None, Rows]:
    """The visibility mask, and what weight functions may know of each row."""
    visibility = call.seen
    seen = visibility.mask(like.device)
    safe = None if seen is None else seen | ~seen.any(-1, keepdim=True)
    count = visibility.counts(like.device).clamp_min(1).to(like.dtype)[..., None]
    return seen, Rows(safe, count, call.options)


def reference_weights(q: Tensor, k: Tensor, call: AttentionCall, precision: torch.dtype | None = None) -> Tensor:
    """Weights [B, H, M, N] before dropout, in `precision` (the working dtype of q unless given), whatever autocast."""
    precision = precision or working_dtype(q.dtype)
    k = repeat_heads(clear_padding(k, call.visibility), q.shape[1])
    with torch.autocast(q.device.type, enabled=False):
        x = call.variant.score(q.to(precision), k.to(precision)) * call.scale  # [B, H, M, N]
        if call.attn_bias is not None:
            x = x + call.attn_bias.to(precision)
        seen, rows = visible_rows(call, x)
        if seen is None:
            return call.variant.weights(x, rows)
        return torch.where(seen, call.variant.weights(torch.where(seen, x, 0), rows), call.variant.hidden)


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, precision: torch.dtype | None = None
) -> Tensor:
    """Mixed values [B, H, M, Dv] in the dtype of q."""
    weights = reference_weights(q, k, call, precision)
    v = repeat_heads(clear_padding(v, call.visibility), q.shape[1]).to(weights.dtype)
    with torch.autocast(q.device.type, enabled=False):
        return call.variant.mix(weights, v, dropout_factor(call, weights)).to(q.dtype)


def dropout_factor(call: AttentionCall, weights: Tensor) -> Tensor | None:
    """0 for dropped cells and 1 / (1 - dropout) for the rest, or None without dropout."""
    if not call.dropout_p:
        return None
    assert call.seed is not None
    batch, heads, queries, keys = weights.shape
    row, column = call.origin
    keep = keep_cells(
        call.seed,
        call.dropout_p,
        (0, batch),
        (0, heads),
        (row, row + queries),
        (column, column + keys),
        all_heads=heads,
    )
    return keep.to(weights.dtype) / (1 - call.dropout_p)
