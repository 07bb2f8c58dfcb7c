"""Attention over packed sequences of different lengths, with no padding between them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rectiformer.errors import ArgumentError, ShapeError
from rectiformer.ops.activations import Value
from rectiformer.ops.dispatch import Window, check_call, check_window, run
from rectiformer.ops.dropout import drop_seed
from rectiformer.ops.shapes import match_shapes


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    variant: str = "rela",
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    backend: str = "auto",
    **options: Value,
) -> Tensor:
    """`attention` within each of several sequences laid end to end.

    Sequence s owns queries cu_seqlens_q[s] to cu_seqlens_q[s + 1] and the keys likewise; it may be empty on either
    side. Each is attended as if it were alone: causal order and window align its last query with its last key.

    Args:
        q: [total queries, H, D].
        k: [total keys, K, D] with K dividing H.
        v: [total keys, K, Dv].
        cu_seqlens_q: [sequences + 1] whole numbers from 0 up to the total, never falling.
        cu_seqlens_k: the same for keys.
    """
    match_shapes(q=(q, "M H D"), k=(k, "N K D"), v=(v, "N K Dv"))
    _check_bounds("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    _check_bounds("cu_seqlens_k", cu_seqlens_k, k.shape[0])
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ShapeError(
            f"cu_seqlens_q is {list(cu_seqlens_q.shape)} but cu_seqlens_k is {list(cu_seqlens_k.shape)}; "
            "both need one entry more than there are sequences"
        )
    drop = drop_seed(seed, q.device) if dropout else None
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, H, total, D]
    if torch.compiler.is_compiling():  # lengths are not known while compiling: one call, other sequences hidden
        seen = _own_keys(q, k, cu_seqlens_q, cu_seqlens_k, *check_window(window, causal))
        call = check_call(q, k, v, variant, False, None, seen, None, None, scale, dropout, drop, options)
        return run(q, k, v, call, backend)[0].transpose(0, 1)
    parts = []
    starts, key_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for start, stop, key_start, key_stop in zip(starts, starts[1:], key_starts, key_starts[1:], strict=False):
        own = q[:, :, start:stop], k[:, :, key_start:key_stop], v[:, :, key_start:key_stop]
        call = check_call(*own, variant, causal, None, None, None, window, scale, dropout, drop, options)
        parts.append(run(*own, replace(call, origin=(start, key_start)), backend))
    return torch.cat(parts, dim=2)[0].transpose(0, 1)


def _check_bounds(name: str, bounds: Tensor, total: int) -> None:
    """Boundaries of sequences: whole numbers from 0 to the total that never fall."""
    if bounds.dim() != 1 or len(bounds) < 2 or bounds.is_floating_point():
        raise ShapeError(f"{name} is {list(bounds.shape)} of {bounds.dtype}; it needs whole numbers, [sequences + 1]")
    if torch.compiler.is_compiling() or bounds.device.type != "cpu":
        return
    if bounds[0] != 0 or bounds[-1] != total or (bounds.diff() < 0).any():
        raise ArgumentError(
            f"{name} runs from {bounds[0]} to {bounds[-1]}; it must rise from 0 to the {total} rows packed"
        )


def _own_keys(q: Tensor, k: Tensor, bounds_q: Tensor, bounds_k: Tensor, left: int, right: int) -> Tensor:
    """True where a query and a key belong to one sequence, within its window: [1, 1, total queries, total keys]."""
    query = torch.arange(q.shape[2], device=q.device)
    key = torch.arange(k.shape[2], device=k.device)
    owner = torch.searchsorted(bounds_q, query, right=True)
    key_owner = torch.searchsorted(bounds_k, key, right=True)
    # A sequence's last query is aligned with its last key.
    position = query - bounds_q[owner] + bounds_k[owner]
    near = (key <= position[:, None] + right) & (key >= position[:, None] - left)
    return ((owner[:, None] == key_owner) & near)[None, None]
