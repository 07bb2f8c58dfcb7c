"""Attention whose rows have a threshold or a normalizer, of any length: `rectiformer::rowwise` and its backward.

The weights are those of `ROW_FUNCTIONS`: a function of the score and of two numbers of its row. Nothing of size M x N
is ever in device memory: every pass over the keys makes the scores again, tile by tile, from q and k.

`rowwise_forward_kernel` mixes the values. Of normalized rows it finds the two numbers on the way; thresholds must be
known before, and `rowwise_threshold_kernel` finds them. The kernels of the backward pass are in rowwise_backward.py.
Autograd keeps the inputs, the output and two numbers of each row. All tiles are read by pointers.

How tau is found: with x less the row's maximum, it lies between -1 and 0. The row's mass, the sum of [x - tau]+ **
power, falls as tau grows. It is convex in tau for power 1, and so is its root for power 2, the norm of [x - tau]+. So
a step of Newton's method never passes the true tau from below, and lands below it from above: `low`, the highest that
any step reached, is always a lower bound. While the mass is far above 1, those steps are timid, and a step for the
fourth root of the mass is tried: about right for tails that fall like a Gaussian's. Where it went too far, which the
mass tells, the search goes on at `low`, so that at the worst every other pass is a step of Newton's.

Rows are not divided by their mass in the end. An error of tau is the same for all keys of a row, and with many keys in
the support even that of rounding would be felt: 1e-7 times 100,000 keys is 1 % of the row. Division would only move it
to the largest weights. So the last step, which is too small for the digits of tau, is kept next to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rectiformer.ops.autograd import operator, recall, register_derivative, remember, second_derivatives
from rectiformer.ops.call import AttentionCall, Visibility
from rectiformer.ops.gpu.common import (
    block_size,
    empty_heads_last,
    key_range,
    load_tile,
    locate_sequence,
    pointer,
    store_tile,
    visible,
)
from rectiformer.ops.gpu.long import SMALL, Tiling, has_large_tiles
from rectiformer.ops.gpu.pointwise import relu, whole_power
from rectiformer.ops.gpu.row_functions import HIDDEN, LOWEST, ROW_FUNCTIONS, RowFunction, row_weights
from rectiformer.ops.variants import VARIANTS

ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? key_lengths, float scale, str function, SymInt window_left, "
    "SymInt window_right"
)
ROW_NUMBERS = 2
"""Kept of a row in float32: its threshold for x / power, and what is to be added to that; or top and 1 / total."""
# (kernel, largest head size) of 16-bit numbers: chosen to fit in registers, not measured.
TILINGS = {
    ("threshold", 64): Tiling(128, 64, 8, 3),
    ("threshold", 128): Tiling(128, 64, 8, 3),
    ("threshold", 256): Tiling(128, 64, 8, 2),
    ("forward", 64): Tiling(128, 64, 4, 3),
    ("forward", 128): Tiling(128, 64, 8, 2),
    ("forward", 256): Tiling(128, 64, 8, 2),
    ("means", 64): Tiling(128, 64, 8, 3),
    ("means", 128): Tiling(128, 64, 8, 2),
    ("means", 256): Tiling(64, 32, 8, 2),
    ("keys", 64): Tiling(64, 128, 8, 2),
    ("keys", 128): Tiling(32, 128, 8, 2),
    ("keys", 256): Tiling(32, 64, 8, 2),
    ("queries", 64): Tiling(128, 64, 8, 3),
    ("queries", 128): Tiling(128, 64, 8, 2),
    ("queries", 256): Tiling(64, 32, 8, 2),
}
EXACT = {
    "threshold": Tiling(64, 32, 4, 1),
    "forward": Tiling(64, 32, 4, 1),
    "means": Tiling(64, 32, 4, 1),
    "keys": Tiling(32, 16, 4, 1),
    "queries": Tiling(64, 32, 4, 1),
}
"""Of float32, whose products are each made of three."""
EXACT_WIDE = Tiling(32, 16, 4, 1)
"""Of float32 with head sizes above 128: their tiles are held twice in shared memory."""


@dataclass(frozen=True)
class RowwiseCall:
    """What the operators take, as torch names it."""

    q: Tensor  # [B, H, M, D]
    k: Tensor  # [B, K, N, D]
    v: Tensor  # [B, K, N, Dv]
    key_lengths: Tensor | None  # [B]
    scale: float
    function: str  # a key of `ROW_FUNCTIONS`
    window_left: int
    window_right: int

    @property
    def visibility(self) -> Visibility:
        M, N = self.q.shape[2], self.k.shape[2]
        return Visibility(M, N, self.window_left, self.window_right, self.key_lengths, first=N - M)

    @property
    def row_function(self) -> RowFunction:
        return ROW_FUNCTIONS[self.function]

    def unflatten(self, _: Tensor | None = None) -> AttentionCall:
        """The call that these arguments stand for."""
        variant = next(row for row in VARIANTS.values() if row.rowwise == self.function)
        return AttentionCall(variant, self.visibility, {}, self.scale)


def rowwise_attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """`reference_attention` for variants that are `rowwise`."""
    seen = call.visibility
    out, _ = rowwise(q, k, v, seen.key_lengths, call.scale, call.variant.rowwise, seen.left, seen.right)
    return out


@operator(f"rowwise({ARGUMENTS}) -> (Tensor, Tensor)")
def rowwise(*inputs: Any) -> tuple[Tensor, Tensor]:
    """The output, and `ROW_NUMBERS` of each row: float32 [B, H, 2, M]."""
    call = RowwiseCall(*inputs)
    how = call.row_function
    out, rows = empty_heads_last(call.q, call.v.shape[3]), empty_rows(call.q, ROW_NUMBERS)
    if how.power:
        launch(rowwise_threshold_kernel, "threshold", call, [call.q, call.k], [rows], TOLERANCE=tolerance(call.q.dtype))
    launch(
        rowwise_forward_kernel, "forward", call, [call.q, call.k, call.v, out], [rows],
        PARTS=how.parts, FLOOR=how.floor, NULL=how.null,
    )  # fmt: skip
    return out, rows


@operator(f"rowwise_backward(Tensor d_out, Tensor out, Tensor rows, {ARGUMENTS}) -> (Tensor, Tensor, Tensor)")
def rowwise_backward(d_out: Tensor, out: Tensor, rows: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `rowwise` for q, k and v."""
    from rectiformer.ops.gpu.rowwise_backward import rowwise_gradients  # which launches by this file

    return rowwise_gradients(RowwiseCall(*inputs), d_out, out, rows)


