"""Gradients of attention of long sequences: from the inputs alone, with no output and no row statistics kept, and
without atomics.

`long_dkdv_kernel` owns a tile of keys and walks over queries (4 products per tile), `long_dq_kernel` owns a tile of
queries and walks over keys (3 products). One kernel for both would need 5 products instead of 7, but adds d_q up by
atomics: at best 9 % faster, and different from run to run (docs/log.md). Where keys are owned, tiles lie transposed,
[keys, queries]: no product's result has to be transposed to enter another.

Rows with scales of their own have them in d_out, from `scale_rows_kernel`: all that is made there is linear in it, and
scores, whose signs decide, stay as they are. With STATS the sums of rows have gradients too: those of weights grow by
slopes, which are divided by what the results are multiplied with in the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from rectiformer.ops.gpu.common import (
    KernelCall,
    block_size,
    drop,
    dropout_words,
    empty_heads_last,
    hidden_sides,
    key_range,
    load_tile,
    locate_sequence,
    row_gain,
    row_scale_flag,
    row_shifts,
    safe_log,
    seen_scores,
    store_tile,
)
from rectiformer.ops.gpu.launch import Launch, launch_all
from rectiformer.ops.gpu.long import (
    SCALING,
    TABLES,
    LongPlan,
    find_tiling,
    gain_of,
    long_flags,
    mask_strides,
    prepare,
    scales_inside,
    shape_args,
    tile_grid,
)
from rectiformer.ops.gpu.pointwise import score_gradients, weigh


class LongGradients:
    """The launches that make the gradients of q, k, v and head_shifts, for calls of one plan with a d_out of one
    layout."""

    def __init__(self, plan: LongPlan, d_out: Tensor, held: Sequence[Tensor], stats: bool = False) -> None:
        call = plan.call(held)
        self.scales = bool(call.row_exponent) and any(hidden_sides(call))
        self.shifted = call.head_shifts is not None
        gain = gain_of(call)
        self.shift_gain = -gain * call.power * call.shift_factor
        tensors = self.gather(d_out, held, d_out if stats else None)
        d_q, d_k, d_v, upstream, scaled = range(len(held), len(held) + 5)
        by_row = len(held) + 4 + self.scales if self.shifted else 0
        tables = plan.find(TABLES)
        if stats:
            tables[TABLES.index("rows")] = len(tensors) - 1
        score_gain = gain * call.power * (call.scale if scales_inside(call) else 1.0)
        slots = [0, 1, 2, scaled if self.scales else upstream, d_k, d_v, *tables]
        keys = prepare(long_dkdv_kernel, "keys", call, tensors, slots, 4, 2, [gain, score_gain], stats)
        slots = [0, 1, 2, upstream, d_q, by_row, *tables]
        queries = prepare(long_dq_kernel, "queries", call, tensors, slots, 4, 2, [score_gain], stats)
        scaling = [prepare_scaling(plan, call, tensors, upstream, scaled)] if self.scales else []
        self.launches = [*scaling, keys, queries]

    def gather(self, d_out: Tensor, held: Sequence[Tensor], slopes: Tensor | None) -> list[Tensor]:
        """All tensors of the launches: those held, d_q, d_k, d_v, d_out, and what there is of a scaled d_out, of sums
        by row and of slopes."""
        d_q, d_k, d_v = [empty_heads_last(tensor, tensor.shape[3]) for tensor in held[:3]]
        tensors = [*held, d_q, d_k, d_v, d_out]
        if self.scales:
            # It may lie where d_q will be: the kernel that reads it ends before the one that writes d_q begins.
            tensors.append(d_q if d_q.shape == d_out.shape else empty_heads_last(d_out, d_out.shape[3]))
        if self.shifted:
            tensors.append(d_q.new_empty(d_q.shape[:3], dtype=torch.float32))
        if slopes is not None:
            tensors.append(slopes)
        return tensors

    def __call__(
        self, d_out: Tensor, held: Sequence[Tensor], slopes: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """With `slopes` a, b [B, H, M, 2], the gradient of a weight x has a + b log x more."""
        tensors = self.gather(d_out, held, slopes)
        launch_all(self.launches, tensors)
        d_q, d_k, d_v = tensors[len(held) : len(held) + 3]
        if not self.shifted:
            return d_q, d_k, d_v, None
        by_row = tensors[len(held) + 4 + self.scales]  # summed by torch, in a fixed order
        return d_q, d_k, d_v, self.shift_gain * by_row.sum((0, 2))


def prepare_scaling(plan: LongPlan, call: KernelCall, tensors: list[Tensor], upstream: int, scaled: int) -> Launch:
    """The launch that scales each row of d_out by its count of keys; `upstream` and `scaled` say where both are."""
    H, _, M, N, _, Dv = shape_args(call)
    slots = [upstream, scaled, *plan.find(("key_lengths", "cu_seqlens_q", "cu_seqlens_k"))]
    window = (call.window_left, call.window_right)
    numbers = (tensors[upstream].stride(), tensors[scaled].stride(), window, H, M, N, Dv, call.row_exponent)
    flags = {
        "ROW_SCALE": row_scale_flag(call.row_exponent),
        "RAGGED": call.key_lengths is not None,
        "PACKED": call.packed,
        "BLOCK_M": SCALING.queries,
        "BLOCK_DV": block_size(Dv),
        "num_warps": SCALING.warps,
    }
    grid = tile_grid(call, call.max_queries, SCALING.queries, H)
    return Launch(scale_rows_kernel, grid, tensors, slots, numbers, flags)


def bias_gradient(plan: LongPlan, d_out: Tensor, held: Sequence[Tensor]) -> Tensor:
    """The gradient of the bias, in its shape, without ever holding what it is broadcast to."""
    call = plan.call(held)
    assert call.attn_bias is not None
    shape = call.attn_bias.shape
    d_bias = call.attn_bias.new_empty(shape, dtype=torch.float32)
    tiling = find_tiling("bias", call.q, call.v, call.function, edges=False)
    flags = long_flags(call, tiling)
    for fixed in ("PACKED", "BIAS", "SCALE_INSIDE", "ASM"):
        del flags[fixed]
    strides = [tensor.stride() for tensor in (call.q, call.k, call.v, d_out)]
    numbers = (
        *mask_strides(call), *strides, (call.window_left, call.window_right), tuple(shape), call.q.shape[0],
        *shape_args(call), call.scale, gain_of(call) * call.power, call.row_exponent, call.shift_factor,
        call.dropout_threshold,
    )  # fmt: skip
    grid = (-(-shape[2] // tiling.queries), -(-shape[3] // tiling.keys), shape[0] * shape[1])
    names = ("head_factors", "key_lengths", "seed", "head_shifts", "row_counts", "attn_bias", "attn_mask")
    slots = [0, 1, 2, len(held), len(held) + 1, *plan.find(names)]
    tensors = [*held, d_out, d_bias]
    Launch(long_dbias_kernel, grid, tensors, slots, numbers, flags)(tensors)
    return d_bias.to(call.attn_bias.dtype)


@triton.jit
def scale_rows_kernel(
    d_out_ptr, scaled_ptr, lengths_ptr, q_bounds_ptr, k_bounds_ptr, d_out_strides, scaled_strides, window,
    H, M, N, Dv, exponent,
    ROW_SCALE: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The gradient of the output with each row times n^-exponent."""
    sequence, h = tl.program_id(1) // H, tl.program_id(1) % H
    seq = locate_sequence(sequence, h, 1, M, N, lengths_ptr, q_bounds_ptr, k_bounds_ptr, RAGGED, PACKED)
    b, _, _, q_start, _, rows, keys, length = seq
    left, right = window
    row = tl.program_id(0) * BLOCK_M
    if row < rows:  # a packed sequence may have fewer tiles
        m = row + tl.arange(0, BLOCK_M)
        d_out = load_tile(
            d_out_ptr, d_out_ptr, d_out_strides, b, h, q_start, row, rows, Dv, BLOCK_M, BLOCK_DV, False, False
        )
        gain = row_gain(1.0, exponent, m, rows, keys, length, left, right, 1, True, ROW_SCALE)
        scaled = d_out.to(tl.float32) * gain
        store_tile(scaled_ptr, scaled_strides, b, h, q_start, row, rows, Dv, scaled, BLOCK_M, BLOCK_DV)


