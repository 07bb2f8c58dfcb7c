"""Attention of short sequences: one kernel each way, in which a program holds all keys of one (sequence, head).

The forward pass is two matrix products with the weights between them; the backward pass rebuilds the weights and makes
all gradients in one go, in one program per key head, so that nothing is added up by atomics and reruns are bitwise
equal. Autograd keeps the inputs and nothing else. Weights are those of a pointwise variant; power 0 is a softmax, there
so that both can be compared like for like. As operators of torch: `rectiformer::short` and its backward.

A plain ReLU lets every positive factor of a row through, so the scale of the scores, the 1 / (1 - p) of dropout and the
row scale are one number per row, multiplied once. Other functions get scaled scores (SCALE_INSIDE).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from rectiformer.ops.activations import cosine_scores
from rectiformer.ops.autograd import operator, recall, register_derivative
from rectiformer.ops.call import AttentionCall, Packing
from rectiformer.ops.gpu.common import (
    ARGUMENTS,
    NO_GRADIENT,
    AttentionPlan,
    KernelCall,
    block_size,
    count_keys,
    differentiate_twice,
    dropout_keeps,
    dropout_words,
    empty_heads_last,
    flatten,
    hidden_sides,
    packed_view,
    row_gain,
    row_scale_parts,
    visible,
    with_positive_scale,
)
from rectiformer.ops.gpu.launch import Launch, launch_all
from rectiformer.ops.gpu.plans import Gradients, PlanCache, fill_gradients, open_plan, run_kernels
from rectiformer.ops.gpu.pointwise import LN2, score_gradients, shift_unit, unit_rows, unit_rows_gradient, weigh

Launches = list[Launch]
BUCKETS = (32, 64, 128)
"""Packed sequences are taken to be as long as one of these, so that few lengths are compiled for."""


def short_attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, packing: Packing | None = None) -> Tensor:
    """`reference_attention` for pointwise rows and softmax, up to `MAX_SHORT` queries and keys.

    With `packing`, of sequences that lie end to end in [1, H, total, D]; nothing is read on the host.
    """
    return run_kernels(ShortPlan, short_inputs(q, k, v, call, packing))


def short_inputs(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, packing: Packing | None) -> tuple[Any, ...]:
    """The operator's inputs."""
    q, call = with_positive_scale(q, call)
    max_queries, max_keys = call.visibility.queries, call.visibility.keys
    if packing is not None:
        assert packing.max_seqlen_q is not None
        assert packing.max_seqlen_k is not None
        max_queries, max_keys = bucket(packing.max_seqlen_q), bucket(packing.max_seqlen_k)
    cosine = call.variant.score is cosine_scores
    return q, k, v, *flatten(q, call, packing, row_scale_parts(q, call), max_queries, max_keys, cosine)


def bucket(length: int) -> int:
    """The smallest of `BUCKETS` that holds `length`: a few comparisons, so that a compiled caller stays as it is."""
    for size in BUCKETS:
        if length <= size:
            return size
    raise AssertionError(f"{length} is longer than any bucket")


def launch_configs(call: KernelCall, backward: bool) -> Iterator[dict[str, int]]:
    """Block sizes, warps and registers of each launch, and which packed sequences it does: those longer than
    MIN_LENGTH, up to MAX_LENGTH on their longer side."""
    M, N = block_size(call.max_queries), block_size(call.max_keys)
    shortest, longest = 0, max(M, N)  # the same for all lengths of a block: each value is compiled anew
    if call.packed and longest == 128:  # a launch of their own, so that short sequences cost no long block
        shortest = 64
        yield tune(call, backward, min(M, 64), min(N, 64)) | {"MIN_LENGTH": 0, "MAX_LENGTH": 64}
    yield tune(call, backward, M, N) | {"MIN_LENGTH": shortest, "MAX_LENGTH": longest}


def tune(call: KernelCall, backward: bool, rows: int, keys: int) -> dict[str, int]:
    """Queries and keys of a program's blocks, its warps and registers, as measured on an H200 (docs/log.md)."""
    longest, head_dim = max(rows, keys), max(call.q.shape[3], call.v.shape[3])
    if not backward:  # all at once: blocks of 64 that leave out what causal order hides are no faster
        return {"BLOCK_M": rows, "BLOCK_N": keys, "num_warps": count_warps(call, longest, heavy=False)}
    if longest <= 64 or head_dim > 64:
        grouped = call.k.shape[1] < call.q.shape[1]
        rows = rows_for_gradients(rows, keys)
        return {"ROWS": rows, "BLOCK_M": rows, "BLOCK_N": keys, "num_warps": count_warps(call, longest, heavy=grouped)}
    # with no more registers, two programs run at once
    return {"ROWS": rows, "BLOCK_M": min(rows, 32), "BLOCK_N": keys, "num_warps": 8, "maxnreg": 128}


