"""Decoding: the few queries of a row against the keys and values that a cache holds for it.

`decode_heads` has one query row for each key head: no matrix unit helps, so products are multiplied and summed, and
each of the BLOCK_N places of a block keeps sums of its own until the end. `decode_groups` has several query rows that
share a key head and uses matrix products. Both walk over the part of the keys that is their split's; with more than
one split they leave float32 parts for `decode_merge`, which adds them up in a fixed order.

A step is bound by the bytes of the cache, so the next keys are on their way while a block's scores are made, and values
while those of the block after it are. Values are asked for when their weights are known: only those above 0 are read.

The key and value of the newest position come from the inputs and are written to the cache in passing (APPEND), so no
program reads what another one writes. ancestors[r, n] is the cache row that holds position n of row r (INDEXED).
"""

from __future__ import annotations

import triton
import triton.language as tl

from rectiformer.ops.kernels.parts import relu, row_gain

NEVER = tl.constexpr(float("-inf"))


@triton.jit
def load_length(lengths_ptr, length_step, r, room):
    return tl.maximum(tl.minimum(tl.load(lengths_ptr + r * length_step).to(tl.int32), room), 0)


@triton.jit
def own_keys(length, known, left, BLOCK_N: tl.constexpr):
    """The first key seen, and from where to where this program's split of the known ones goes, in whole blocks."""
    first = tl.maximum(length - 1 - left, 0)
    begin = first // BLOCK_N * BLOCK_N
    chunk = tl.cdiv(tl.cdiv(tl.maximum(known - begin, 0), tl.num_programs(2)), BLOCK_N) * BLOCK_N
    start = begin + tl.program_id(2) * chunk
    return first, start, tl.minimum(start + chunk, known)


@triton.jit
def own_gain(gain, exponent, length, left, factor_ptr, heads, H, PER_HEAD: tl.constexpr, ROW_SCALE: tl.constexpr):
    """What the rectified powers of each of `heads` are multiplied with."""
    count = tl.minimum(length, left + 1)
    gain = row_gain(gain, exponent, 0, 0, 0, count, 0, 0, 1, False, ROW_SCALE)
    return gain * tl.load(factor_ptr + heads, mask=heads < H, other=0.0) if PER_HEAD else gain


@triton.jit
def cache_rows(ancestors_ptr, ancestor_step, r, n, seen, INDEXED: tl.constexpr):
    """The cache row of each position."""
    if INDEXED:
        rows = tl.load(ancestors_ptr + r * ancestor_step + n, mask=seen, other=0).to(tl.int64)
    else:
        rows = r + tl.zeros_like(n).to(tl.int64)
    return rows


@triton.jit
def append(new_cells, cache_cells, inside, mine):
    """What is new, in float32, written to the cache as well where it is this program's to write."""
    new = tl.load(new_cells, mask=inside, other=0.0)
    tl.store(cache_cells, new, mask=inside & mine)
    return new.to(tl.float32)


@triton.jit
def soften(scores, most, highest):
    """Weights in base 2, and what earlier ones shrink by, when the highest score goes from `most` to `highest`."""
    safe = tl.where(highest == NEVER, 0.0, highest)
    return tl.exp2(scores - safe), tl.exp2(most - safe)


@triton.jit
def rectify(scores, POWER: tl.constexpr):
    """Keys that are not seen were loaded as zeros, so nothing has to be hidden."""
    rectified = relu(scores)
    return rectified * rectified if POWER == 2 else rectified


@triton.jit
def add_new(mixed, most, total, score, value, gain, POWER: tl.constexpr):
    """The sums of rows [M, BLOCK_DV] with one key more, of these scores [M]; -inf where it is not to be added."""
    if POWER == 0:
        highest = tl.maximum(most, score)
        weight, shrink = soften(score, most, highest)
        most, total, mixed = highest, total * shrink + weight, mixed * shrink[:, None]
        mixed += weight[:, None] * value
    else:
        mixed += rectify(score, POWER)[:, None] * gain * value
    return mixed, most, total


@triton.jit
def settle(mixed, most, total, most_ptr, total_ptr, places, inside, SPLIT: tl.constexpr):
    """The end of a softmax: the mean, zero of no key; or, of a split, its sums, with what merging them takes."""
    if SPLIT:
        tl.store(most_ptr + places, most, mask=inside)
        tl.store(total_ptr + places, total, mask=inside)
    else:
        mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    return mixed


