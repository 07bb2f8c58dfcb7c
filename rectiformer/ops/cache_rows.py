"""Decoding of any variant made of two products, `rectiformer::cache_scores` and `rectiformer::cache_mix`, Triton only.

Keys and values are read where they lie in the cache, and what the variant makes of a row of scores is plain torch or a
kernel of its own. Scores and weights are float32. It has no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rectiformer.ops import launching
from rectiformer.ops.call import AttentionCall
from rectiformer.ops.decode import LARGEST_HEAD, MOST_QUERIES, TILE, count_splits, queries_a_key_head
from rectiformer.ops.plain import plain_weights
from rectiformer.ops.simplex_rows import kernels_suit, simplex_weights

MOST_POSITIONS = 128
"""Positions that a program holds at once, of heads that are small enough."""
MOST_PROGRAMS = 256
"""Programs that share the scores of a key head."""


def cache_suits(q: Tensor, keys: Tensor, values: Tensor, call: AttentionCall) -> bool:
    """Whether the kernels can take this call."""
    if not launching.TRITON or "products" not in call.variant.implementations or launching.transforms_active():
        return False
    if not (q.device.type == "cuda" or launching.interpreting()):
        return False
    if q.dtype not in launching.DTYPES or not q.dtype == keys.dtype == values.dtype:
        return False
    if torch.is_grad_enabled():
        options = [value for value in call.options.values() if isinstance(value, Tensor)]
        if any(tensor.requires_grad for tensor in (q, keys, values, *options)):
            return False
    fits = max(q.shape[3], values.shape[3]) <= LARGEST_HEAD and queries_a_key_head(q, keys) <= MOST_QUERIES
    return fits and 0 not in (*q.shape, *values.shape)


def cache_attention(
    q: Tensor, keys: Tensor, values: Tensor, call: AttentionCall, left: int, ancestors: Tensor | None
) -> Tensor:
    """Mixed values [R, H, Q, Dv] of a call whose visibility has the length of every row, and a mask if `left` asks."""
    lengths = call.visibility.key_lengths
    assert lengths is not None
    scores = cache_scores(q, keys, lengths, ancestors, left)
    weights = simplex_weights(scores, call) if kernels_suit(q, call) else plain_weights(scores, call)
    return cache_mix(weights, values, lengths, ancestors, left, count_splits(q, keys), q.dtype)


@torch.library.custom_op("rectiformer::cache_scores", mutates_args=())
def cache_scores(q: Tensor, keys: Tensor, lengths: Tensor, ancestors: Tensor | None, left: int) -> Tensor:
    """Products [R, H, Q, room] of queries and keys, unscaled; anything where a query sees no key."""
    from rectiformer.ops.kernels.cache_rows import cache_scores as kernel

    (R, H, Q, D), (_, K, room, _) = q.shape, keys.shape
    scores = q.new_empty(R, H, Q, room, dtype=torch.float32)
    positions = block_positions(D, room)
    with torch.cuda.device_of(q):  # Triton launches on the current device
        kernel[(R, K, min(MOST_PROGRAMS, -(-room // positions)))](
            q, keys, lengths.contiguous(), launching.table(ancestors, q), scores, *q.stride(), *keys.stride(),
            H, K, Q, room, D, left, INDEXED=ancestors is not None, BLOCK_N=positions, BLOCK_D=launching.block(D),
        )  # fmt: skip
    return scores


@torch.library.custom_op("rectiformer::cache_mix", mutates_args=())
def cache_mix(
    weights: Tensor,
    values: Tensor,
    lengths: Tensor,
    ancestors: Tensor | None,
    left: int,
    splits: int,
    dtype: torch.dtype,
) -> Tensor:
    """Sums [R, H, Q, Dv] of values, in the memory order of `heads_last`; splits share the positions of a row."""
    from rectiformer.ops.kernels.cache_rows import cache_mix as kernel

    weights = weights.contiguous()
    (R, H, Q, _), (_, K, room, Dv) = weights.shape, values.shape
    parts = weights.new_empty(splits, R, Q, H, Dv, dtype=dtype if splits == 1 else torch.float32)
    with torch.cuda.device_of(weights):
        kernel[(R, H * Q, splits)](
            weights, values, lengths.contiguous(), launching.table(ancestors, weights), parts, *values.stride(),
            *parts.stride(), H, K, Q, room, Dv, left,
            INDEXED=ancestors is not None, BLOCK_N=block_positions(Dv, room), BLOCK_DV=launching.block(Dv),
        )  # fmt: skip
    return (parts[0] if splits == 1 else parts.sum(0).to(dtype)).transpose(1, 2)


def block_positions(size: int, room: int) -> int:
    """Positions of a block, 32 numbers for each thread, or fewer where there is little room."""
    return min(MOST_POSITIONS, TILE // launching.block(size), launching.block(room))


@cache_scores.register_fake
def _(q: Tensor, keys: Tensor, *_: object) -> Tensor:
    return q.new_empty(*q.shape[:3], keys.shape[2], dtype=torch.float32)


@cache_mix.register_fake
def _(
    weights: Tensor, values: Tensor, lengths: Tensor, ancestors: Tensor | None, left: int, splits: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return launching.heads_last(weights, values.shape[3]).to(dtype)