def rows_for_gradients(rows: int, keys: int) -> int:
    """Queries in a block of a backward pass that holds `keys` keys.

    With fewer than 64 queries to 64 keys, the ptxas 12.8 of Triton 3.6 makes code that reads a register nobody wrote,
    and the gradient of the queries is wrong (docs/log.md; tests/machine_code.py looks for such code).
    """
    return max(rows, 64) if keys == 64 else rows


def count_warps(call: KernelCall, longest: int, heavy: bool) -> int:
    """heavy: blocks do not fit the registers of one warp, however short the sequences are."""
    exact = call.q.dtype == torch.float32  # products without tensor units hold all their numbers in registers
    few = 4 if heavy or exact or max(call.q.shape[3], call.v.shape[3]) > 64 else 1
    return {16: few, 32: few, 64: 8 if exact else 4, 128: 8}[longest]


def short_flags(call: KernelCall) -> dict[str, Any]:
    """The compile-time arguments that depend on the call alone."""
    later, earlier = hidden_sides(call)
    return call.flags() | {
        "HIDES_LATER": later,
        "HIDES_EARLIER": earlier,
        "SCALE_INSIDE": not call.scales_outside,
        "UNIT_ROWS": call.unit_rows,
        "GROUP": call.q.shape[1] // call.k.shape[1],
        "BLOCK_D": block_size(call.q.shape[3]),
        "BLOCK_DV": block_size(call.v.shape[3]),
    }


TABLES = ("cu_seqlens_q", "cu_seqlens_k", "head_factors", "key_lengths", "seed", "head_shifts")
"""What the kernels read by address alone."""


def prepare(
    kernel: Any, call: KernelCall, heads: int, tensors: list[Tensor], slots: list[int], strided: int, backward: bool
) -> Launches:
    """Launches of a kernel, one program per sequence and head; `strided` of its tensors are read by strides."""
    q = call.q
    strides = [stride for slot in slots[:strided] for stride in tensors[slot].stride()]
    # All that scales a rectified weight is one number. A softmax is taken in base 2.
    gain = (call.row_factor * (call.scale**call.power if call.scales_outside else 1.0) if call.power else 1.0) / (
        1 - call.dropout_p
    )
    sizes = (q.shape[1], call.max_queries, call.max_keys, q.shape[3], call.v.shape[3])
    scale = call.scale if call.power else call.scale * math.log2(math.e)
    scales = (scale, gain, call.row_exponent, call.shift_factor, call.dropout_threshold)
    numbers = (*strides, *sizes, call.window_left, call.window_right, *scales)
    grid, flags = (call.sequences * heads,), short_flags(call)
    return [
        Launch(kernel, grid, tensors, slots, numbers, flags | config | {"num_stages": 2})
        for config in launch_configs(call, backward)
    ]