@triton.jit
def norm_heads(z, gain_ptr, gate_ptr, cells, inside, E, epsilon, NORM: tl.constexpr):
    """The output norm over all heads of a row: z [HEADS, BLOCK_DV] holds zeros outside. NORM: 1 plain, 2 gated."""
    out = z * tl.rsqrt(tl.sum(tl.sum(z * z, 1), 0) / E + epsilon)
    out = out * tl.load(gain_ptr + cells, mask=inside, other=0.0).to(tl.float32)
    if NORM == 2:
        out = out * tl.sigmoid(tl.load(gate_ptr + cells, mask=inside, other=0.0).to(tl.float32) * z)
    return out


@triton.jit
def walk_keys(
    q, k_cells, v_cells, inside, inside_v, k_steps, v_steps, r, span, ancestry, scale,
    POWER: tl.constexpr, INDEXED: tl.constexpr, SKIP: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """What each of BLOCK_N places adds up over the blocks of `span`: values, and of a softmax highest score and sum.

    In a turn the keys of the next block are asked for, and so are the values of this one, which the next turn adds.
    """
    start, stop, first = span
    ancestors_ptr, ancestor_step = ancestry
    n = start + tl.arange(0, BLOCK_N)
    seen = (n >= first) & (n < stop)
    rows = cache_rows(ancestors_ptr, ancestor_step, r, n, seen, INDEXED)
    cells = k_cells[None] + (rows * k_steps[0] + n * k_steps[1])[:, None, None]
    k = tl.load(cells, mask=seen[:, None, None] & inside[None], other=0.0)
    rows_ahead = cache_rows(ancestors_ptr, ancestor_step, r, n + BLOCK_N, n + BLOCK_N < stop, INDEXED)
    most = tl.full([BLOCK_N, HEADS], NEVER, tl.float32)
    total = tl.zeros([BLOCK_N, HEADS], tl.float32)
    mixed = tl.zeros([BLOCK_N, HEADS, BLOCK_DV], tl.float32)
    weights = tl.zeros([BLOCK_N, HEADS], tl.float32)
    v = tl.zeros([BLOCK_N, HEADS, BLOCK_DV], v_cells.dtype.element_ty)
    while start < stop:
        asked = seen[:, None, None] & inside_v[None]
        cells = v_cells[None] + (rows * v_steps[0] + n * v_steps[1])[:, None, None]
        if not SKIP:
            v_now = tl.load(cells, mask=asked, other=0.0)
        held, rows, n = seen, rows_ahead, n + BLOCK_N
        seen = (n >= first) & (n < stop)
        ahead = k_cells[None] + (rows * k_steps[0] + n * k_steps[1])[:, None, None]
        k_ahead = tl.load(ahead, mask=seen[:, None, None] & inside[None], other=0.0)
        rows_ahead = cache_rows(ancestors_ptr, ancestor_step, r, n + BLOCK_N, n + BLOCK_N < stop, INDEXED)
        scores = tl.sum(k.to(tl.float32) * q[None], 2)  # [BLOCK_N, HEADS]
        mixed += weights[:, :, None] * v.to(tl.float32)  # of the block before
        if POWER == 0:
            scores = tl.where(held[:, None], scores * scale, NEVER)
            highest = tl.maximum(most, scores)
            weights, shrink = soften(scores, most, highest)
            most, total, mixed = highest, total * shrink + weights, mixed * shrink[:, :, None]
        else:
            weights = rectify(scores, POWER)
        v = tl.load(cells, mask=asked & (weights > 0.0)[:, :, None], other=0.0) if SKIP else v_now
        k = k_ahead
        start += BLOCK_N
    return mixed + weights[:, :, None] * v.to(tl.float32), most, total


@triton.jit
def decode_heads(
    q_ptr, k_ptr, v_ptr, out_ptr, new_k_ptr, new_v_ptr, most_ptr, total_ptr,
    lengths_ptr, ancestors_ptr, factor_ptr, gain_ptr, gate_ptr,
    q_batch, q_head, q_row, q_column, k_batch, k_head, k_row, k_column, v_batch, v_head, v_row, v_column,
    o_batch, o_head, o_row, o_column, a_batch, a_head, a_row, a_column, b_batch, b_head, b_row, b_column,
    length_step, ancestor_step, o_split, R, H, K, Q, room, D, Dv, left, scale, gain, exponent, epsilon,
    POWER: tl.constexpr, ROW_SCALE: tl.constexpr, PER_HEAD: tl.constexpr, APPEND: tl.constexpr, INDEXED: tl.constexpr,
    SPLIT: tl.constexpr, SKIP: tl.constexpr, NORM: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """HEADS heads of a row, one query each. SKIP: the value of a key that weighs nothing is not read."""
    r = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    heads, d, dv = h[:, None], tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_DV)[None, :]
    inside, inside_v = (heads < H) & (d < D), (heads < H) & (dv < Dv)
    length = load_length(lengths_ptr, length_step, r, room)
    known = length - 1 if APPEND else length
    first, start, stop = own_keys(length, known, left, BLOCK_N)
    q = tl.load(q_ptr + r * q_batch + heads * q_head + d * q_column, mask=inside, other=0.0).to(tl.float32)
    k_cells, v_cells = k_ptr + heads * k_head + d * k_column, v_ptr + heads * v_head + dv * v_column
    if APPEND:
        mine = (tl.program_id(2) == 0) & (known >= 0)
        new_k, new_v = new_k_ptr + r * a_batch + heads * a_head, new_v_ptr + r * b_batch + heads * b_head
        new_k = append(new_k + d * a_column, k_cells + r * k_batch + known * k_row, inside, mine)
        new_v = append(new_v + dv * b_column, v_cells + r * v_batch + known * v_row, inside_v, mine)
        score = tl.sum(q * new_k, 1) * (scale if POWER == 0 else 1.0)
        score = tl.where(mine, score, NEVER)
    mixed, most, total = walk_keys(
        q, k_cells, v_cells, inside, inside_v, (k_batch, k_row), (v_batch, v_row), r, (start, stop, first),
        (ancestors_ptr, ancestor_step), scale,
        POWER, INDEXED, SKIP, HEADS, BLOCK_N, BLOCK_D, BLOCK_DV,
    )  # fmt: skip
    highest = tl.max(most, 0)
    if POWER == 0:
        _, shrink = soften(most, most, highest[None, :])
        mixed, total = mixed * shrink[:, :, None], total * shrink
    out, total = tl.sum(mixed, 0), tl.sum(total, 0)
    if APPEND:
        out, highest, total = add_new(out, highest, total, score, new_v, 1.0, POWER)
    if POWER == 0:
        places = (tl.program_id(2) * R + r) * H + h
        out = settle(out, highest, total, most_ptr, total_ptr, places, h < H, SPLIT)
    else:
        out = out * own_gain(gain, exponent, length, left, factor_ptr, heads, H, PER_HEAD, ROW_SCALE)
    if NORM > 0:
        out = norm_heads(out, gain_ptr, gate_ptr, heads * Dv + dv, inside_v, H * Dv, epsilon, NORM)
    out_cells = out_ptr + tl.program_id(2) * o_split + r * o_batch + heads * o_head + dv * o_column
    tl.store(out_cells, out.to(out_ptr.dtype.element_ty), mask=inside_v)


@triton.jit
def decode_groups(
    q_ptr, k_ptr, v_ptr, out_ptr, new_k_ptr, new_v_ptr, most_ptr, total_ptr,
    lengths_ptr, ancestors_ptr, factor_ptr, gain_ptr, gate_ptr,
    q_batch, q_head, q_row, q_column, k_batch, k_head, k_row, k_column, v_batch, v_head, v_row, v_column,
    o_batch, o_head, o_row, o_column, a_batch, a_head, a_row, a_column, b_batch, b_head, b_row, b_column,
    length_step, ancestor_step, o_split, R, H, K, Q, room, D, Dv, left, scale, gain, exponent, epsilon,
    POWER: tl.constexpr, ROW_SCALE: tl.constexpr, PER_HEAD: tl.constexpr, APPEND: tl.constexpr, INDEXED: tl.constexpr,
    SPLIT: tl.constexpr, SKIP: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """All queries of all heads that read one key head: row m is query m % Q of the group's head m // Q."""
    r, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    m, d, dv = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_DV)[None, :]
    real, heads, query = m < H // K * Q, head * (H // K) + m // Q, m % Q
    length = load_length(lengths_ptr, length_step, r, room)
    known = length - 1 if APPEND else length
    first, start, stop = own_keys(length, known, left, BLOCK_N)
    q_cells = q_ptr + r * q_batch + (heads * q_head + query * q_row)[:, None] + d * q_column
    q = tl.load(q_cells, mask=real[:, None] & (d < D), other=0.0)
    k_cells, v_cells = k_ptr + head * k_head + d * k_column, v_ptr + head * v_head + dv * v_column
    wide = q.to(tl.float32)
    gain = own_gain(gain, exponent, length, left, factor_ptr, heads[:, None], H, PER_HEAD, ROW_SCALE)
    most = tl.full([BLOCK_M], NEVER, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if APPEND:
        mine = (tl.program_id(2) == 0) & (known >= 0)
        new_k, new_v = new_k_ptr + r * a_batch + head * a_head, new_v_ptr + r * b_batch + head * b_head
        new_k = append(new_k + d * a_column, k_cells + r * k_batch + known * k_row, d < D, mine)
        new_v = append(new_v + dv * b_column, v_cells + r * v_batch + known * v_row, dv < Dv, mine)
        score = tl.sum(wide * new_k, 1) * (scale if POWER == 0 else 1.0)
        score = tl.where(mine, score, NEVER)
        mixed, most, total = add_new(mixed, most, total, score, new_v, gain, POWER)
    weights = tl.zeros([BLOCK_M, BLOCK_N], v_ptr.dtype.element_ty)
    v = tl.zeros([BLOCK_N, BLOCK_DV], v_ptr.dtype.element_ty)
    for begin in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        n = begin + tl.arange(0, BLOCK_N)
        held = (n >= first) & (n < stop)
        rows = cache_rows(ancestors_ptr, ancestor_step, r, n, held, INDEXED)
        k = tl.load(k_cells + (rows * k_batch + n * k_row)[:, None], mask=held[:, None] & (d < D), other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        mixed += tl.dot(weights, v, input_precision="ieee")  # of the block before
        if POWER == 0:
            scores = tl.where(held[None, :], scores * scale, NEVER)
            highest = tl.maximum(most, tl.max(scores, 1))
            wide_weights, _ = soften(scores, scores, highest[:, None])
            _, shrink = soften(most, most, highest)
            most, total, mixed = highest, total * shrink + tl.sum(wide_weights, 1), mixed * shrink[:, None]
        else:
            wide_weights = rectify(scores, POWER) * gain
        weights = wide_weights.to(v_ptr.dtype.element_ty)
        asked = held & (tl.max(weights.to(tl.float32), 0) > 0.0) if SKIP else held
        v = tl.load(v_cells + (rows * v_batch + n * v_row)[:, None], mask=asked[:, None] & (dv < Dv), other=0.0)
    mixed += tl.dot(weights, v, input_precision="ieee")
    if POWER == 0:
        places = ((tl.program_id(2) * R + r) * Q + query) * H + heads
        mixed = settle(mixed, most, total, most_ptr, total_ptr, places, real, SPLIT)
    out_cells = out_ptr + tl.program_id(2) * o_split + r * o_batch + (heads * o_head + query * o_row)[:, None]
    tl.store(out_cells + dv * o_column, mixed.to(out_ptr.dtype.element_ty), mask=real[:, None] & (dv < Dv))


@triton.jit
def decode_merge(
    parts_ptr, most_ptr, total_ptr, out_ptr, T, Dv, splits,
    SOFTMAX: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Rows [T, Dv] from parts [splits, T, Dv], added in a fixed order; those of a softmax shrink to a common highest
    score. All parts of a row are on their way at once."""
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dv = tl.arange(0, BLOCK_DV)
    part = tl.arange(0, SPLITS).to(tl.int64)
    places, real = part[:, None] * T + t[None, :], (part[:, None] < splits) & (t[None, :] < T)
    cells = places[:, :, None] * Dv + dv[None, None, :]
    parts = tl.load(parts_ptr + cells, mask=real[:, :, None] & (dv < Dv)[None, None, :], other=0.0)
    if SOFTMAX:
        most = tl.load(most_ptr + places, mask=real, other=NEVER)
        shrink, _ = soften(most, most, tl.max(most, 0)[None, :])
        total = tl.sum(tl.load(total_ptr + places, mask=real, other=0.0) * shrink, 0)
        parts = parts * (shrink / tl.where(total == 0.0, 1.0, total)[None, :])[:, :, None]
    inside = (t[:, None] < T) & (dv[None, :] < Dv)
    tl.store(out_ptr + t[:, None] * Dv + dv[None, :], tl.sum(parts, 0).to(out_ptr.dtype.element_ty), mask=inside)