def empty_rows(q: Tensor, numbers: int) -> Tensor:
    B, H, M, _ = q.shape
    return q.new_empty(B, H, numbers, M, dtype=torch.float32)


def tolerance(dtype: torch.dtype) -> float:
    """How far from 1 a row's mass may be before the last step of Newton's, which at the worst leaves half of that, and
    mostly its square: far below the rounding of weights of this dtype."""
    return 2.0**-20 if dtype == torch.float32 else 2.0**-13


@torch.library.register_fake("rectiformer::rowwise")
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return empty_heads_last(q, v.shape[3]), empty_rows(q, ROW_NUMBERS)


@torch.library.register_fake("rectiformer::rowwise_backward")
def _(d_out: Tensor, out: Tensor, rows: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, ...]:
    return tuple(empty_heads_last(tensor, tensor.shape[3]) for tensor in (q, k, v))


# autograd calls the next functions with a context of its own, whose type torch does not publish.
def _remember_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    remember(ctx, (*output, *inputs), output)


def _differentiate(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *rowwise_backward(d_out, *recall(ctx)), *[None] * 5


def _differentiate_twice(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
    d_out, _, _, *inputs = recall(ctx)
    call = RowwiseCall(*inputs)
    leaves = [d_out, call.q, call.k, call.v, None, None]
    for_d_out, *for_inputs = second_derivatives(call.unflatten, leaves, [*cotangents, None, None])
    # That the output depends on q, k and v is part of their own derivatives.
    return for_d_out, None, None, *for_inputs[:3], *[None] * 5


register_derivative(rowwise, _differentiate, _remember_rows)
register_derivative(rowwise_backward, _differentiate_twice)


def find_tiling(kernel: str, q: Tensor, v: Tensor) -> Tiling:
    """The tiling of a kernel for these head sizes."""
    size = next(size for size in (64, 128, 256) if max(q.shape[3], v.shape[3]) <= size)
    if q.element_size() != 2:
        return EXACT_WIDE if size == 256 else EXACT[kernel]
    return TILINGS[kernel, size] if has_large_tiles(q.device) else SMALL[size]


def launch(kernel: Any, name: str, call: RowwiseCall, tensors: list[Tensor], tables: list[Tensor], **more: Any) -> None:
    """Run a kernel of `TILINGS`, one program per tile of keys ("keys") or of queries, head and sequence.

    `tensors` are read and written in tiles, `tables` have numbers of rows.
    """
    (B, H, M, D), (_, K, N, _), seen = call.q.shape, call.k.shape, call.visibility
    tiling, how = find_tiling(name, call.q, call.v), call.row_function
    tiles, heads = (-(-N // tiling.keys), K) if name == "keys" else (-(-M // tiling.queries), H)
    # One width for keys and values: with two, Triton 3.6's ptxas makes code that reads a register nobody wrote.
    width = block_size(max(D, call.v.shape[3]))
    with torch.cuda.device_of(call.q):  # Triton launches on the current device
        kernel[(tiles, B * heads)](
            *tensors, *tables, pointer(call.key_lengths, call.q), *(tensor.stride() for tensor in tensors),
            (seen.left, seen.right), H, H // K, M, N, D, call.v.shape[3], call.scale / max(1, how.power), call.scale,
            POWER=how.power, HIDES_LATER=seen.hides_later, HIDES_EARLIER=seen.hides_earlier,
            RAGGED=call.key_lengths is not None, PRECISION="tf32x3" if call.q.dtype == torch.float32 else "tf32",
            BLOCK_M=tiling.queries, BLOCK_N=tiling.keys, BLOCK_D=width, BLOCK_DV=width,
            num_warps=tiling.warps, num_stages=tiling.stages, **more,
        )  # fmt: skip


MOST_PASSES = tl.constexpr(24)
"""Passes over the keys after which tau is accepted as it is; Gaussian scores take 4 to 8, the first one included."""
# The tile of queries that a program owns travels as one tuple
#     tile = (queries [BLOCK_M, BLOCK_D], their indices m, seq as in common.py, window, gain)
# where gain is what products are multiplied with: the scale, divided by the power of rows on the simplex.


@triton.jit
def locate_queries(
    q_ptr, lengths_ptr, q_strides, window, H, group, M, N, D, gain,
    HIDES_LATER: tl.constexpr, RAGGED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """First query and `tile` of the program."""
    number, sequence, h = tl.program_id(0), tl.program_id(1) // H, tl.program_id(1) % H
    if HIDES_LATER:  # the longest rows first, so that none is left alone at the end
        number = tl.num_programs(0) - 1 - number
    seq = locate_sequence(sequence, h, group, M, N, lengths_ptr, lengths_ptr, lengths_ptr, RAGGED, False)
    row = number * BLOCK_M
    queries = load_tile(q_ptr, q_ptr, q_strides, sequence, h, 0, row, M, D, BLOCK_M, BLOCK_D, False, False)
    return row, (queries, row + tl.arange(0, BLOCK_M), seq, window, gain)


@triton.jit
def key_parts(row, tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BANDED: tl.constexpr):
    """Begins and ends of three ranges of keys: an edge of visibility, what all queries of the tile see, an edge.

    A key that is loaded as zeros has score 0, which may well have a weight: unlike in long.py, the end of the keys is
    always an edge.
    """
    _, _, seq, window, _ = tile
    begin, full_begin, full_end, end = key_range(row, BLOCK_M, seq, window, BLOCK_N, BANDED)
    return (begin, full_begin, full_end), (tl.minimum(full_begin, end), full_end, end)


@triton.jit
def load_keys(
    ptr, strides, seq, column, D, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Keys or values from `column` on, zeros beyond the sequence's length."""
    b, _, kh, _, _, _, _, length = seq
    return load_tile(ptr, ptr, strides, b, kh, 0, column, length, D, BLOCK_N, BLOCK_D, False, True)


@triton.jit
def tile_scores(
    tile, keys, column, EDGE: tl.constexpr, BANDED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Scores of a tile of keys, HIDDEN where a query does not see a key; and if EDGE, where it sees one."""
    queries, m, seq, window, gain = tile
    _, _, _, _, _, M, N, length = seq
    left, right = window
    scores = tl.dot(queries, keys.T, input_precision=PRECISION) * gain
    seen = 0
    if EDGE:
        seen = visible(m, column + tl.arange(0, BLOCK_N), M, N, length, left, right, 1, BANDED, BANDED)
        scores = tl.where(seen, scores, HIDDEN)
    return scores, seen


@triton.jit
def row_pointers(rows_ptr, seq, H, number, m, NUMBERS: tl.constexpr):
    """Where one of the `NUMBERS` numbers of each row is, for queries m."""
    b, h, _, _, _, M, _, _ = seq
    return rows_ptr + (tl.cast(b * H + h, tl.int64) * NUMBERS + number) * M + m


@triton.jit
def load_rows(rows_ptr, seq, H, number, m, other, NUMBERS: tl.constexpr, KEY_AXIS: tl.constexpr):
    """One of the numbers of each row, `other` beyond the last query, to go with a tile of scores."""
    numbers = tl.load(row_pointers(rows_ptr, seq, H, number, m, NUMBERS), mask=m < seq[5], other=other)
    return tl.expand_dims(numbers, KEY_AXIS)


@triton.jit
def load_numbers(rows_ptr, seq, H, m, KEY_AXIS: tl.constexpr):
    """Both numbers of each row. Beyond the last query they are 1 and 0, and scores are 0: no key has a weight."""
    first = load_rows(rows_ptr, seq, H, 0, m, 1.0, 2, KEY_AXIS)
    return first, load_rows(rows_ptr, seq, H, 1, m, 0.0, 2, KEY_AXIS)


@triton.jit
def highest_score(
    top, tile, k_ptr, k_strides, begin, end, D,
    EDGE: tl.constexpr, BANDED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    for column in range(begin, end, BLOCK_N):
        keys = load_keys(k_ptr, k_strides, tile[2], column, D, BLOCK_N, BLOCK_D)
        scores, _ = tile_scores(tile, keys, column, EDGE, BANDED, PRECISION, BLOCK_N)
        top = tl.maximum(top, tl.max(scores, 1))
    return top


@triton.jit
def add_mass(
    mass, slope, top, tau, tile, k_ptr, k_strides, begin, end, D,
    POWER: tl.constexpr, EDGE: tl.constexpr, BANDED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`mass` and `slope` plus what keys `begin` to `end` add: [x - tau]+ ** power, and how fast it falls with tau."""
    for column in range(begin, end, BLOCK_N):
        keys = load_keys(k_ptr, k_strides, tile[2], column, D, BLOCK_N, BLOCK_D)
        scores, _ = tile_scores(tile, keys, column, EDGE, BANDED, PRECISION, BLOCK_N)
        gap = relu(scores - top[:, None] - tau[:, None])
        mass += tl.sum(whole_power(gap, POWER), 1)
        slope += tl.sum((gap > 0.0).to(tl.float32) if POWER == 1 else 2.0 * gap, 1)
    return mass, slope


@triton.jit
def next_tau(tau, low, high, mass, slope, POWER: tl.constexpr):
    """Newton's step from here, where to look next, and the bounds on the true tau: see the top of this file."""
    slope = tl.maximum(slope, 1e-30)
    newton = (mass - 1.0) / slope if POWER == 1 else 2.0 * (mass - tl.sqrt_rn(mass)) / slope
    low = tl.maximum(low, tau + newton, propagate_nan=tl.PropagateNan.ALL)
    high = tl.where(mass < 1.0, tl.minimum(high, tau), high)
    heavy = tl.maximum(mass, 1.0)
    far = tau + 4.0 * (heavy - heavy / tl.sqrt_rn(tl.sqrt_rn(heavy))) / slope
    return newton, tl.where((mass > 2.0) & (far < high), tl.maximum(far, low), low), low, high


@triton.jit
def split_sum(top, tau, step):
    """top + tau + step as a number of float32 and the rest: what rounding takes from the sum of the first two is known
    exactly (Knuth's TwoSum), and the step is far smaller."""
    base = top + tau
    back = base - top
    return base, (top - (base - back)) + (tau - back) + step


@triton.jit
def rowwise_threshold_kernel(
    q_ptr, k_ptr, rows_ptr, lengths_ptr, q_strides, k_strides, window, H, group, M, N, D, Dv, gain, scale,
    POWER: tl.constexpr, HIDES_LATER: tl.constexpr, HIDES_EARLIER: tl.constexpr, RAGGED: tl.constexpr,
    PRECISION: tl.constexpr, TOLERANCE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The threshold of each row of one tile of queries. Every pass walks over all keys that they see."""
    BANDED: tl.constexpr = HIDES_LATER or HIDES_EARLIER
    row, tile = locate_queries(
        q_ptr, lengths_ptr, q_strides, window, H, group, M, N, D, gain, HIDES_LATER, RAGGED, BLOCK_M, BLOCK_D
    )
    _, m, seq, _, _ = tile
    starts, stops = key_parts(row, tile, BLOCK_M, BLOCK_N, BANDED)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    for part in tl.static_range(3):
        if HIDES_EARLIER or part > 0:
            top = highest_score(
                top, tile, k_ptr, k_strides, starts[part], stops[part], D, part != 1, BANDED, PRECISION, BLOCK_N,
                BLOCK_D,
            )  # fmt: skip
    tau = tl.full([BLOCK_M], -1.0, tl.float32)
    low, high, step = tau, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    moving = m < M
    passes = 1
    while (passes < MOST_PASSES) & (tl.max(moving.to(tl.int32), 0) > 0):
        mass, slope = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
        for part in tl.static_range(3):
            if HIDES_EARLIER or part > 0:
                mass, slope = add_mass(
                    mass, slope, top, tau, tile, k_ptr, k_strides, starts[part], stops[part], D, POWER, part != 1,
                    BANDED, PRECISION, BLOCK_N, BLOCK_D,
                )  # fmt: skip
        newton, ahead, low, high = next_tau(tau, low, high, mass, slope, POWER)
        # A row that is done stays as it is while others of its tile go on: no row depends on its neighbors.
        step = tl.where(moving, newton, step)
        moving = moving & (tl.abs(mass - 1.0) > TOLERANCE) & (ahead != tau)  # NaN ends it
        tau = tl.where(moving, ahead, tau)
        passes += 1
    base, rest = split_sum(top, tl.where(moving, low, tau), tl.where(moving, 0.0, step))
    tl.store(row_pointers(rows_ptr, seq, H, 0, m, 2), base, mask=m < M)
    tl.store(row_pointers(rows_ptr, seq, H, 1, m, 2), rest, mask=m < M)


@triton.jit
def mix_keys(
    mixed, first, second, tile, k_ptr, v_ptr, k_strides, v_strides, begin, end, D, Dv,
    POWER: tl.constexpr, PARTS: tl.constexpr, EDGE: tl.constexpr, BANDED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """`mixed` plus what keys `begin` to `end` add. Of normalized rows, all sums so far are times e^-first, and `second`
    is that of the total."""
    for column in range(begin, end, BLOCK_N):
        keys = load_keys(k_ptr, k_strides, tile[2], column, D, BLOCK_N, BLOCK_D)
        x, seen = tile_scores(tile, keys, column, EDGE, BANDED, PRECISION, BLOCK_N)
        values = load_keys(v_ptr, v_strides, tile[2], column, Dv, BLOCK_N, BLOCK_DV)
        if POWER > 0:
            weights = row_weights(x, first, second, POWER, PARTS)
        else:
            top = tl.maximum(first, tl.max(x, 1, keep_dims=True))
            fade = tl.exp(first - top)
            first = top
            weights, parts = PARTS(x, top)
            if EDGE:
                weights, parts = tl.where(seen, weights, 0.0), tl.where(seen, parts, 0.0)
            second = second * fade + tl.sum(parts, 1, keep_dims=True)
            mixed = mixed * fade
        mixed = tl.dot(weights.to(values.dtype), values, mixed, input_precision=PRECISION)
    return mixed, first, second


@triton.jit
def rowwise_forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, rows_ptr, lengths_ptr, q_strides, k_strides, v_strides, out_strides, window,
    H, group, M, N, D, Dv, gain, scale,
    POWER: tl.constexpr, PARTS: tl.constexpr, FLOOR: tl.constexpr, NULL: tl.constexpr,
    HIDES_LATER: tl.constexpr, HIDES_EARLIER: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The values mixed for one tile of queries of one head; and the two numbers of each row, if normalized."""
    BANDED: tl.constexpr = HIDES_LATER or HIDES_EARLIER
    row, tile = locate_queries(
        q_ptr, lengths_ptr, q_strides, window, H, group, M, N, D, gain, HIDES_LATER, RAGGED, BLOCK_M, BLOCK_D
    )
    _, m, seq, _, _ = tile
    if POWER > 0:
        first, second = load_numbers(rows_ptr, seq, H, m, 1)
    else:
        first, second = tl.full([BLOCK_M, 1], FLOOR, tl.float32), tl.full([BLOCK_M, 1], NULL, tl.float32)
    starts, stops = key_parts(row, tile, BLOCK_M, BLOCK_N, BANDED)
    mixed = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for part in tl.static_range(3):  # an edge, what all queries see, another edge
        if HIDES_EARLIER or part > 0:
            mixed, first, second = mix_keys(
                mixed, first, second, tile, k_ptr, v_ptr, k_strides, v_strides, starts[part], stops[part], D, Dv,
                POWER, PARTS, part != 1, BANDED, PRECISION, BLOCK_N, BLOCK_D, BLOCK_DV,
            )  # fmt: skip
    if POWER == 0:
        empty = second == 0.0
        inverse = tl.where(empty, 0.0, tl.div_rn(1.0, tl.where(empty, 1.0, second)))  # NaN stays NaN
        mixed = mixed * inverse
        inside = (m < M)[:, None]
        tl.store(row_pointers(rows_ptr, seq, H, 0, m, 2)[:, None], first, mask=inside)
        tl.store(row_pointers(rows_ptr, seq, H, 1, m, 2)[:, None], inverse, mask=inside)
    store_tile(out_ptr, out_strides, seq[0], seq[1], 0, row, M, Dv, mixed, BLOCK_M, BLOCK_DV)
