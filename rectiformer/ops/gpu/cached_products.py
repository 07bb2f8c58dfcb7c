"""Decoding by two products where the cache lies, for variants that need all scores of a row before they weigh them.

`rectiformer::cache_scores` and `rectiformer::cache_mix` read keys and values in place, by the ancestors of a beam where
there are any; the weights are made between them. No kernel has a gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rectiformer.ops.autograd import operator
from rectiformer.ops.call import AttentionCall
from rectiformer.ops.gpu import simplex_suits
from rectiformer.ops.gpu.common import block_size, empty_heads_last, pointer
from rectiformer.ops.gpu.decode import cache_rows, load_length
from rectiformer.ops.gpu.decode_tiles import TILE, count_splits
from rectiformer.ops.gpu.simplex import simplex_weights
from rectiformer.ops.plain import plain_weights

CACHE_POSITIONS = 128
"""Positions that a program of `cache_scores` or `cache_mix` holds at once, of heads that are small enough."""
CACHE_PROGRAMS = 256
"""Programs that share the scores of a key head."""


def cached_products(
    q: Tensor, keys: Tensor, values: Tensor, call: AttentionCall, left: int, ancestors: Tensor | None
) -> Tensor:
    """Mixed values [R, H, Q, Dv] of a variant made of two products, whose keys and values are read where they lie.

    The call's visibility has the length of every row, and a mask if `left` asks for one. Scores and weights are
    float32.
    """
    lengths = call.visibility.key_lengths
    assert lengths is not None
    scores = cache_scores(q, keys, lengths, ancestors, left)
    weights = simplex_weights(scores, call) if simplex_suits(q, call) else plain_weights(scores, call)
    return cache_mix(weights, values, lengths, ancestors, left, count_splits(q, keys), q.dtype)


@operator("cache_scores(Tensor q, Tensor keys, Tensor lengths, Tensor? ancestors, SymInt window_left) -> Tensor")
def cache_scores(q: Tensor, keys: Tensor, lengths: Tensor, ancestors: Tensor | None, window_left: int) -> Tensor:
    """Products [R, H, Q, capacity] of queries and keys, unscaled; anything where a query sees no key."""
    (R, H, Q, D), (_, K, capacity, _) = q.shape, keys.shape
    scores = q.new_empty(R, H, Q, capacity, dtype=torch.float32)
    positions = block_positions(D, capacity)
    with torch.cuda.device_of(q):
        cache_scores_kernel[(R, K, min(CACHE_PROGRAMS, -(-capacity // positions)))](
            q, keys, lengths.contiguous(), pointer(ancestors, q), scores, *q.stride(), *keys.stride(),
            H, K, Q, capacity, D, window_left,
            INDEXED=ancestors is not None, BLOCK_N=positions, BLOCK_D=block_size(D),
        )  # fmt: skip
    return scores


@operator(
    "cache_mix(Tensor weights, Tensor values, Tensor lengths, Tensor? ancestors, SymInt window_left, SymInt splits, "
    "ScalarType dtype) -> Tensor"
)
def cache_mix(
    weights: Tensor,
    values: Tensor,
    lengths: Tensor,
    ancestors: Tensor | None,
    window_left: int,
    splits: int,
    dtype: torch.dtype,
) -> Tensor:
    """Sums [R, H, Q, Dv] of values, in memory as [R, Q, H, Dv]; splits share the positions of a row."""
    weights = weights.contiguous()
    (R, H, Q, _), (_, K, capacity, Dv) = weights.shape, values.shape
    parts = weights.new_empty(splits, R, Q, H, Dv, dtype=dtype if splits == 1 else torch.float32)
    with torch.cuda.device_of(weights):
        cache_mix_kernel[(R, H * Q, splits)](
            weights, values, lengths.contiguous(), pointer(ancestors, weights), parts, *values.stride(),
            *parts.stride(), H, K, Q, capacity, Dv, window_left,
            INDEXED=ancestors is not None, BLOCK_N=block_positions(Dv, capacity), BLOCK_DV=block_size(Dv),
        )  # fmt: skip
    return (parts[0] if splits == 1 else parts.sum(0).to(dtype)).transpose(1, 2)


def block_positions(head_dim: int, capacity: int) -> int:
    """Positions of a block, 32 numbers for each thread, or fewer where the cache is short."""
    return min(CACHE_POSITIONS, TILE // block_size(head_dim), block_size(capacity))


@torch.library.register_fake("rectiformer::cache_scores")
def _(q: Tensor, keys: Tensor, *_: object) -> Tensor:
    return q.new_empty(*q.shape[:3], keys.shape[2], dtype=torch.float32)


@torch.library.register_fake("rectiformer::cache_mix")
def _(
    weights: Tensor, values: Tensor, lengths: Tensor, ancestors: Tensor | None, window_left: int, splits: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return empty_heads_last(weights, values.shape[3]).to(dtype)


@triton.jit
def seen_span(lengths_ptr, r, left, capacity, BLOCK_N: tl.constexpr):
    """The first position that queries of row r see, where all end, and where this program's first block begins.

    Only these are read, since the rest of the cache may hold anything. The programs of axis 2 take blocks in turn.
    """
    length = load_length(lengths_ptr, 1, r, capacity)
    first = tl.maximum(length - 1 - left, 0)
    return first, length, (first // BLOCK_N + tl.program_id(2)) * BLOCK_N


@triton.jit
def load_positions(
    ptrs, stride_batch, stride_row, ancestors_ptr, r, n, wanted, inside, capacity,
    INDEXED: tl.constexpr,
):  # fmt: skip
    """Keys or values [BLOCK_N, BLOCK_D] of the wanted positions in float32, zeros elsewhere; `ptrs` are row 0's."""
    rows = cache_rows(ancestors_ptr, capacity, r, n, wanted, INDEXED)
    offsets = rows * stride_batch + n.to(tl.int64) * stride_row
    return tl.load(ptrs + offsets[:, None], mask=wanted[:, None] & inside, other=0.0).to(tl.float32)


