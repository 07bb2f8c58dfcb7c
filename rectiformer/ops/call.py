"""One attention call after its arguments were checked: which keys each query sees, and what shapes the weights.

Query m of M stands at key position m + (N - M): the last query is aligned with the last key (bottom-right). With that,
a causal query sees keys up to its position, and a window (left, right) those from position - left to position + right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rectiformer.ops.activations import Value, subtract
from rectiformer.ops.variants import Variant, find_variant

UNBOUNDED = 1 << 30
"""Longer than any sequence, and still 32 bits when a position is added: the width of a window that is not there."""

HIDING = -5e3
"""A bias of this or less hides its key: -inf, the lowest number of a dtype, -1e9 and -10000 are all in use as masks."""


def shown_by(bias: Tensor) -> Tensor:
    """THE rule for numbers that are added to scores and used as masks: True where a key stays visible, NaN included."""
    return ~(bias <= HIDING)


def count_true(mask: Tensor) -> Tensor:
    """How many cells of the last axis are True. Eager `mask.sum(-1)` would first copy the mask to 64 bits per cell."""
    if torch.compiler.is_compiling():  # which copies nothing, and may not know the sizes
        return mask.sum(-1)
    pieces = mask.shape[-1] // 128
    whole = mask[..., : pieces * 128].unflatten(-1, (pieces, 128)).sum(-1, dtype=torch.uint8)  # at most 128 each
    return whole.sum(-1) + mask[..., pieces * 128 :].sum(-1, dtype=torch.uint8)


def slice_rows(cells: Tensor | None, start: int, stop: int) -> Tensor | None:
    """Rows `start` to `stop` of a mask or bias that broadcasts to [B, H, M, N]."""
    return cells if cells is None or cells.shape[2] == 1 else cells[:, :, start:stop]


@dataclass(frozen=True)
class Visibility:
    """The keys that M queries see of N, for a whole call or, after `slice_queries`, for some of its queries."""

    queries: int
    keys: int
    left: int = UNBOUNDED
    right: int = UNBOUNDED
    key_lengths: Tensor | None = None  # [B]
    attn_mask: Tensor | None = None  # bool, broadcasts to [B, H, M, N]
    first: int = 0
    """Key position of query 0."""

    @property
    def hides_later(self) -> bool:
        """Whether causal order or a window hides a key that comes after some query's position."""
        return self.right < self.keys - 1 - self.first

    @property
    def hides_earlier(self) -> bool:
        return self.left < self.first + self.queries - 1

    @property
    def banded(self) -> bool:
        return self.hides_later or self.hides_earlier

    def slice_queries(self, start: int, stop: int) -> Visibility:
        """The same rule for queries `start` to `stop` only."""
        mask = slice_rows(self.attn_mask, start, stop)
        return replace(self, queries=stop - start, attn_mask=mask, first=self.first + start)

    def mask(self, device: torch.device) -> Tensor | None:
        """True where a query sees a key, in four axes that broadcast to [B, H, M, N]; None when all is seen."""
        parts = []
        keys = torch.arange(self.keys, device=device)
        position = torch.arange(self.first, self.first + self.queries, device=device)[:, None]  # [M, 1]
        if self.hides_later:
            parts.append((keys <= position + self.right)[None, None])
        if self.hides_earlier:
            parts.append((keys >= position - self.left)[None, None])
        if self.key_lengths is not None:
            parts.append((keys < self.key_lengths.to(device)[:, None])[:, None, None])  # [B, 1, 1, N]
        if self.attn_mask is not None:
            parts.append(self.attn_mask)
        if not parts:
            return None
        seen = parts[0]
        for part in parts[1:]:
            seen = seen & part
        return seen

    def counts(self, device: torch.device) -> Tensor:
        """How many keys each query sees, in three axes that broadcast to [B, H, M]; M x N only for `attn_mask`."""
        if self.attn_mask is not None:
            seen = self.mask(device)
            assert seen is not None
            return count_true(seen.expand(*seen.shape[:3], self.keys))
        position = torch.arange(self.first, self.first + self.queries, device=device)  # [M]
        end = torch.full((), self.keys, device=device) if self.key_lengths is None else self.key_lengths[:, None, None]
        stop = torch.minimum(position + self.right + 1, end) if self.hides_later else end
        start = (position - self.left).clamp_min(0) if self.hides_earlier else 0 * position
        return (stop - start).clamp_min(0).expand(end.shape[0] if end.dim() else 1, 1, self.queries)


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

    def blocks(self, step: int) -> Iterator[tuple[slice, AttentionCall]]:
        """The call for `step` queries at a time: which queries, and the call for them."""
        for block in spans(self.visibility.queries, step):
            yield block, self.slice_queries(block.start, block.stop)

    def views(self, q: Tensor, k: Tensor) -> list[tuple[Tensor, Tensor, AttentionCall]]:
        """Queries, keys and the call of each view of a call whose weights are a difference."""
        row = find_variant(self.variant.difference_of)
        alone = replace(self, variant=row, options={name: self.options[name] for name in row.options})
        return [(*view, alone) for view in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True)]

    def slice_queries(self, start: int, stop: int) -> AttentionCall:
        """The same call for queries `start` to `stop` only."""
        seen, attn_bias = self.visibility.slice_queries(start, stop), slice_rows(self.attn_bias, start, stop)
        return replace(self, visibility=seen, attn_bias=attn_bias, origin=(self.origin[0] + start, self.origin[1]))


def run_views(
    function: Callable[[Tensor, Tensor, AttentionCall], Tensor], q: Tensor, k: Tensor, call: AttentionCall
) -> Tensor:
    """What `function`, linear in the weights, makes of a call whose weights are a difference: that of its views.

    Both have the seed of the call, so the same cells are dropped.
    """
    first, second = (function(*view) for view in call.views(q, k))
    return subtract(first, second, call.options["lam"])


Run = Callable[[Tensor, Tensor, Tensor, AttentionCall], Tensor]
"""An implementation: q, k, v and the call to the mixed values [B, H, M, Dv] in the dtype of q."""


def spans(size: int, step: int) -> Iterator[slice]:
    """An axis of this size, `step` at a time; one empty span where the size is 0."""
    for start in range(0, max(1, size), step):
        yield slice(start, min(start + step, size))


@dataclass(frozen=True)
class Packing:
    """Sequences laid end to end: s owns queries cu_seqlens_q[s] to cu_seqlens_q[s + 1], and keys likewise."""

    cu_seqlens_q: Tensor  # [sequences + 1]
    cu_seqlens_k: Tensor
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None

    def split(
        self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, AttentionCall]]:
        """One call for each sequence of [1, H, total, D]; reads cu_seqlens on the host."""
        starts, key_starts = self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist()
        for start, stop, key_start, key_stop in zip(starts, starts[1:], key_starts, key_starts[1:], strict=False):
            M, N = stop - start, key_stop - key_start
            seen = Visibility(M, N, call.visibility.left, call.visibility.right, first=N - M)
            rows, keys = slice(start, stop), slice(key_start, key_stop)
            alone = replace(call, visibility=seen, origin=(start, key_start))
            yield q[:, :, rows], k[:, :, keys], v[:, :, keys], alone
