"""Attention to a cache: a few queries per row against keys and values of earlier steps, by kernels or step by step.

For inference only. The newest key and value are written to the cache on the way, and the hypotheses of a beam find
theirs by an index of ancestors, so that nothing in the cache ever moves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rectiformer.errors import ArgumentError, ShapeError
from rectiformer.ops.activations import Value, subtract
from rectiformer.ops.attention import (
    Window,
    check_number,
    check_options,
    check_window,
    run,
    shortcut_key,
    transform_obstacle,
)
from rectiformer.ops.call import UNBOUNDED, AttentionCall, Visibility
from rectiformer.ops.gpu import cached_products_suit, decode_obstacle, wants_gradients
from rectiformer.ops.gpu.plans import PlanCache
from rectiformer.ops.norm import OutputNorm, norm_heads
from rectiformer.ops.shapes import describe, match_floating, match_heads, match_shapes
from rectiformer.ops.variants import find_variant

if TYPE_CHECKING:
    from rectiformer.ops.gpu.decode import DecodePlan  # which imports Triton

SHORTCUTS: PlanCache[DecodePlan | None] = PlanCache()
"""As for `attention`."""


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    variant: str = "rela",
    *,
    key_lengths: Tensor,
    new_kv: tuple[Tensor, Tensor] | None = None,
    ancestors: Tensor | None = None,
    window_size: Window | None = None,
    scale: float | None = None,
    norm: OutputNorm | None = None,
    splits: int | None = None,
    skip: bool | None = None,
    **options: Value,
) -> Tensor:
    """The cached values that each query sees, weighted and summed: [R, H, Q, Dv], by the kernels where they can run.

    Every query of a row stands at the row's last key and sees all keys up to it, or those of its window.

    Args:
        q: [R, H, Q, D]; all queries of a row and of the heads that share a key head read the keys once.
        k_cache, v_cache: [rows, K, capacity, D] and [rows, K, capacity, Dv]; anything may lie beyond the lengths.
        variant: a name from `rectiformer.VARIANTS`.
        key_lengths: [R], or [1] for all: how many keys a row has, a new one included. Read on the device only.
        new_kv: the key and value [R, K, 1, D or Dv] of the last position, written to row r of the cache.
        ancestors: int32 [R, capacity], the cache row that holds position n of row r; row r itself unless given.
        window_size: (left, right), or left alone: a query sees left keys before its own position.
        scale: factor of the scores, as for `attention`.
        norm: the output norm, over all heads.
        splits: programs that share the keys of a head; chosen by the shapes unless given.
        skip: whether the value of a key of weight 0 is left unread, which is exact; chosen by the shapes unless given.
        options: the variant's own.
    """
    new, vectors = new_kv or (None, None), (None, None) if norm is None else (norm.gain, norm.gate)
    chosen = (variant, window_size, scale, splits, skip, norm and norm.epsilon, wants_gradients(q, k_cache, v_cache))
    key = shortcut_key(chosen, options, q, k_cache, v_cache, *new, key_lengths, ancestors, *vectors)
    if key is not None and (plan := SHORTCUTS.get(key)) is not None:
        tables = (*new, key_lengths, ancestors, *vectors)
        return plan.step([q, k_cache, v_cache, *[table for table in tables if table is not None]])
    check_decoding(q, k_cache, v_cache, key_lengths, new_kv, ancestors)
    row, Q, capacity = find_variant(variant), q.shape[2], k_cache.shape[2]
    left, _ = check_window(window_size, causal=True)
    visibility = Visibility(Q, capacity, left, UNBOUNDED, key_lengths, first=capacity - Q)
    row.check_head_size(q.shape[3])
    scale = (q.shape[3] // row.views) ** -0.5 if scale is None else check_number("scale", scale)
    call = AttentionCall(row, visibility, check_options(row, options, q.shape[1], decode_attention), scale)
    view_q, keys, view = call.views(q, k_cache)[0] if row.difference_of else (q, k_cache, call)
    if decode_obstacle(view_q, keys, v_cache, view) or transform_obstacle():
        out = plain_decoding(q, k_cache, v_cache, call, new_kv, ancestors)
        return out if norm is None else norm_heads(out, norm)
    from rectiformer.ops.gpu.decode import fused_decoding, plan_decoding

    given: dict[str, Any] = {"ancestors": ancestors, "splits": splits, "skip": skip}
    if row.difference_of:
        out = decode_views(q, k_cache, v_cache, call, new_kv, **given)
        return out if norm is None else norm_heads(out, norm)
    given |= {"new": new_kv, "norm": norm}
    if key is not None and key not in SHORTCUTS:
        SHORTCUTS.keep(key, plan_decoding(q, k_cache, v_cache, call, **given))
    return fused_decoding(q, k_cache, v_cache, call, **given)


def decode_views(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    call: AttentionCall,
    new_kv: tuple[Tensor, Tensor] | None,
    **given: Any,
) -> Tensor:
    """`fused_decoding` where weights are a difference. Each view writes its half of the key, and both the value."""
    from rectiformer.ops.gpu.decode import fused_decoding

    halves = [None] * 2 if new_kv is None else [(half, new_kv[1]) for half in new_kv[0].chunk(2, -1)]
    first, second = (
        fused_decoding(view_q, keys, v_cache, view, new=new, **given)
        for (view_q, keys, view), new in zip(call.views(q, k_cache), halves, strict=True)
    )
    return subtract(first, second, call.options["lam"])


def check_decoding(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    key_lengths: Tensor,
    new_kv: tuple[Tensor, Tensor] | None,
    ancestors: Tensor | None,
) -> None:
    """Refuse what does not fit together, in one line that names it."""
    rows = "R" if ancestors is None else "rows"
    named = {
        "q": (q, "R H Q D"),
        "k_cache": (k_cache, f"{rows} K capacity D"),
        "v_cache": (v_cache, f"{rows} K capacity Dv"),
    }
    if new_kv is not None:
        named |= {"new key": (new_kv[0], "R K 1 D"), "new value": (new_kv[1], "R K 1 Dv")}
    match_floating(**{name: tensor for name, (tensor, _) in named.items()})
    if ancestors is not None:
        named["ancestors"] = (ancestors, "R capacity")
        if ancestors.dtype != torch.int32:
            raise ArgumentError(f"ancestors holds {ancestors.dtype}, but rows are counted in torch.int32")
    sizes = match_shapes(**named)
    match_heads(sizes, "k_cache", named)
    if sizes.get("1", 1) != 1:
        raise ShapeError(f"new key has {sizes['1']} positions, but one is written at a time; {describe(named)}")
    if key_lengths.shape not in ((sizes["R"],), (1,)):
        raise ShapeError(f"key_lengths is {list(key_lengths.shape)}, but it needs [{sizes['R']}], one per row, or [1]")
    if key_lengths.is_floating_point() or key_lengths.dtype == torch.bool:
        raise ArgumentError(f"key_lengths holds {key_lengths.dtype}, but lengths are whole numbers")


def plain_decoding(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    call: AttentionCall,
    new_kv: tuple[Tensor, Tensor] | None,
    ancestors: Tensor | None,
) -> Tensor:
    """Write and attend one after the other: any variant on any device, to a copy of the keys where no kernel reads
    the cache itself."""
    seen, R = call.visibility, len(q)
    assert seen.key_lengths is not None
    lengths = seen.key_lengths.expand(R).contiguous()  # kernels read them by address
    if new_kv is not None:
        own = torch.arange(R, device=q.device)
        for cache, added in zip((k_cache, v_cache), new_kv, strict=True):
            cache[own, :, lengths - 1] = added[:, :, 0]
    mask = None
    if seen.left < seen.keys - 1:
        mask = (torch.arange(seen.keys, device=q.device) >= (lengths - 1 - seen.left)[:, None])[:, None, None]
    visibility = Visibility(seen.queries, seen.keys, key_lengths=lengths, attn_mask=mask, first=seen.first)
    call = replace(call, visibility=visibility)
    if cached_products_suit(q, k_cache, v_cache, call):
        from rectiformer.ops.gpu.cached_products import cached_products

        return cached_products(q, k_cache, v_cache, call, seen.left, ancestors)
    if ancestors is not None:
        k_cache, v_cache = follow(k_cache, ancestors), follow(v_cache, ancestors)
    return run(q, k_cache, v_cache, call, "auto")


def follow(cache: Tensor, ancestors: Tensor) -> Tensor:
    """Keys or values [R, K, capacity, D] of the rows that `ancestors` [R, capacity] spells out, from a cache."""
    positions = torch.arange(ancestors.shape[1], device=cache.device)
    return cache.transpose(1, 2)[ancestors, positions].transpose(1, 2)