@triton.jit
def cache_scores_kernel(
    q_ptr, k_ptr, lengths_ptr, ancestors_ptr, scores_ptr,
    q_batch, q_head, q_row, q_column, k_batch, k_head, k_row, k_column, H, K, Q, capacity, D, left,
    INDEXED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Products of the keys of one head with all queries that read it; scores that no query sees are not written."""
    r, head, group = tl.program_id(0).to(tl.int64), tl.program_id(1), H // K
    d = tl.arange(0, BLOCK_D)[None, :]
    first, length, begin = seen_span(lengths_ptr, r, left, capacity, BLOCK_N)
    k_ptrs = k_ptr + head.to(tl.int64) * k_head + d * k_column
    own_scores = scores_ptr + (r * K + head) * group * Q * capacity
    for start in range(begin, length, tl.num_programs(2) * BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        seen = (n >= first) & (n < length)
        k = load_positions(k_ptrs, k_batch, k_row, ancestors_ptr, r, n, seen, d < D, capacity, INDEXED)
        for m in range(group * Q):  # query m % Q of the group's head m // Q
            q_ptrs = q_ptr + r * q_batch + (head * group + m // Q) * q_head + m % Q * q_row
            q = tl.load(q_ptrs + d * q_column, mask=d < D, other=0.0).to(tl.float32)
            tl.store(own_scores + m * capacity + n, tl.sum(k * q, 1), mask=seen)


@triton.jit
def cache_mix_kernel(
    weights_ptr, v_ptr, lengths_ptr, ancestors_ptr, parts_ptr,
    v_batch, v_head, v_row, v_column, o_split, o_batch, o_row, o_head, o_column, H, K, Q, capacity, Dv, left,
    INDEXED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The values that one query's weights sum up, in the blocks of one split; those of weight 0 are not read."""
    r, h, query = tl.program_id(0).to(tl.int64), tl.program_id(1) // Q, tl.program_id(1) % Q
    dv = tl.arange(0, BLOCK_DV)[None, :]
    first, length, begin = seen_span(lengths_ptr, r, left, capacity, BLOCK_N)
    v_ptrs = v_ptr + (h // (H // K)).to(tl.int64) * v_head + dv * v_column
    own_weights = weights_ptr + (r * H * Q + tl.program_id(1)) * capacity
    mixed = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)  # each position of a block has sums of its own until the end
    for start in range(begin, length, tl.num_programs(2) * BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        weights = tl.load(own_weights + n, mask=(n >= first) & (n < length), other=0.0)
        wanted = weights != 0.0
        if tl.max(wanted.to(tl.int32), 0) > 0:
            v = load_positions(v_ptrs, v_batch, v_row, ancestors_ptr, r, n, wanted, dv < Dv, capacity, INDEXED)
            mixed += weights[:, None] * v
    out = tl.sum(mixed, 0)[None, :].to(parts_ptr.dtype.element_ty)
    out_ptrs = parts_ptr + tl.program_id(2).to(tl.int64) * o_split + r * o_batch + query * o_row + h * o_head
    tl.store(out_ptrs + dv * o_column, out, mask=dv < Dv)
