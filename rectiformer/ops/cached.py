"""Attention to a cache: a few queries a row against keys and values of earlier steps, by kernels or step by step.

For inference only. The newest key and value are written to the cache on the way, and a beam's hypotheses find theirs by
an index of ancestors, so that nothing in the cache ever moves.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rectiformer.errors import ArgumentError, ShapeError
from rectiformer.ops.activations import Value
from rectiformer.ops.attention import check_head_options, run, transform_obstacle
from rectiformer.ops.cache_rows import cache_attention, cache_suits
from rectiformer.ops.call import UNBOUNDED, AttentionCall, Visibility
from rectiformer.ops.decode import OutputNorm, decode_obstacle, fused_decoding, norm_heads
from rectiformer.ops.shapes import describe, match_floating, match_heads, match_shapes
from rectiformer.ops.variants import find_variant


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    variant: str = "rela",
    *,
    lengths: Tensor,
    new: tuple[Tensor, Tensor] | None = None,
    ancestors: Tensor | None = None,
    left: int = UNBOUNDED,
    scale: float | None = None,
    norm: OutputNorm | None = None,
    splits: int | None = None,
    skip: bool | None = None,
    **options: Value,
) -> Tensor:
    """Mix the cached values that each query sees: [R, H, Q, Dv], by the kernels where they can run.

    Every query of a row stands at the row's last key and sees all keys up to it, or the last left + 1 of them.

    Args:
        q: [R, H, Q, D]; all queries of a row and of the heads that share a key head read the keys once.
        keys, values: the cache, [rows, K, room, D] and [rows, K, room, Dv]; room beyond the lengths may hold anything.
        variant: a name from `rectiformer.VARIANTS`.
        lengths: [R], or [1] for all: how many keys a row has, a new one included. Read on the device only.
        new: the key and value [R, K, 1, D or Dv] of the last position, written to row r of the cache.
        ancestors: int32 [R, room], the cache row that holds position n of row r; row r itself unless given.
        left: keys before its own position that a query sees.
        scale: factor of the scores, 1 / sqrt(D) unless given.
        norm: the output norm, over all heads.
        splits: programs that share the keys of a head; chosen by the shapes unless given.
        skip: whether the value of a key of weight 0 is left unread, which is exact; chosen by the shapes unless given.
        options: the variant's own numbers.
    """
    check_decoding(q, keys, values, lengths, new, ancestors)
    row, Q, room = find_variant(variant), q.shape[2], keys.shape[2]
    visibility = Visibility(Q, room, left, UNBOUNDED, lengths, first=room - Q)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    call = AttentionCall(row, visibility, check_head_options(row.resolve_options(options), q.shape[1]), scale)
    if decode_obstacle(q, keys, values, call) or transform_obstacle():
        out = plain_decoding(q, keys, values, call, new, ancestors)
        return out if norm is None else norm_heads(out, norm)
    return fused_decoding(q, keys, values, call, new, ancestors, norm, splits, skip)


def check_decoding(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    new: tuple[Tensor, Tensor] | None,
    ancestors: Tensor | None,
) -> None:
    """Refuse what does not fit together, in one line that names it."""
    rows = "R" if ancestors is None else "rows"
    named = {"q": (q, "R H Q D"), "keys": (keys, f"{rows} K room D"), "values": (values, f"{rows} K room Dv")}
    if new is not None:
        named |= {"new key": (new[0], "R K 1 D"), "new value": (new[1], "R K 1 Dv")}
    match_floating(**{name: tensor for name, (tensor, _) in named.items()})
    if ancestors is not None:
        named["ancestors"] = (ancestors, "R room")
        if ancestors.dtype != torch.int32:
            raise ArgumentError(f"ancestors holds {ancestors.dtype}, but rows are counted in torch.int32")
    sizes = match_shapes(**named)
    match_heads(sizes, "keys", named)
    if sizes.get("1", 1) != 1:
        raise ShapeError(f"new key has {sizes['1']} positions, but one is written at a time; {describe(named)}")
    if lengths.shape not in ((sizes["R"],), (1,)):
        raise ShapeError(f"lengths is {list(lengths.shape)}, but it needs [{sizes['R']}], one a row, or [1]")


def plain_decoding(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    call: AttentionCall,
    new: tuple[Tensor, Tensor] | None,
    ancestors: Tensor | None,
) -> Tensor:
    """Write and attend one after the other: any variant on any device, to a copy of the keys where no kernel reads
    the cache itself."""
    seen, R = call.visibility, len(q)
    assert seen.key_lengths is not None
    lengths = seen.key_lengths.expand(R).contiguous()  # kernels read them by address
    if new is not None:
        own = torch.arange(R, device=q.device)
        for held, added in zip((keys, values), new, strict=True):
            held[own, :, lengths - 1] = added[:, :, 0]
    mask = None
    if seen.left < seen.keys - 1:
        mask = (torch.arange(seen.keys, device=q.device) >= (lengths - 1 - seen.left)[:, None])[:, None, None]
    visibility = Visibility(seen.queries, seen.keys, key_lengths=lengths, attn_mask=mask, first=seen.first)
    call = replace(call, visibility=visibility)
    if cache_suits(q, keys, values, call):
        return cache_attention(q, keys, values, call, seen.left, ancestors)
    if ancestors is not None:
        keys, values = follow(keys, ancestors), follow(values, ancestors)
    return run(q, keys, values, call, "auto")


def follow(held: Tensor, ancestors: Tensor) -> Tensor:
    """Keys or values [R, K, room, D] of the rows that `ancestors` [R, room] spells out, from a cache."""
    positions = torch.arange(ancestors.shape[1], device=held.device)
    return held.transpose(1, 2)[ancestors, positions].transpose(1, 2)
