"""Attention of sequences of any length, pointwise variants only: launches, operators and the forward kernel.

A row of pointwise weights has no maximum, no sum and no rescaling, so the loop over keys is two matrix products with a
function between them, above all a ReLU; all that scales a row is multiplied once at the end. Autograd keeps the inputs
and nothing else, and the backward pass (long_backward.py) is deterministic. As operators of torch: `rectiformer::long`,
`rectiformer::long_rows`, which also sums up each row of rectified weights, and the backward of either.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rectiformer.ops.autograd import operator, recall, register_derivative, remember
from rectiformer.ops.call import AttentionCall, Packing
from rectiformer.ops.gpu import interpreting
from rectiformer.ops.gpu.common import (
    ARGUMENTS,
    NO_GRADIENT,
    AttentionPlan,
    KernelCall,
    block_size,
    differentiate_twice,
    drop,
    dropout_words,
    empty_heads_last,
    flatten,
    hidden_sides,
    key_range,
    load_tile,
    locate_sequence,
    row_gain,
    row_scale_parts,
    row_shifts,
    safe_log,
    seen_scores,
    store_tile,
    with_positive_scale,
)
from rectiformer.ops.gpu.launch import Launch
from rectiformer.ops.gpu.plans import Gradients, PlanCache, fill_gradients, is_aligned, open_plan, run_kernels
from rectiformer.ops.gpu.pointwise import PAIRED_FUNCTIONS, PAIRED_UNITS, weigh
from rectiformer.ops.reference import scale_rows

if TYPE_CHECKING:
    from rectiformer.ops.gpu.long_backward import LongGradients  # which launch by this file


class Tiling(NamedTuple):
    """Queries and keys of a tile, warps of a program, tiles in flight."""

    queries: int
    keys: int
    warps: int
    stages: int


# (kernel, largest head size) of 16-bit numbers -> tiling of full rows, and of rows with an edge of visibility, measured
# on an H200. The length of a sequence chooses nothing, so no length makes a kernel compile again.
TILINGS = {
    ("forward", 64): (Tiling(128, 64, 4, 3), Tiling(128, 64, 4, 3)),
    ("forward", 128): (Tiling(128, 64, 4, 2), Tiling(128, 64, 4, 2)),
    ("forward", 256): (Tiling(128, 64, 8, 2), Tiling(128, 64, 8, 2)),
    # the forward pass that describes rows: chosen to fit in registers, not measured
    ("rows", 64): (Tiling(128, 64, 4, 3), Tiling(128, 64, 4, 3)),
    ("rows", 128): (Tiling(128, 64, 8, 2), Tiling(128, 64, 8, 2)),
    ("rows", 256): (Tiling(128, 64, 8, 2), Tiling(128, 64, 8, 2)),
    ("keys", 64): (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 3)),
    ("keys", 128): (Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 2)),
    ("keys", 256): (Tiling(32, 64, 8, 2), Tiling(32, 64, 8, 2)),
    ("queries", 64): (Tiling(128, 64, 8, 4), Tiling(64, 64, 4, 2)),
    ("queries", 128): (Tiling(128, 64, 8, 3), Tiling(128, 64, 8, 3)),
    ("queries", 256): (Tiling(64, 32, 8, 2), Tiling(64, 32, 8, 2)),
    ("bias", 64): (Tiling(64, 64, 4, 1), Tiling(64, 64, 4, 1)),
    ("bias", 128): (Tiling(64, 64, 4, 1), Tiling(64, 64, 4, 1)),
    ("bias", 256): (Tiling(32, 32, 4, 1), Tiling(32, 32, 4, 1)),
}
SMOOTH_TILINGS = {
    ("forward", 64): (Tiling(128, 64, 8, 3), Tiling(64, 64, 4, 3)),
    ("keys", 64): (Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 2)),
    ("queries", 64): (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2)),
}
"""Of functions other than a ReLU, where they are others: such functions take longer than the products."""
EXACT = {
    "forward": Tiling(64, 32, 4, 1),
    "rows": Tiling(64, 32, 4, 1),
    "keys": Tiling(32, 16, 4, 1),
    "queries": Tiling(64, 32, 4, 1),
    "bias": Tiling(32, 32, 4, 1),
}
"""Of float32, whose products are each made of three."""
SCALING = Tiling(32, 1, 4, 1)
"""Of the kernel that scales rows of a gradient; it has no keys."""
LARGEST_TILES = 200 << 10
"""Bytes of shared memory that the largest of `TILINGS` takes, and a little more."""
SMALL = {64: Tiling(64, 64, 4, 2), 128: Tiling(64, 32, 4, 2), 256: Tiling(32, 16, 4, 1)}
"""Of 16-bit numbers on devices with little shared memory, by head size; chosen to fit, not measured."""


def find_tiling(kernel: str, q: Tensor, v: Tensor, function: str, edges: bool) -> Tiling:
    """The tiling of a kernel; `edges` says that causal order or a window hides some keys."""
    if q.element_size() != 2:
        return EXACT[kernel]
    size = next(size for size in (64, 128, 256) if max(q.shape[3], v.shape[3]) <= size)
    if not has_large_tiles(q.device):
        return SMALL[size]
    tilings = TILINGS if function == "relu" else TILINGS | SMOOTH_TILINGS
    return tilings[kernel, size][edges]


@lru_cache
def has_large_tiles(device: torch.device) -> bool:
    """Whether the shared memory of a program holds the tiles of `TILINGS`: from Hopper on, on data center devices."""
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    return bool(properties.shared_memory_per_block_optin >= LARGEST_TILES)  # type: ignore[attr-defined]


def long_attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, packing: Packing | None = None) -> Tensor:
    """`reference_attention` for pointwise rows of any length.

    With `packing`, of sequences that lie end to end in [1, H, total, D]; nothing is read on the host.
    """
    q, call = with_positive_scale(q, call)
    return scale_late(run_kernels(LongPlan, long_inputs(q, k, v, call, packing)), k, call)


def row_sums_attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """`long_attention`, and of each row of [scale q k]+ ** power its sum and the entropy of the row divided by it:
    float32 [B, H, M]. Rows of zeros have 0 for both."""
    q, call = with_positive_scale(q, call)
    out, rows = long_rows(*long_inputs(q, k, v, call, None))
    total, entropy = rows.unbind(-1)
    if q.dtype != torch.float16:  # see `scales_inside`; there is no bias
        total = total * call.scale**call.variant.power
    return scale_late(out, k, call), total, entropy


def long_inputs(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, packing: Packing | None) -> tuple[Any, ...]:
    """The operators' inputs, with as much of the row scale as the kernels can apply: see `scale_late`."""
    exponent, factor, head_factors = (0.0, 1.0, None) if call.counts_cells else row_scale_parts(q, call)
    if q.shape[1] > k.shape[1]:
        head_factors = None
    max_queries, max_keys = call.visibility.queries, call.visibility.keys
    if packing is not None:
        max_queries = max_queries if packing.max_seqlen_q is None else packing.max_seqlen_q
        max_keys = max_keys if packing.max_seqlen_k is None else packing.max_seqlen_k
    return q, k, v, *flatten(q, call, packing, (exponent, factor, head_factors), max_queries, max_keys)