@triton.jit
def query_range(row, rows, seq, window, BLOCK: tl.constexpr, BANDED: tl.constexpr):
    """Queries that see keys `row` to `row + rows`: begin and end of all tiles, and of those that see all of them."""
    _, _, _, _, _, M, N, length = seq
    left, right = window
    begin, full_begin, end, full_end = 0, 0, M, M
    if BANDED:
        shift = N - M
        last = tl.minimum(row + rows, length) - 1
        begin = tl.minimum(tl.maximum(row - right - shift, 0), M)
        full_begin = tl.minimum(tl.maximum(last - right - shift, 0), M)
        end = tl.maximum(tl.minimum(last + left + 1 - shift, M), begin)
        full_end = tl.maximum(tl.minimum(row + left + 1 - shift, M), 0)
    begin = begin // BLOCK * BLOCK
    full_begin = tl.cdiv(full_begin, BLOCK) * BLOCK
    return begin, full_begin, tl.maximum(full_end // BLOCK * BLOCK, full_begin), end


@triton.jit
def load_slopes(slopes, seq, m, KEY_AXIS: tl.constexpr):
    """What queries' weights w add to their gradient through the sums of rows: a + b log w, a and b as row vectors.

    `slopes` = pointer to both, the head's first row there, a number to divide them by.
    """
    slopes_ptr, first, divisor = slopes
    _, _, _, q_start, _, M, _, _ = seq
    pointers = slopes_ptr + 2 * tl.cast(first + q_start + m, tl.int64)
    even = tl.expand_dims(tl.load(pointers, mask=m < M, other=0.0), KEY_AXIS)
    steep = tl.expand_dims(tl.load(pointers + 1, mask=m < M, other=0.0), KEY_AXIS)
    return even / divisor, steep / divisor


@triton.jit
def add_queries(
    d_k, d_v, keys, values, q, g, q_ptr, g_ptr, q_strides, g_strides, begin, end, n, head, words, seq,
    window, mask_args, shift_args, slopes, scale, H, rows, D, Dv,
    EDGE: tl.constexpr, POWER: tl.constexpr, WEIGHT: tl.constexpr, SLOPE: tl.constexpr, RECTIFIED: tl.constexpr,
    SHIFT: tl.constexpr, SHIFT_PER_HEAD: tl.constexpr, COUNTED: tl.constexpr, BANDED: tl.constexpr, CLEAR: tl.constexpr,
    BIAS: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr, SCALE_INSIDE: tl.constexpr,
    STATS: tl.constexpr, TMA: tl.constexpr, ASM: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """`d_k` and `d_v` plus what queries `begin` to `end` add; EDGE: each may not see every key."""
    TESTED: tl.constexpr = EDGE or BIAS or MASK
    b, _, _, q_start, _, M, _, _ = seq
    for row in range(begin, end, BLOCK_M):
        m = row + tl.arange(0, BLOCK_M)
        queries = load_tile(q, q_ptr, q_strides, b, head, q_start, row, M, D, BLOCK_M, BLOCK_D, TMA, EDGE and CLEAR)
        scores = tl.dot(keys, queries.T, input_precision=PRECISION)
        shift, _unit = row_shifts(shift_args, m, H, rows, seq, window, 0, BANDED, SHIFT, SHIFT_PER_HEAD, COUNTED)
        scores, seen = seen_scores(
            scores, m, n, seq, window, mask_args, shift, scale, 0, EDGE, BANDED, BIAS, MASK, SCALE_INSIDE, SHIFT
        )
        d_out = load_tile(g, g_ptr, g_strides, b, head, q_start, row, M, Dv, BLOCK_M, BLOCK_DV, TMA, EDGE and CLEAR)
        d_weights = tl.dot(values, d_out.T, input_precision=PRECISION)
        if STATS:  # sums of rows are of the weights before dropout
            weights = weigh(scores, seen, tl.float32, POWER, WEIGHT, RECTIFIED, TESTED, False)
            even, steep = load_slopes(slopes, seq, m, 0)
            d_weights = drop(d_weights, words, seq, m, n, 0, DROPOUT) + even + steep * safe_log(weights)
            weights = weights.to(queries.dtype)
        else:
            weights = weigh(scores, seen, queries.dtype, POWER, WEIGHT, RECTIFIED, TESTED, ASM)
        weights = drop(weights, words, seq, m, n, 0, DROPOUT)
        d_v = tl.dot(weights, d_out, d_v, input_precision=PRECISION)
        d_scores = score_gradients(scores, seen, d_weights, queries.dtype, POWER, WEIGHT, SLOPE, RECTIFIED, TESTED, ASM)
        d_scores = drop(d_scores, words, seq, m, n, 0, 0 if STATS else DROPOUT)
        d_k = tl.dot(d_scores, queries, d_k, input_precision=PRECISION)
    return d_k, d_v


@triton.jit
def head_scale(
    factor_ptr, kh, exponent, seq, window, PER_HEAD: tl.constexpr, BANDED: tl.constexpr, ROW_SCALE: tl.constexpr
):
    """What all rows of a head are scaled with; rows of a band have more of their own, and have it in `d_out`."""
    _, _, _, _, _, M, N, length = seq
    left, right = window
    scale = tl.load(factor_ptr + kh) if PER_HEAD else 1.0
    if not BANDED:
        scale = row_gain(scale, exponent, 0, M, N, length, left, right, 0, BANDED, ROW_SCALE)
    return scale


@triton.jit
def long_dkdv_kernel(
    q, k, v, g, q_ptr, k_ptr, v_ptr, g_ptr, dk_ptr, dv_ptr, factor_ptr, lengths_ptr, seed_ptr, q_bounds_ptr,
    k_bounds_ptr, slopes_ptr, shifts_ptr, counts_ptr, bias_ptr, mask_ptr, bias_strides, mask_strides, q_strides,
    k_strides, v_strides, g_strides, dk_strides, dv_strides, window,
    H, group, M, N, D, Dv, scale, gain, d_gain, exponent, shift_factor, threshold,
    POWER: tl.constexpr, WEIGHT: tl.constexpr, SLOPE: tl.constexpr, RECTIFIED: tl.constexpr, SHIFT: tl.constexpr,
    SHIFT_PER_HEAD: tl.constexpr, COUNTED: tl.constexpr, ROW_SCALE: tl.constexpr, PER_HEAD: tl.constexpr,
    HIDES_LATER: tl.constexpr, HIDES_EARLIER: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr,
    BIAS: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr, SCALE_INSIDE: tl.constexpr,
    STATS: tl.constexpr, TMA: tl.constexpr, ASM: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """`gain` multiplies d_v and `d_gain` d_k. Heads with factors of their own (PER_HEAD) share no keys.

    GROUP query heads that read one key head are walked one after the other by the program that owns its keys.
    """
    BANDED: tl.constexpr = HIDES_LATER or HIDES_EARLIER
    CLEAR: tl.constexpr = RAGGED or PACKED  # what lies beyond a sequence's keys is not the end of the tensor
    TEST_ALL: tl.constexpr = BIAS or MASK  # every cell is looked at anyway: one loop, not three
    mask_args = (bias_ptr, bias_strides, mask_ptr, mask_strides)
    K = H // group
    # Tiles of one head are neighbors, so that its queries stay in the second-level cache.
    tile, sequence, kh = tl.program_id(0), tl.program_id(1) // K, tl.program_id(1) % K
    head = kh * group
    seq = locate_sequence(sequence, head, group, M, N, lengths_ptr, q_bounds_ptr, k_bounds_ptr, RAGGED, PACKED)
    b, _, _, q_start, k_start, rows, columns, length = seq
    column = tile * BLOCK_N
    if column < columns:  # a packed sequence may have fewer tiles
        n = column + tl.arange(0, BLOCK_N)
        keys = load_tile(k, k_ptr, k_strides, b, kh, k_start, column, length, D, BLOCK_N, BLOCK_D, TMA, CLEAR)
        values = load_tile(v, v_ptr, v_strides, b, kh, k_start, column, length, Dv, BLOCK_N, BLOCK_DV, TMA, CLEAR)
        begin, full_begin, full_end, end = query_range(column, BLOCK_N, seq, window, BLOCK_M, BANDED)
        if column >= length:  # nobody sees these keys
            begin, full_begin, full_end, end = 0, 0, 0, 0
        shared = gain * head_scale(factor_ptr, kh, exponent, seq, window, PER_HEAD, BANDED, ROW_SCALE) if STATS else 1.0
        d_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        d_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
        for member in range(GROUP):
            head = kh * group + member
            here = (b, head, kh, q_start, k_start, rows, columns, length)
            slopes = (slopes_ptr, (b * H + head) * M, shared)
            words = dropout_words(seed_ptr, threshold, b * H + head, DROPOUT)
            starts = (begin, full_begin, full_end)
            stops = (
                end if TEST_ALL else tl.minimum(full_begin, end), full_end if PACKED or HIDES_EARLIER else end, end
            )  # fmt: skip
            for part in tl.static_range(3):  # an edge, what sees all keys, another edge
                if HIDES_LATER or TEST_ALL if part == 0 else not TEST_ALL and (PACKED or HIDES_EARLIER or part == 1):
                    # Of queries only packed ones need clearing: padding of keys was cleared above.
                    d_k, d_v = add_queries(
                        d_k, d_v, keys, values, q, g, q_ptr, g_ptr, q_strides, g_strides, starts[part], stops[part],
                        n, head, words, here, window, mask_args, (shift_factor, shifts_ptr, counts_ptr), slopes,
                        scale, H, M, D, Dv, part != 1, POWER, WEIGHT, SLOPE, RECTIFIED, SHIFT,
                        SHIFT_PER_HEAD, COUNTED, BANDED, PACKED, BIAS, MASK, DROPOUT, SCALE_INSIDE, STATS, TMA, ASM,
                        PRECISION, BLOCK_M, BLOCK_D, BLOCK_DV,
                    )  # fmt: skip
        if RAGGED and not RECTIFIED:  # a key that was loaded as zeros may have weights
            d_v = tl.where((n < length)[:, None], d_v, 0.0)
        head_gain = head_scale(factor_ptr, kh, exponent, seq, window, PER_HEAD, BANDED, ROW_SCALE)
        store_tile(dk_ptr, dk_strides, b, kh, k_start, column, columns, D, d_k * (d_gain * head_gain), BLOCK_N, BLOCK_D)
        store_tile(dv_ptr, dv_strides, b, kh, k_start, column, columns, Dv, d_v * (gain * head_gain), BLOCK_N, BLOCK_DV)


@triton.jit
def add_keys(
    d_q, d_shifted, queries, d_out, k, v, k_ptr, v_ptr, k_strides, v_strides, m, begin, end, words, seq, window,
    mask_args, shift, even, steep, scale, D, Dv,
    EDGE: tl.constexpr, POWER: tl.constexpr, WEIGHT: tl.constexpr, SLOPE: tl.constexpr, RECTIFIED: tl.constexpr,
    SHIFT: tl.constexpr, SHIFT_PER_HEAD: tl.constexpr, BANDED: tl.constexpr, CLEAR: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, DROPOUT: tl.constexpr, SCALE_INSIDE: tl.constexpr, STATS: tl.constexpr,
    TMA: tl.constexpr, ASM: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """`d_q` plus what keys `begin` to `end` add; EDGE: not every query may see each of them.

    SHIFT_PER_HEAD: the gradients of their scores are added to `d_shifted`.
    """
    TESTED: tl.constexpr = EDGE or BIAS or MASK
    EARLY: tl.constexpr = STATS or SHIFT_PER_HEAD  # what is dropped is missing in float32 sums
    b, _, kh, _, k_start, _, N, length = seq
    limit = length if EDGE else N
    for column in range(begin, end, BLOCK_N):
        n = column + tl.arange(0, BLOCK_N)
        keys = load_tile(k, k_ptr, k_strides, b, kh, k_start, column, limit, D, BLOCK_N, BLOCK_D, TMA, EDGE and CLEAR)
        scores = tl.dot(queries, keys.T, input_precision=PRECISION)
        scores, seen = seen_scores(
            scores, m, n, seq, window, mask_args, shift, scale, 1, EDGE, BANDED, BIAS, MASK, SCALE_INSIDE, SHIFT
        )
        values = load_tile(
            v, v_ptr, v_strides, b, kh, k_start, column, limit, Dv, BLOCK_N, BLOCK_DV, TMA, EDGE and CLEAR
        )
        d_weights = tl.dot(d_out, values.T, input_precision=PRECISION)
        d_weights = drop(d_weights, words, seq, m, n, 1, DROPOUT if EARLY else 0)
        if STATS:
            weights = weigh(scores, seen, tl.float32, POWER, WEIGHT, RECTIFIED, TESTED, False)
            d_weights += even + steep * safe_log(weights)
        dtype: tl.constexpr = tl.float32 if SHIFT_PER_HEAD else queries.dtype
        d_scores = score_gradients(scores, seen, d_weights, dtype, POWER, WEIGHT, SLOPE, RECTIFIED, TESTED, ASM)
        if SHIFT_PER_HEAD:
            d_shifted += tl.sum(d_scores, 1)
        d_scores = drop(d_scores.to(queries.dtype), words, seq, m, n, 1, 0 if EARLY else DROPOUT)
        d_q = tl.dot(d_scores, keys, d_q, input_precision=PRECISION)
    return d_q, d_shifted


@triton.jit
def long_dq_kernel(
    q, k, v, g, q_ptr, k_ptr, v_ptr, g_ptr, dq_ptr, by_row_ptr, factor_ptr, lengths_ptr, seed_ptr, q_bounds_ptr,
    k_bounds_ptr, slopes_ptr, shifts_ptr, counts_ptr, bias_ptr, mask_ptr, bias_strides, mask_strides, q_strides,
    k_strides, v_strides, g_strides, dq_strides, by_row_strides, window,
    H, group, M, N, D, Dv, scale, gain, exponent, shift_factor, threshold,
    POWER: tl.constexpr, WEIGHT: tl.constexpr, SLOPE: tl.constexpr, RECTIFIED: tl.constexpr, SHIFT: tl.constexpr,
    SHIFT_PER_HEAD: tl.constexpr, COUNTED: tl.constexpr, ROW_SCALE: tl.constexpr, PER_HEAD: tl.constexpr,
    HIDES_LATER: tl.constexpr, HIDES_EARLIER: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr,
    BIAS: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr, SCALE_INSIDE: tl.constexpr,
    STATS: tl.constexpr, TMA: tl.constexpr, ASM: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """`gain` multiplies d_q. Here a program owns its rows, so their scales are applied in the end.

    SHIFT_PER_HEAD: what each row adds to the gradient of its head's shift, but for a common factor, goes to `by_row`.
    """
    BANDED: tl.constexpr = HIDES_LATER or HIDES_EARLIER
    CLEAR: tl.constexpr = RAGGED or PACKED
    TEST_ALL: tl.constexpr = BIAS or MASK
    mask_args = (bias_ptr, bias_strides, mask_ptr, mask_strides)
    left, right = window
    tile, sequence, h = tl.program_id(0), tl.program_id(1) // H, tl.program_id(1) % H
    if HIDES_LATER:  # the longest rows first, so that none is left alone at the end
        tile = tl.num_programs(0) - 1 - tile
    seq = locate_sequence(sequence, h, group, M, N, lengths_ptr, q_bounds_ptr, k_bounds_ptr, RAGGED, PACKED)
    b, _, _, q_start, _, rows, columns, length = seq
    row = tile * BLOCK_M
    if row < rows:  # a packed sequence may have fewer tiles
        m = row + tl.arange(0, BLOCK_M)
        # Rows beyond the sequence hold another one's numbers; their results are not stored.
        queries = load_tile(q, q_ptr, q_strides, b, h, q_start, row, rows, D, BLOCK_M, BLOCK_D, TMA, False)
        d_out = load_tile(g, g_ptr, g_strides, b, h, q_start, row, rows, Dv, BLOCK_M, BLOCK_DV, TMA, False)
        d_q = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        even, steep = 0.0, 0.0
        if STATS:
            shared = gain / POWER  # what weights are multiplied with, whose slopes these are
            shared = shared * tl.load(factor_ptr + h) if PER_HEAD else shared
            shared = shared / scale if SCALE_INSIDE else shared
            shared = row_gain(shared, exponent, m, rows, columns, length, left, right, 1, BANDED, ROW_SCALE)
            even, steep = load_slopes((slopes_ptr, (b * H + h) * M, shared), seq, m, 1)
        shift_args = (shift_factor, shifts_ptr, counts_ptr)
        shift, unit = row_shifts(shift_args, m, H, M, seq, window, 1, BANDED, SHIFT, SHIFT_PER_HEAD, COUNTED)
        d_shifted = tl.zeros([BLOCK_M], tl.float32)
        words = dropout_words(seed_ptr, threshold, b * H + h, DROPOUT)
        begin, full_begin, full_end, end = key_range(row, BLOCK_M, seq, window, BLOCK_N, BANDED)
        starts = (begin, full_begin, full_end)
        stops = (end if TEST_ALL else tl.minimum(full_begin, end), full_end if CLEAR or HIDES_LATER else end, end)
        for part in tl.static_range(3):  # an edge, what all queries see, another edge
            if HIDES_EARLIER or TEST_ALL if part == 0 else not TEST_ALL and (CLEAR or HIDES_LATER or part == 1):
                d_q, d_shifted = add_keys(
                    d_q, d_shifted, queries, d_out, k, v, k_ptr, v_ptr, k_strides, v_strides, m, starts[part],
                    stops[part], words, seq, window, mask_args, shift, even, steep, scale, D, Dv,
                    part != 1, POWER, WEIGHT, SLOPE, RECTIFIED, SHIFT, SHIFT_PER_HEAD, BANDED, CLEAR, BIAS, MASK,
                    DROPOUT, SCALE_INSIDE, STATS, TMA, ASM, PRECISION, BLOCK_N, BLOCK_D, BLOCK_DV,
                )  # fmt: skip
        if SHIFT_PER_HEAD:
            own = row_gain(1.0, exponent, m, rows, columns, length, left, right, 1, BANDED, ROW_SCALE) * unit
            own = own * tl.load(factor_ptr + h) if PER_HEAD else own
            total = tl.sum(tl.expand_dims(d_shifted, 1) * own, 1)
            tl.store(by_row_ptr + tl.cast(b * H + h, tl.int64) * M + q_start + m, total, mask=m < rows)
        if PER_HEAD:
            gain = gain * tl.load(factor_ptr + h)
        d_q = d_q * row_gain(gain, exponent, m, rows, columns, length, left, right, 1, BANDED, ROW_SCALE)
        store_tile(dq_ptr, dq_strides, b, h, q_start, row, rows, D, d_q, BLOCK_M, BLOCK_D)


@triton.jit
def long_dbias_kernel(
    q, k, v, g, d_bias_ptr, factor_ptr, lengths_ptr, seed_ptr, shifts_ptr, counts_ptr,
    bias_ptr, mask_ptr, bias_strides, mask_strides, q_strides, k_strides, v_strides, g_strides, window, bias_shape,
    B, H, group, M, N, D, Dv, scale, gain, exponent, shift_factor, threshold,
    POWER: tl.constexpr, WEIGHT: tl.constexpr, SLOPE: tl.constexpr, RECTIFIED: tl.constexpr, SHIFT: tl.constexpr,
    SHIFT_PER_HEAD: tl.constexpr, COUNTED: tl.constexpr, ROW_SCALE: tl.constexpr, PER_HEAD: tl.constexpr,
    HIDES_LATER: tl.constexpr, HIDES_EARLIER: tl.constexpr, RAGGED: tl.constexpr, MASK: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """A tile of the bias's gradient, summed over every batch row, head, query and key that it is broadcast to, in
    order: no atomics, so reruns are bitwise equal."""
    BANDED: tl.constexpr = HIDES_LATER or HIDES_EARLIER
    mask_args = (bias_ptr, bias_strides, mask_ptr, mask_strides)
    bias_B, bias_H, bias_M, bias_N = bias_shape
    left, right = window
    slab = tl.program_id(2)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for b in range(slab // bias_H if bias_B > 1 else 0, slab // bias_H + 1 if bias_B > 1 else B):
        for h in range(slab % bias_H if bias_H > 1 else 0, slab % bias_H + 1 if bias_H > 1 else H):
            seq = locate_sequence(b, h, group, M, N, lengths_ptr, lengths_ptr, lengths_ptr, RAGGED, False)
            _, _, kh, _, _, _, _, length = seq
            head_gain = gain * tl.load(factor_ptr + h) if PER_HEAD else gain
            words = dropout_words(seed_ptr, threshold, b * H + h, DROPOUT)
            row = tl.program_id(0) * BLOCK_M
            row_end = row + BLOCK_M if bias_M > 1 else M
            while row < row_end:
                m = row + tl.arange(0, BLOCK_M)
                queries = load_tile(q, q, q_strides, b, h, 0, row, M, D, BLOCK_M, BLOCK_D, False, False)
                d_out = load_tile(g, g, g_strides, b, h, 0, row, M, Dv, BLOCK_M, BLOCK_DV, False, False)
                shift_args = (shift_factor, shifts_ptr, counts_ptr)
                shift, _unit = row_shifts(shift_args, m, H, M, seq, window, 1, BANDED, SHIFT, SHIFT_PER_HEAD, COUNTED)
                rows_gain = row_gain(head_gain, exponent, m, M, N, length, left, right, 1, BANDED, ROW_SCALE)
                column = tl.program_id(1) * BLOCK_N
                column_end = tl.minimum(column + BLOCK_N if bias_N > 1 else N, length)
                while column < column_end:
                    n = column + tl.arange(0, BLOCK_N)
                    keys = load_tile(k, k, k_strides, b, kh, 0, column, length, D, BLOCK_N, BLOCK_D, False, False)
                    scores = tl.dot(queries, keys.T, input_precision=PRECISION)
                    scores, seen = seen_scores(
                        scores, m, n, seq, window, mask_args, shift, scale, 1, True, BANDED, True, MASK, True, SHIFT
                    )
                    values = load_tile(v, v, v_strides, b, kh, 0, column, length, Dv, BLOCK_N, BLOCK_DV, False, False)
                    d_weights = tl.dot(d_out, values.T, input_precision=PRECISION)
                    d_weights = drop(d_weights, words, seq, m, n, 1, DROPOUT)
                    total += rows_gain * score_gradients(
                        scores, seen, d_weights, tl.float32, POWER, WEIGHT, SLOPE, RECTIFIED, True, False
                    )
                    column += BLOCK_N
                row += BLOCK_M
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = d_bias_ptr + tl.cast(slab, tl.int64) * bias_M * bias_N
    if bias_M == 1 and bias_N == 1:
        tl.store(first, tl.sum(tl.sum(total, 1), 0))
    elif bias_M == 1:
        tl.store(first + n, tl.sum(total, 0), mask=n < bias_N)
    elif bias_N == 1:
        tl.store(first + m, tl.sum(total, 1), mask=m < bias_M)
    else:
        inside = (m < bias_M)[:, None] & (n < bias_N)[None, :]
        tl.store(first + m[:, None].to(tl.int64) * bias_N + n[None, :], total, mask=inside)