class ShortPlan(AttentionPlan):
    """One launch each way, or two where packed sequences are of very different lengths."""

    gradient_of: ClassVar = {"q": 0, "k": 1, "v": 2, "head_factors": 3, "head_shifts": 4}

    def __init__(self, tensors: Sequence[Tensor | None], numbers: tuple[Any, ...]) -> None:
        super().__init__(tensors, numbers)
        self.launches: Launches = []
        self.gradients: PlanCache[Launches] = PlanCache()
        """By the strides of the result's gradient."""
        self.packed_gradients: PlanCache[Launches] = PlanCache()
        """The same launches, where tensors are [total, H, D]."""

    def forward(self, held: Sequence[Tensor]) -> Tensor:
        q, _, v = held[:3]
        out = empty_heads_last(q, v.shape[3])
        tensors = [*held, out]
        if not self.launches:
            slots = [0, 1, 2, len(held), *self.find(TABLES)]
            self.launches = prepare(
                short_forward_kernel, self.call(held), q.shape[1], tensors, slots, 4, backward=False
            )
        launch_all(self.launches, tensors)
        return out

    def backward(self, d_out: Tensor, held: Sequence[Tensor]) -> Gradients:
        q, k, v = held[:3]
        d_q, d_k, d_v = [empty_heads_last(tensor, tensor.shape[3]) for tensor in (q, k, v)]
        sums = {name: self.empty_sums(held) for name in ("head_factors", "head_shifts") if name in self.slots}
        tensors = [*held, d_out, d_q, d_k, d_v, *sums.values()]
        launches = self.gradients.get(d_out.stride())
        if launches is None:
            first = len(held)
            summed = [
                first + 4 + list(sums).index(name) if name in sums else 0 for name in ("head_factors", "head_shifts")
            ]
            slots = [first, 0, 1, 2, first + 1, first + 2, first + 3, *summed, *self.find(TABLES)]
            launches = prepare(short_backward_kernel, self.call(held), k.shape[1], tensors, slots, 7, backward=True)
            self.gradients.keep(d_out.stride(), launches)
        launch_all(launches, tensors)
        by_head = [sums[name].sum(0) if name in sums else None for name in ("head_factors", "head_shifts")]
        return d_q, d_k, d_v, *by_head

    def forward_packed(self, held: Sequence[Tensor]) -> Tensor:
        """Without the views of the general way: launches that are prepared take addresses alone, and [total, H, D]
        without gaps lies in memory as heads that are last do."""
        if not self.launches:
            return super().forward_packed(held)
        q, _, v = held[:3]
        out = q.new_empty((*q.shape[:2], v.shape[2]))
        launch_all(self.launches, [*held, out])
        return out

    def backward_packed(self, d_out: Tensor, held: Sequence[Tensor]) -> Gradients:
        launches = self.packed_gradients.get(d_out.stride())
        if launches is None:
            found = super().backward_packed(d_out, held)
            self.packed_gradients.keep(d_out.stride(), self.gradients[packed_view(d_out).stride()])
            return found
        grads = [tensor.new_empty(tensor.shape) for tensor in held[:3]]
        launch_all(launches, [*held, d_out, *grads])
        return tuple(grads)

    def empty_sums(self, held: Sequence[Tensor]) -> Tensor:
        """One number per sequence and head. Packed sequences that are empty on both sides add nothing, and nothing is
        written for them."""
        q, call = held[0], self.call(held)
        new = q.new_zeros if call.packed else q.new_empty
        return new((call.sequences, q.shape[1]), dtype=torch.float32)


@operator(f"short({ARGUMENTS}) -> Tensor")
def short(*inputs: Any) -> Tensor:
    """The output of a `KernelCall` without bias or mask."""
    plan, held = open_plan(ShortPlan, inputs)
    return plan.forward(held)