def scale_late(out: Tensor, k: Tensor, call: AttentionCall) -> Tensor:
    """Mixed values with what the kernels left out of the row scale, and why they did."""
    if call.counts_cells:  # a mask or bias decides how many keys a row sees
        return scale_rows(out, call).to(out.dtype)
    if out.shape[1] > k.shape[1]:  # they cannot tell heads that share keys apart in a factor's gradient
        factors = row_scale_parts(out, call)[2]
        return out if factors is None else (out * factors[:, None, None]).to(out.dtype)
    return out


TABLES = (
    "head_factors", "key_lengths", "seed", "cu_seqlens_q", "cu_seqlens_k", "rows", "head_shifts", "row_counts",
    "attn_bias", "attn_mask",
)  # fmt: skip
"""What the kernels read by address. `rows` [B, H, M, 2] is what is known of each row of weights: sums and entropies, or
slopes; it is no input of a call."""


class LongPlan(AttentionPlan):
    """One launch forward; backward one for keys and values, one for queries, and more where a call asks for them."""

    gradient_of: ClassVar = {"q": 0, "k": 1, "v": 2, "attn_bias": 3, "head_factors": 4, "head_shifts": 5}

    def __init__(self, tensors: Sequence[Tensor | None], numbers: tuple[Any, ...]) -> None:
        super().__init__(tensors, numbers)
        self.launch: Launch | None = None
        self.gradients: PlanCache[LongGradients] = PlanCache()

    def forward(self, held: Sequence[Tensor]) -> Tensor:
        q, _, v = held[:3]
        out = empty_heads_last(q, v.shape[3])
        tensors = [*held, out]
        if self.launch is None:
            call, slots = self.call(held), [0, 1, 2, len(held), *self.find(TABLES)]
            self.launch = prepare(long_forward_kernel, "forward", call, tensors, slots, 3, 1, [gain_of(call)])
        self.launch(tensors)
        return out

    def backward(self, d_out: Tensor, held: Sequence[Tensor]) -> Gradients:
        from rectiformer.ops.gpu.long_backward import LongGradients, bias_gradient  # which launch by this file

        layout = d_out.stride(), is_aligned(d_out)
        gradients = self.gradients.get(layout)
        if gradients is None:
            gradients = self.gradients.keep(layout, LongGradients(self, d_out, held))
        d_q, d_k, d_v, d_shifts = gradients(d_out, held)
        d_bias = bias_gradient(self, d_out, held) if "attn_bias" in self.slots else None
        return d_q, d_k, d_v, d_bias, self.factor_gradients(held, d_v), d_shifts

    def factor_gradients(self, held: Sequence[Tensor], d_v: Tensor) -> Tensor | None:
        """Mixed values are linear in v, so <d_out, out> is <d_v, v>, head by head."""
        if "head_factors" not in self.slots:
            return None
        return (d_v.float() * held[2].float()).sum((0, 2, 3)) / held[self.slots["head_factors"]]