@operator(f"short_backward(Tensor d_out, {ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
def short_backward(d_out: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Gradients of `short` for q, k, v, head_factors and head_shifts; the last two are empty without them."""
    plan, held = open_plan(ShortPlan, inputs)
    return fill_gradients(plan.backward(d_out, held), d_out)


ShortPlan.operator, ShortPlan.backward_operator = short, short_backward


@torch.library.register_fake("rectiformer::short")
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return empty_heads_last(q, v.shape[3])


@torch.library.register_fake("rectiformer::short_backward")
def _(d_out: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    call = KernelCall(*inputs)
    of_heads = (
        call.q.new_empty(0 if numbers is None else call.q.shape[1], dtype=torch.float32)
        for numbers in (call.head_factors, call.head_shifts)
    )
    return *(empty_heads_last(tensor, tensor.shape[3]) for tensor in (call.q, call.k, call.v)), *of_heads


# autograd calls the next functions with a context of its own, whose type torch does not publish.
def _differentiate(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    inputs = recall(ctx)
    d_q, d_k, d_v, *of_heads = short_backward(d_out, *inputs)
    of_heads = [None if given is None else found for given, found in zip(inputs[5:7], of_heads, strict=True)]
    return d_q, d_k, d_v, None, None, *of_heads, *NO_GRADIENT


def _differentiate_twice(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
    return differentiate_twice(ctx, [*cotangents[:3], None, *cotangents[3:]])


register_derivative(short, _differentiate)
register_derivative(short_backward, _differentiate_twice)


@triton.jit
def locate(sequence, M, N, q_bounds_ptr, k_bounds_ptr, PACKED: tl.constexpr):
    """A sequence's batch row, first query, first key, queries and keys; PACKED ones share batch row 0.

    Offsets are 64 bits wide from here on: packed tensors may hold over 2^31 numbers.
    """
    b = sequence.to(tl.int64)
    q_start, k_start = b * 0, b * 0
    if PACKED:
        q_start = tl.load(q_bounds_ptr + b).to(tl.int64)
        k_start = tl.load(k_bounds_ptr + b).to(tl.int64)
        M = (tl.load(q_bounds_ptr + b + 1) - q_start).to(tl.int32)
        N = (tl.load(k_bounds_ptr + b + 1) - k_start).to(tl.int32)
        b = b * 0
    return b, q_start, k_start, M, N


@triton.jit
def load_head(
    ptr, stride_batch, stride_head, stride_row, stride_column, b, h, start, rows, limit, D,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows of head h in batch row b, from row `start` on: [rows, BLOCK_D], zeros beyond `limit` rows and D columns.

    Padding may hold anything, NaN included, and 0 * NaN would reach the sums: so it is never loaded.
    """
    columns = tl.arange(0, BLOCK_D)
    inside = (rows[:, None] < limit) & (columns[None, :] < D)
    own = ptr + b * stride_batch + h * stride_head + start * stride_row
    return tl.load(own + rows[:, None] * stride_row + columns[None, :] * stride_column, mask=inside, other=0.0)


@triton.jit
def store_head(
    ptr, stride_batch, stride_head, stride_row, stride_column, b, h, start, rows, limit, D, values,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK_D)
    inside = (rows[:, None] < limit) & (columns[None, :] < D)
    own = ptr + b * stride_batch + h * stride_head + start * stride_row
    values = values.to(ptr.dtype.element_ty)
    tl.store(own + rows[:, None] * stride_row + columns[None, :] * stride_column, values, mask=inside)


@triton.jit
def keeps(seed_ptr, threshold, b, h, H, q_start, k_start, m, n, KEY_AXIS: tl.constexpr):
    """`dropout_keeps` of one head's block that begins at query `q_start` and key `k_start` of batch row b."""
    rows, columns = (q_start + m).to(tl.int32), (k_start + n).to(tl.int32)
    words = dropout_words(seed_ptr, threshold, (b * H + h).to(tl.int32), True)
    return dropout_keeps(words, rows, columns, KEY_AXIS)


@triton.jit
def shift_scores(
    scores, scale, factor, m, M, N, length, left, right,
    KEY_AXIS: tl.constexpr, BANDED: tl.constexpr, SCALE_INSIDE: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Scores as functions other than a plain ReLU take them, scaled and shifted; and the unit of the shift."""
    unit = 0.0
    if SCALE_INSIDE:
        scores = scores * scale
    if SHIFT > 0:
        unit = shift_unit(count_keys(m, M, N, length, left, right, BANDED), SHIFT)
        if BANDED:
            unit = tl.expand_dims(unit, KEY_AXIS)
        scores = scores - factor * unit
    return scores, unit


@triton.jit
def softmax(scores, seen, scale, KEY_AXIS: tl.constexpr, EMPTY: tl.constexpr):
    """Weights in base 2; `scale` holds log2(e). EMPTY: rows that see nothing may occur."""
    scores = tl.where(seen, scores * scale, float("-inf"))
    highest = tl.max(scores, KEY_AXIS)
    if EMPTY:
        highest = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - tl.expand_dims(highest, KEY_AXIS))
    total = tl.sum(weights, KEY_AXIS)
    if EMPTY:
        total = tl.where(total == 0.0, 1.0, total)
    return weights * tl.expand_dims(1.0 / total, KEY_AXIS)


@triton.jit
def row_weights(
    scores, seen, scale,
    KEY_AXIS: tl.constexpr, POWER: tl.constexpr, WEIGHT: tl.constexpr, BANDED: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    """WEIGHT(scores) ** POWER, or a softmax for POWER 0; what else multiplies a row is left out.

    Only a band has to be cut out, since keys beyond the length were loaded as zeros, and so were their values.
    """
    if POWER == 0:
        weights = softmax(scores, seen, scale, KEY_AXIS, EMPTY)
    else:
        weights = weigh(scores, seen, tl.float32, POWER, WEIGHT, False, BANDED, False)
    return weights


@triton.jit
def scale_and_drop(values, gain, kept, POWER: tl.constexpr, DROPOUT: tl.constexpr):
    """Weights or their gradients times what multiplies a row, and zero where a weight is dropped."""
    values = values * gain if POWER > 0 or DROPOUT else values
    return tl.where(kept, values, 0.0) if DROPOUT else values


@triton.jit
def score_gradient(
    scores, weights, d_weights, seen, scale,
    KEY_AXIS: tl.constexpr, POWER: tl.constexpr, WEIGHT: tl.constexpr, SLOPE: tl.constexpr, RECTIFIED: tl.constexpr,
    BANDED: tl.constexpr,
):  # fmt: skip
    """The gradient of what `row_weights` was given, from that of what it made of it."""
    if POWER == 0:
        mean = tl.sum(weights * d_weights, KEY_AXIS)
        d_scores = weights * (d_weights - tl.expand_dims(mean, KEY_AXIS)) * (scale * LN2)
    elif RECTIFIED and POWER == 1:
        d_scores = tl.where(weights <= 0.0, 0.0, d_weights)  # weights are hidden already; NaN passes, as in torch
    elif RECTIFIED:  # 0 where the ReLU is, without asking again
        below = weigh(scores, seen, tl.float32, POWER - 1, WEIGHT, False, BANDED, False)
        d_scores = POWER * below * d_weights
    else:
        d_scores = POWER * score_gradients(
            scores, seen, d_weights, tl.float32, POWER, WEIGHT, SLOPE, False, BANDED, False
        )
    return d_scores


@triton.jit
def block_gradients(
    scores, d_weights, kept, m, n, M, N, length, left, right, scale, shift, gain, exponent, factor_ptr,
    POWER: tl.constexpr, WEIGHT: tl.constexpr, SLOPE: tl.constexpr, RECTIFIED: tl.constexpr, SHIFT: tl.constexpr,
    SCALE_INSIDE: tl.constexpr, ROW_SCALE: tl.constexpr, PER_HEAD: tl.constexpr, HIDES_LATER: tl.constexpr,
    HIDES_EARLIER: tl.constexpr, EMPTY: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Of a block of products [n, m]: the gradient of the products, the weights that mix values, and what the block adds
    to the gradients of its head's factor and shift."""
    BANDED: tl.constexpr = HIDES_LATER or HIDES_EARLIER
    scores, unit = shift_scores(scores, scale, shift, m, M, N, length, left, right, 0, BANDED, SCALE_INSIDE, SHIFT)
    seen = visible(m, n, M, N, length, left, right, 0, HIDES_LATER, HIDES_EARLIER)
    weights = row_weights(scores, seen, scale, 0, POWER, WEIGHT, BANDED, EMPTY)
    row = row_gain(gain, exponent, m, M, N, length, left, right, 0, BANDED, ROW_SCALE)
    d_weights = scale_and_drop(d_weights, row, kept, POWER, DROPOUT)
    grown = scale_and_drop(weights, row, kept, POWER, DROPOUT)
    d_factor, d_shift = 0.0, 0.0
    if PER_HEAD:  # the factor is left out until its own gradient is summed, so that a factor of 0 has one
        d_factor = tl.sum(tl.sum(weights * d_weights, 1), 0)
        factor = tl.load(factor_ptr)
        d_weights, grown = d_weights * factor, grown * factor
    d_scores = score_gradient(scores, weights, d_weights, seen, scale, 0, POWER, WEIGHT, SLOPE, RECTIFIED, BANDED)
    if SHIFT > 0:
        d_shift = -tl.sum(tl.sum(d_scores * unit, 1), 0)
    return d_scores * scale if SCALE_INSIDE else d_scores, grown, d_factor, d_shift


# Lengths and window differ from call to call: specialized, every multiple of 16 would be compiled anew. Flags are
# constexpr, since each takes instructions out of kernels that run for microseconds.
@triton.jit(do_not_specialize=["M", "N", "left", "right"])
def short_forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, q_bounds_ptr, k_bounds_ptr, factor_ptr, lengths_ptr, seed_ptr, shifts_ptr,
    q_batch, q_head, q_row, q_column,
    k_batch, k_head, k_row, k_column,
    v_batch, v_head, v_row, v_column,
    o_batch, o_head, o_row, o_column,
    H, M, N, D, Dv, left, right, scale, gain, exponent, shift_factor, threshold,
    POWER: tl.constexpr, WEIGHT: tl.constexpr, SLOPE: tl.constexpr, RECTIFIED: tl.constexpr, SHIFT: tl.constexpr,
    SHIFT_PER_HEAD: tl.constexpr, SCALE_INSIDE: tl.constexpr, ROW_SCALE: tl.constexpr, PER_HEAD: tl.constexpr,
    UNIT_ROWS: tl.constexpr, HIDES_LATER: tl.constexpr, HIDES_EARLIER: tl.constexpr, RAGGED: tl.constexpr,
    DROPOUT: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr,
    MIN_LENGTH: tl.constexpr, MAX_LENGTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """All queries of one (sequence, query head) against all of its keys."""
    BANDED: tl.constexpr = HIDES_LATER or HIDES_EARLIER
    h = (tl.program_id(0) % H).to(tl.int64)
    b, q_start, k_start, M, N = locate(tl.program_id(0) // H, M, N, q_bounds_ptr, k_bounds_ptr, PACKED)
    if PACKED and ((tl.maximum(M, N) <= MIN_LENGTH) | (tl.maximum(M, N) > MAX_LENGTH)):
        return  # the other launch does it
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    length = tl.minimum(tl.load(lengths_ptr + b).to(tl.int32), N) if RAGGED else N
    key_head = h // GROUP
    q = load_head(q_ptr, q_batch, q_head, q_row, q_column, b, h, q_start, m, M, D, BLOCK_D)
    k = load_head(k_ptr, k_batch, k_head, k_row, k_column, b, key_head, k_start, n, length, D, BLOCK_D)
    v = load_head(v_ptr, v_batch, v_head, v_row, v_column, b, key_head, k_start, n, length, Dv, BLOCK_DV)
    if UNIT_ROWS:
        q, k = unit_rows(q, D), unit_rows(k, D)
    gain = gain * tl.load(factor_ptr + h) if PER_HEAD else gain
    shift = shift_factor * tl.load(shifts_ptr + h) if SHIFT_PER_HEAD else shift_factor
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    scores, _unit = shift_scores(scores, scale, shift, m, M, N, length, left, right, 1, BANDED, SCALE_INSIDE, SHIFT)
    seen = visible(m, n, M, N, length, left, right, 1, HIDES_LATER, HIDES_EARLIER)
    weights = row_weights(scores, seen, scale, 1, POWER, WEIGHT, BANDED, BANDED or RAGGED or PACKED)
    row = row_gain(gain, exponent, m, M, N, length, left, right, 1, BANDED, ROW_SCALE)
    kept = keeps(seed_ptr, threshold, b, h, H, q_start, k_start, m, n, 1) if DROPOUT else seen
    weights = scale_and_drop(weights, row, kept, POWER, DROPOUT)
    out = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    store_head(out_ptr, o_batch, o_head, o_row, o_column, b, h, q_start, m, M, Dv, out, BLOCK_DV)


@triton.jit(do_not_specialize=["M", "N", "left", "right"])
def short_backward_kernel(
    d_out_ptr, q_ptr, k_ptr, v_ptr, dq_ptr, dk_ptr, dv_ptr, d_factor_ptr, d_shift_ptr, q_bounds_ptr, k_bounds_ptr,
    factor_ptr, lengths_ptr, seed_ptr, shifts_ptr, g_batch, g_head, g_row, g_column, q_batch, q_head, q_row, q_column,
    k_batch, k_head, k_row, k_column, v_batch, v_head, v_row, v_column,
    dq_batch, dq_head, dq_row, dq_column, dk_batch, dk_head, dk_row, dk_column, dv_batch, dv_head, dv_row, dv_column,
    H, M, N, D, Dv, left, right, scale, gain, exponent, shift_factor, threshold,
    POWER: tl.constexpr, WEIGHT: tl.constexpr, SLOPE: tl.constexpr, RECTIFIED: tl.constexpr, SHIFT: tl.constexpr,
    SHIFT_PER_HEAD: tl.constexpr, SCALE_INSIDE: tl.constexpr, ROW_SCALE: tl.constexpr, PER_HEAD: tl.constexpr,
    UNIT_ROWS: tl.constexpr, HIDES_LATER: tl.constexpr, HIDES_EARLIER: tl.constexpr, RAGGED: tl.constexpr,
    DROPOUT: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr,
    MIN_LENGTH: tl.constexpr, MAX_LENGTH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """One (sequence, key head), summed over the GROUP query heads that read it. Blocks of scores are [n, m]: all
    gradients but that of q want them so."""
    sequence, key_head = tl.program_id(0) // (H // GROUP), (tl.program_id(0) % (H // GROUP)).to(tl.int64)
    b, q_start, k_start, M, N = locate(sequence, M, N, q_bounds_ptr, k_bounds_ptr, PACKED)
    if PACKED and ((tl.maximum(M, N) <= MIN_LENGTH) | (tl.maximum(M, N) > MAX_LENGTH)):
        return
    n = tl.arange(0, BLOCK_N)
    length = tl.minimum(tl.load(lengths_ptr + b).to(tl.int32), N) if RAGGED else N
    k = load_head(k_ptr, k_batch, k_head, k_row, k_column, b, key_head, k_start, n, length, D, BLOCK_D)
    k = unit_rows(k, D) if UNIT_ROWS else k
    v = load_head(v_ptr, v_batch, v_head, v_row, v_column, b, key_head, k_start, n, length, Dv, BLOCK_DV)
    d_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    d_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for member in range(GROUP):
        h = key_head * GROUP + member
        d_factor, d_shift = 0.0, 0.0
        shift = shift_factor * tl.load(shifts_ptr + h) if SHIFT_PER_HEAD else shift_factor
        for first in range(0, ROWS if ROWS == BLOCK_M else M, BLOCK_M):
            m = first + tl.arange(0, BLOCK_M)
            given = load_head(q_ptr, q_batch, q_head, q_row, q_column, b, h, q_start, m, M, D, BLOCK_D)
            q = unit_rows(given, D) if UNIT_ROWS else given
            d_out = load_head(d_out_ptr, g_batch, g_head, g_row, g_column, b, h, q_start, m, M, Dv, BLOCK_DV)
            scores = tl.dot(k, tl.trans(q), input_precision="ieee")
            d_weights = tl.dot(v, tl.trans(d_out), input_precision="ieee")
            kept = keeps(seed_ptr, threshold, b, h, H, q_start, k_start, m, n, 0) if DROPOUT else scores
            d_scores, grown, of_factor, of_shift = block_gradients(
                scores, d_weights, kept, m, n, M, N, length, left, right, scale, shift, gain, exponent, factor_ptr + h,
                POWER, WEIGHT, SLOPE, RECTIFIED, SHIFT, SCALE_INSIDE, ROW_SCALE, PER_HEAD, HIDES_LATER,
                HIDES_EARLIER, HIDES_LATER or HIDES_EARLIER or RAGGED or PACKED, DROPOUT,
            )  # fmt: skip
            d_scores = d_scores.to(q.dtype)
            d_factor, d_shift = d_factor + of_factor, d_shift + of_shift
            # d_q^T = k^T d_scores^T: the result is transposed for the store alone, never for another product.
            d_q = tl.trans(tl.dot(tl.trans(k), d_scores, input_precision="ieee"))
            d_q = unit_rows_gradient(d_q, given, D) if UNIT_ROWS else d_q
            store_head(dq_ptr, dq_batch, dq_head, dq_row, dq_column, b, h, q_start, m, M, D, d_q, BLOCK_D)
            d_v = tl.dot(grown.to(d_out.dtype), d_out, d_v, input_precision="ieee")
            d_k = tl.dot(d_scores, q, d_k, input_precision="ieee")
        if PER_HEAD:
            tl.store(d_factor_ptr + sequence * H + h, d_factor)
        if SHIFT_PER_HEAD:
            tl.store(d_shift_ptr + sequence * H + h, d_shift * shift_factor)
    if RAGGED and not RECTIFIED:  # a key that was loaded as zeros may have weights
        d_v = tl.where((n < length)[:, None], d_v, 0.0)
    store_head(dv_ptr, dv_batch, dv_head, dv_row, dv_column, b, key_head, k_start, n, N, Dv, d_v, BLOCK_DV)
    if UNIT_ROWS:
        given = load_head(k_ptr, k_batch, k_head, k_row, k_column, b, key_head, k_start, n, length, D, BLOCK_D)
        d_k = unit_rows_gradient(d_k, given, D)
    store_head(dk_ptr, dk_batch, dk_head, dk_row, dk_column, b, key_head, k_start, n, N, D, d_k, BLOCK_D)