@operator(f"long({ARGUMENTS}) -> Tensor")
def long(*inputs: Any) -> Tensor:
    """The output of a `KernelCall` of pointwise rows."""
    plan, held = open_plan(LongPlan, inputs)
    return plan.forward(held)


@operator(f"long_backward(Tensor d_out, {ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
def long_backward(d_out: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Gradients of `long` for q, k, v, attn_bias, head_factors and head_shifts; the last three are empty without
    them."""
    plan, held = open_plan(LongPlan, inputs)
    return fill_gradients(plan.backward(d_out, held), d_out)


LongPlan.operator, LongPlan.backward_operator = long, long_backward


@operator(f"long_rows({ARGUMENTS}) -> (Tensor, Tensor)")
def long_rows(*inputs: Any) -> tuple[Tensor, Tensor]:
    """`long` without a bias; and of each row of x = [q k]+ ** power the sum R and the entropy H of the row divided by
    R: float32 [B, H, M, 2]. In float16 they are of [scale q k]+ ** power."""
    plan, held = open_plan(LongPlan, inputs)
    call = plan.call(held)
    out = empty_heads_last(call.q, call.v.shape[3])
    rows = call.q.new_empty(*call.q.shape[:3], 2, dtype=torch.float32)
    tensors, slots = [*held, out, rows], [0, 1, 2, len(held), *plan.find(TABLES)]
    slots[4 + TABLES.index("rows")] = len(held) + 1
    prepare(long_forward_kernel, "rows", call, tensors, slots, 3, 1, [gain_of(call)], stats=True)(tensors)
    return out, rows


@operator(f"long_rows_backward(Tensor d_out, Tensor slopes, {ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)")
def long_rows_backward(d_out: Tensor, slopes: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Gradients of `long_rows` for q, k, v and head_factors; the last is empty without them. See `row_slopes`."""
    from rectiformer.ops.gpu.long_backward import LongGradients

    plan, held = open_plan(LongPlan, inputs)
    d_q, d_k, d_v, _ = LongGradients(plan, d_out, held, stats=True)(d_out, held, slopes.contiguous())
    return fill_gradients((d_q, d_k, d_v, plan.factor_gradients(held, d_v)), d_out)


def row_slopes(d_rows: Tensor, rows: Tensor) -> Tensor:
    """a, b [B, H, M, 2]: through R and H, a weight x of a row has gradient a + b log x.

    x has slope 1 for R, and (log R - H - log x) / R for H.
    """
    (d_total, d_entropy), (total, entropy) = d_rows.unbind(-1), rows.unbind(-1)
    safe = torch.where(total > 0, total, 1)
    rate = d_entropy / safe
    return torch.stack([d_total + rate * (safe.log() - entropy), -rate], -1)


@torch.library.register_fake("rectiformer::long")
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return empty_heads_last(q, v.shape[3])


@torch.library.register_fake("rectiformer::long_rows")
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return empty_heads_last(q, v.shape[3]), q.new_empty(*q.shape[:3], 2, dtype=torch.float32)


@torch.library.register_fake("rectiformer::long_backward")
def _(d_out: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    d_q, d_k, d_v, d_factors = empty_gradients(*inputs)
    bias, shifts = inputs[3], inputs[6]
    d_bias = d_q.new_empty(0, dtype=torch.float32) if bias is None else bias.new_empty(bias.shape)
    return d_q, d_k, d_v, d_bias, d_factors, d_q.new_empty(0 if shifts is None else len(shifts), dtype=torch.float32)


@torch.library.register_fake("rectiformer::long_rows_backward")
def _(d_out: Tensor, slopes: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return empty_gradients(*inputs)


def empty_gradients(*inputs: Any) -> tuple[Tensor, ...]:
    call = KernelCall(*inputs)
    d_qkv = (empty_heads_last(tensor, tensor.shape[3]) for tensor in (call.q, call.k, call.v))
    return *d_qkv, call.q.new_empty(0 if call.head_factors is None else call.q.shape[1], dtype=torch.float32)


# autograd calls the next functions with a context of its own, whose type torch does not publish.
def _differentiate(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    inputs = recall(ctx)
    d_q, d_k, d_v, *more = long_backward(d_out, *inputs)
    asked = inputs[3], inputs[5], inputs[6]
    d_bias, *of_heads = (None if given is None else found for given, found in zip(asked, more, strict=True))
    return d_q, d_k, d_v, d_bias, None, *of_heads, *NO_GRADIENT


def _differentiate_twice(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
    return differentiate_twice(ctx, cotangents)


def _remember_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    remember(ctx, (*inputs, output[1]), output)


def _differentiate_rows(ctx: Any, d_out: Tensor, d_rows: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, rows = recall(ctx)
    d_q, d_k, d_v, d_factors = long_rows_backward(d_out, row_slopes(d_rows, rows), *inputs)
    return d_q, d_k, d_v, None, None, None if inputs[5] is None else d_factors, None, *NO_GRADIENT


register_derivative(long, _differentiate)
register_derivative(long_backward, _differentiate_twice)
register_derivative(long_rows, _differentiate_rows, _remember_rows)  # once only


def prepare(
    kernel: Any,
    name: str,
    call: KernelCall,
    tensors: list[Tensor],
    slots: list[int],
    read: int,
    written: int,
    gains: list[float],
    stats: bool = False,
) -> Launch:
    """The launch of a kernel of `TILINGS`, one program per tile of keys ("keys") or of queries, head and sequence.

    Its first `read` tensors are read and the next `written` ones written by strides; the rest is `TABLES`.
    """
    tiling = find_tiling(name, call.q, call.v, call.function, any(hidden_sides(call)))
    strided = [tensors[slot] for slot in slots[: read + written]]
    tma = all(copy_engine_reads(tensor) for tensor in strided[:read])
    heights = [tiling.queries, tiling.keys, tiling.keys, tiling.queries]
    tiles = [
        [1, 1, height, block_size(tensor.shape[3])] if tma else None
        for tensor, height in zip(strided[:read], heights, strict=False)
    ]
    length, size, owner = (
        (call.max_keys, tiling.keys, call.k) if name == "keys" else (call.max_queries, tiling.queries, call.q)
    )
    more = {"GROUP": call.q.shape[1] // call.k.shape[1]} if name == "keys" else {}
    unit = PAIRED_UNITS[call.function] if takes_pairs(call) else 1.0
    numbers = (
        *mask_strides(call), *(tensor.stride() for tensor in strided), (call.window_left, call.window_right),
        *shape_args(call), unit * call.scale, *gains, call.row_exponent, unit * call.shift_factor,
        call.dropout_threshold,
    )  # fmt: skip
    flags = long_flags(call, tiling) | more | {"STATS": stats, "TMA": tma}
    return Launch(kernel, tile_grid(call, length, size, owner.shape[1]), tensors, slots, numbers, flags, tiles)


def tile_grid(call: KernelCall, length: int, size: int, heads: int) -> tuple[int, int]:
    """Tiles of `size` rows of the longest sequence, times heads of all sequences. Tiles of one head are neighbors, so
    that what they all read stays in the second-level cache."""
    return -(-length // size), call.sequences * heads


def scales_inside(call: KernelCall) -> bool:
    """Whether scores are scaled before the function: a bias asks for it, and unscaled ones may overflow in float16."""
    return not call.scales_outside or call.attn_bias is not None or call.q.dtype == torch.float16


def takes_pairs(call: KernelCall) -> bool:
    """Whether weights are made by `PAIRED_FUNCTIONS`; a bias would come in other units."""
    pairs = call.q.dtype == torch.bfloat16 and call.power == 1 and call.function in PAIRED_FUNCTIONS
    return pairs and call.attn_bias is None and not interpreting()


def gain_of(call: KernelCall) -> float:
    """What weights are multiplied with in the end."""
    return call.row_factor * (1.0 if scales_inside(call) else call.scale**call.power) / (1 - call.dropout_p)


def shape_args(call: KernelCall) -> list[int]:
    """H, query heads per key head, M, N, D, Dv."""
    (_, H, M, D), (_, K, N, _) = call.q.shape, call.k.shape
    return [H, H // K, M, N, D, call.v.shape[3]]


def mask_strides(call: KernelCall) -> list[tuple[int, ...]]:
    """Strides of bias and mask; broadcast axes have stride 0."""
    shape = (*call.q.shape[:3], call.k.shape[2])
    return [
        call.q.stride() if tensor is None else tensor.expand(shape).stride()
        for tensor in (call.attn_bias, call.attn_mask)
    ]


def long_flags(call: KernelCall, tiling: Tiling) -> dict[str, Any]:
    """Compile-time arguments."""
    later, earlier = hidden_sides(call)
    paired = PAIRED_FUNCTIONS[call.function] if takes_pairs(call) else {}
    return (
        call.flags()
        | paired
        | {
            "HIDES_LATER": later,
            "HIDES_EARLIER": earlier,
            "BIAS": call.attn_bias is not None,
            "MASK": call.attn_mask is not None,
            "SCALE_INSIDE": scales_inside(call),
            "COUNTED": call.row_counts is not None,
            "ASM": not interpreting(),
            "PRECISION": "tf32x3" if call.q.dtype == torch.float32 else "tf32",
            "BLOCK_M": tiling.queries,
            "BLOCK_N": tiling.keys,
            "BLOCK_D": block_size(call.q.shape[3]),
            "BLOCK_DV": block_size(call.v.shape[3]),
            "num_warps": tiling.warps,
            "num_stages": tiling.stages,
        }
    )


def copy_engine_reads(tensor: Tensor) -> bool:
    """Whether the tensor copy engine can read it: rows of whole 16-byte units that begin at such a unit."""
    unit = 16 // tensor.element_size()
    aligned = tensor.data_ptr() % 16 == 0 and all(stride % unit == 0 for stride in tensor.stride()[:-1])
    return aligned and tensor.stride(-1) == 1 and tensor.shape[-1] >= unit


@triton.jit
def mix_keys(
    mixed, mass, logs, q, k, v, k_ptr, v_ptr, k_strides, v_strides, m, begin, end, words, seq, window,
    mask_args, shift, scale, D, Dv,
    EDGE: tl.constexpr, POWER: tl.constexpr, WEIGHT: tl.constexpr, RECTIFIED: tl.constexpr, SHIFT: tl.constexpr,
    BANDED: tl.constexpr, CLEAR: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr,
    SCALE_INSIDE: tl.constexpr, STATS: tl.constexpr, TMA: tl.constexpr, ASM: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """`mixed` plus what keys `begin` to `end` add; EDGE: not every query may see each of them.

    STATS: their weights w, and w log w, are added to `mass` and `logs`.
    """
    b, _, kh, _, k_start, _, N, length = seq
    limit = length if EDGE else N
    for column in range(begin, end, BLOCK_N):
        n = column + tl.arange(0, BLOCK_N)
        keys = load_tile(k, k_ptr, k_strides, b, kh, k_start, column, limit, D, BLOCK_N, BLOCK_D, TMA, EDGE and CLEAR)
        scores = tl.dot(q, keys.T, input_precision=PRECISION)
        scores, seen = seen_scores(
            scores, m, n, seq, window, mask_args, shift, scale, 1, EDGE, BANDED, BIAS, MASK, SCALE_INSIDE, SHIFT
        )
        dtype: tl.constexpr = tl.float32 if STATS else q.dtype
        weights = weigh(scores, seen, dtype, POWER, WEIGHT, RECTIFIED, EDGE or BIAS or MASK, ASM)
        if STATS:  # before dropout
            mass += tl.sum(weights, 1)
            logs += tl.sum(weights * safe_log(weights), 1)
            weights = weights.to(q.dtype)
        weights = drop(weights, words, seq, m, n, 1, DROPOUT)
        values = load_tile(
            v, v_ptr, v_strides, b, kh, k_start, column, limit, Dv, BLOCK_N, BLOCK_DV, TMA, EDGE and CLEAR
        )
        mixed = tl.dot(weights, values, mixed, input_precision=PRECISION)
    return mixed, mass, logs


# All flags are constexpr: what they leave out are instructions of the innermost loop.
@triton.jit
def long_forward_kernel(
    q, k, v, q_ptr, k_ptr, v_ptr, out_ptr, factor_ptr, lengths_ptr, seed_ptr, q_bounds_ptr, k_bounds_ptr,
    rows_ptr, shifts_ptr, counts_ptr, bias_ptr, mask_ptr, bias_strides, mask_strides, q_strides, k_strides,
    v_strides, out_strides, window,
    H, group, M, N, D, Dv, scale, gain, exponent, shift_factor, threshold,
    POWER: tl.constexpr, WEIGHT: tl.constexpr, SLOPE: tl.constexpr, RECTIFIED: tl.constexpr, SHIFT: tl.constexpr,
    SHIFT_PER_HEAD: tl.constexpr, COUNTED: tl.constexpr, ROW_SCALE: tl.constexpr, PER_HEAD: tl.constexpr,
    HIDES_LATER: tl.constexpr, HIDES_EARLIER: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr,
    BIAS: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr, SCALE_INSIDE: tl.constexpr,
    STATS: tl.constexpr, TMA: tl.constexpr, ASM: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The values mixed for one tile of queries of one head; with STATS also the sum and the entropy of its rows.

    q, k and v come twice: as descriptors for the tensor copy engine if TMA, and as pointers.
    """
    BANDED: tl.constexpr = HIDES_LATER or HIDES_EARLIER
    CLEAR: tl.constexpr = RAGGED or PACKED  # what lies beyond a sequence's keys is not the end of the tensor
    TEST_ALL: tl.constexpr = BIAS or MASK  # every cell is looked at anyway: one loop, not three
    mask_args = (bias_ptr, bias_strides, mask_ptr, mask_strides)
    left, right = window
    tile, sequence, h = tl.program_id(0), tl.program_id(1) // H, tl.program_id(1) % H
    if HIDES_LATER:  # the longest rows first, so that none is left alone at the end
        tile = tl.num_programs(0) - 1 - tile
    seq = locate_sequence(sequence, h, group, M, N, lengths_ptr, q_bounds_ptr, k_bounds_ptr, RAGGED, PACKED)
    b, _, _, q_start, _, rows, keys, length = seq
    row = tile * BLOCK_M
    if row < rows:  # a packed sequence may have fewer tiles
        m = row + tl.arange(0, BLOCK_M)
        # Rows beyond the sequence hold another one's numbers; their results are not stored.
        queries = load_tile(q, q_ptr, q_strides, b, h, q_start, row, rows, D, BLOCK_M, BLOCK_D, TMA, False)
        mixed = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        mass, logs = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
        shift_args = (shift_factor, shifts_ptr, counts_ptr)
        shift, _unit = row_shifts(shift_args, m, H, M, seq, window, 1, BANDED, SHIFT, SHIFT_PER_HEAD, COUNTED)
        words = dropout_words(seed_ptr, threshold, b * H + h, DROPOUT)
        begin, full_begin, full_end, end = key_range(row, BLOCK_M, seq, window, BLOCK_N, BANDED)
        starts = (begin, full_begin, full_end)
        stops = (end if TEST_ALL else tl.minimum(full_begin, end), full_end if CLEAR or HIDES_LATER else end, end)
        # Keys that all queries of the tile see are walked without any test, those at an edge of visibility (causal
        # order, window, key lengths) with one: an edge, what all queries see, another edge.
        for part in tl.static_range(3):
            if HIDES_EARLIER or TEST_ALL if part == 0 else not TEST_ALL and (CLEAR or HIDES_LATER or part == 1):
                mixed, mass, logs = mix_keys(
                    mixed, mass, logs, queries, k, v, k_ptr, v_ptr, k_strides, v_strides, m, starts[part], stops[part],
                    words, seq, window, mask_args, shift, scale, D, Dv, part != 1, POWER, WEIGHT,
                    RECTIFIED, SHIFT, BANDED, CLEAR, BIAS, MASK, DROPOUT, SCALE_INSIDE, STATS, TMA, ASM,
                    PRECISION, BLOCK_N, BLOCK_D, BLOCK_DV,
                )  # fmt: skip
        if PER_HEAD:
            gain = gain * tl.load(factor_ptr + h)
        mixed = mixed * row_gain(gain, exponent, m, rows, keys, length, left, right, 1, BANDED, ROW_SCALE)
        store_tile(out_ptr, out_strides, b, h, q_start, row, rows, Dv, mixed, BLOCK_M, BLOCK_DV)
        if STATS:
            described = rows_ptr + 2 * tl.cast((b * H + h) * M + q_start + m, tl.int64)
            total = tl.where(mass > 0.0, mass, 1.0)
            tl.store(described, mass, mask=m < rows)
            tl.store(described + 1, tl.log(total) - logs / total, mask=m < rows)
