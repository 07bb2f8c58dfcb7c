"""Decoding: the few queries of a row against the keys and values that a cache holds for it. No kernel has a gradient.

Pointwise variants and softmax take one operator, `rectiformer::decode`. `decode_heads_kernel` has one query row per key
head: no matrix unit helps, so products are multiplied and summed, and each of the BLOCK_N positions of a block keeps
sums of its own until the end. `decode_groups_kernel` has several query rows that share a key head and uses matrix
products. Both walk over the part of the keys that is their split's; with more than one split they leave float32 parts
for `decode_merge_kernel`, which adds them up in a fixed order. Any other variant made of two products goes
by cached_products.py.

A step is bound by the bytes of the cache, so the next keys are on their way while a block's scores are made, and values
while those of the block after it are. With SKIP_ZEROS values are asked for when their weights are known: only those
above 0 are read.

The key and value of the newest position come from the inputs and are written to the cache in passing (APPEND), so no
program reads what another one writes. ancestors[r, n] is the cache row that holds position n of row r (INDEXED): beam
search reorders that index and never moves the cache.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from rectiformer.ops.activations import cosine_scores, unit_rms
from rectiformer.ops.autograd import operator
from rectiformer.ops.call import AttentionCall
from rectiformer.ops.gpu import queries_per_key_head
from rectiformer.ops.gpu.common import (
    block_size,
    empty_heads_last,
    pointwise_parts,
    power_of_two,
    row_gain,
    row_scale_flag,
    row_scale_parts,
    with_positive_scale,
)
from rectiformer.ops.gpu.decode_tiles import (
    EXACT,
    FEW,
    FEW_KEYS,
    KEYS_PER_LAUNCH,
    MAX_BLOCK_KEYS,
    SMALL_BLOCK,
    TILE,
    TILINGS,
    choose_splits,
    leaves_idle,
    takes_one_row,
    takes_small_blocks,
)
from rectiformer.ops.gpu.launch import Launch
from rectiformer.ops.gpu.plans import KernelPlan, PlanCache, is_aligned, is_intercepted, open_plan
from rectiformer.ops.gpu.pointwise import key_gains, pointwise_flags, scale_scores, shift_unit, whole_power
from rectiformer.ops.norm import OutputNorm, norm_heads

ARGUMENTS = (
    "Tensor q, Tensor(a!) keys, Tensor(b!) values, Tensor? new_key, Tensor? new_value, Tensor? lengths, "
    "Tensor? ancestors, Tensor? head_factors, Tensor? head_shifts, Tensor? norm_gain, Tensor? norm_gate, "
    "str function, int power, str shift, float shift_factor, float scale, float row_exponent, float row_factor, "
    "float norm_epsilon, SymInt window_left, SymInt splits, bool skip_zeros, bool all_heads, bool unit_keys"
)


@dataclass(frozen=True)
class DecodeCall:
    """Sum over a row's keys of head_factors[h] row_factor n^-row_exponent function(x) ** power v, where x = scale q k -
    head_shifts[h] shift_factor shift(n).

    Power 0 is a softmax. With unit_keys, keys are divided by their root mean square. With norm_gain, the output norm
    over all heads follows, which asks for `all_heads` in one program.
    """

    q: Tensor  # [R, H, Q, D]
    keys: Tensor  # [rows, K, capacity, D]
    values: Tensor  # [rows, K, capacity, Dv]
    new_key: Tensor | None  # [R, K, 1, D]
    new_value: Tensor | None
    lengths: Tensor | None  # [R] or [1], the new key included; None where every row has all keys
    ancestors: Tensor | None  # [R, capacity]
    head_factors: Tensor | None  # [H]
    head_shifts: Tensor | None  # [H]
    norm_gain: Tensor | None  # [H * Dv]
    norm_gate: Tensor | None
    function: str
    power: int
    shift: str
    shift_factor: float
    scale: float
    row_exponent: float
    row_factor: float
    norm_epsilon: float
    window_left: int
    splits: int
    skip_zeros: bool
    all_heads: bool
    unit_keys: bool

    @property
    def scales_outside(self) -> bool:
        """As of a `KernelCall`."""
        return self.function == "relu" and not self.shift


def fused_decoding(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    call: AttentionCall,
    *,
    new: tuple[Tensor, Tensor] | None = None,
    ancestors: Tensor | None = None,
    norm: OutputNorm | None = None,
    splits: int | None = None,
    skip: bool | None = None,
) -> Tensor:
    """`decode_attention` by the kernels; `splits` and `skip` of None leave the choice to the shapes."""
    inputs, together = decode_inputs(q, keys, values, call, new, ancestors, norm, splits, skip)
    out = run_decode(*inputs)
    return out if norm is None or together else norm_heads(out, norm)


def decode_inputs(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    call: AttentionCall,
    new: tuple[Tensor, Tensor] | None,
    ancestors: Tensor | None,
    norm: OutputNorm | None,
    splits: int | None,
    skip: bool | None,
) -> tuple[tuple[Any, ...], bool]:
    """The operator's inputs, and whether one program takes all heads of a row, and so their norm."""
    q, call = with_positive_scale(q, call)
    chosen = choose_splits(q, keys, values, norm is not None, splits, skip, ancestors is not None)
    *_, together = chosen
    head_factors, head_shifts = row_scale_parts(q, call)[2], pointwise_parts(q, call)[4]
    q = unit_rms(q) if call.variant.score is cosine_scores else q
    gain, gate, epsilon = (norm.gain, norm.gate, norm.epsilon) if norm is not None and together else (None, None, 0.0)
    tensors = (*(new or (None, None)), call.visibility.key_lengths, ancestors, head_factors, head_shifts, gain, gate)
    return (q, keys, values, *tensors, *decode_numbers(q, call, epsilon, *chosen)), together


def plan_decoding(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    call: AttentionCall,
    *,
    new: tuple[Tensor, Tensor] | None,
    ancestors: Tensor | None,
    norm: OutputNorm | None,
    splits: int | None,
    skip: bool | None,
) -> DecodePlan | None:
    """The plan of all steps of this layout; None where a kernel is not all that a step takes."""
    cosine = call.variant.score is cosine_scores  # queries are normed first
    if cosine or call.scale < 0 or any(isinstance(value, Tensor) for value in call.options.values()):
        return None
    inputs, together = decode_inputs(q, keys, values, call, new, ancestors, norm, splits, skip)
    return open_plan(DecodePlan, inputs)[0] if norm is None or together else None


def decode_numbers(
    q: Tensor, call: AttentionCall, epsilon: float, splits: int, skip: bool, together: bool
) -> tuple[Any, ...]:
    """The operator's inputs after its tensors."""
    function, power, shift, shift_factor, _ = pointwise_parts(q, call)
    exponent, factor, _ = row_scale_parts(q, call)
    skip = skip and power > 0 and function == "relu"  # only a ReLU has weights of exactly 0
    scales = (call.scale, exponent, factor, epsilon)
    cosine = call.variant.score is cosine_scores
    return function, power, shift, shift_factor, *scales, call.visibility.left, splits, skip, together, cosine


class GrowingPlan:
    """Attention of one query per row to keys that grow from call to call, as in generation: all but the number of keys
    and the strides that follow from it is the same."""

    def __init__(self, call: AttentionCall) -> None:
        self.call = call
        self.plans: PlanCache[DecodePlan] = PlanCache()
        self.choices: PlanCache[tuple[Any, ...]] = PlanCache()
        """What the number of keys alone decides."""
        self.latest: tuple[Hashable, DecodePlan | None, Sequence[Any] | None] = (), None, None
        """Layout, plan and numbers of the latest call: all layers of a model take one step alike."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *_: None) -> Tensor:
        layout = k.shape[2], k.stride(), v.stride(), is_aligned(q, k, v)
        latest, plan, numbers = self.latest
        if plan is None or latest != layout:
            plan = self.find(q, k, v)
            numbers = plan.sized_numbers(k, v)
            self.latest = layout, plan, numbers
        return plan.forward([q, k, v], numbers)

    def find(self, q: Tensor, k: Tensor, v: Tensor) -> DecodePlan:
        """The plan that suits this many keys."""
        length = k.shape[2]
        choice = self.choices.get(length)
        if choice is None:  # blocks are no larger than the cache
            shape = takes_one_row(q, k), takes_small_blocks(q, k), min(length, MAX_BLOCK_KEYS)
            splits, *others = choose_splits(q, k, v)
            splits = min(splits, power_of_two(length // KEYS_PER_LAUNCH + 1) // 2 or 1)
            choice = self.choices.keep(length, (splits, *others, *shape))
        # Triton tells 1 and multiples of 16 from other numbers.
        likeness = [(size % 16 == 0, size == 1) for size in (length, *k.stride()[:2], *v.stride()[:2])]
        key = choice, is_aligned(q, k, v), *likeness
        plan = self.plans.get(key)
        if plan is None:
            numbers = decode_numbers(q, self.call, 0.0, *choice[:3])
            plan = self.plans.keep(key, DecodePlan([q, k, v, *[None] * (len(DecodePlan.fields) - 3)], numbers))
        return plan


class DecodePlan(KernelPlan):
    """One launch and, where splits share the keys of a head, another that merges what they leave. No gradient."""

    fields = tuple(field.name for field in dataclasses.fields(DecodeCall) if "Tensor" in str(field.type))
    first_table = fields.index("lengths")
    gradient_of: ClassVar = {}

    def __init__(self, tensors: Sequence[Tensor | None], numbers: tuple[Any, ...]) -> None:
        super().__init__(tensors, numbers)
        call = DecodeCall(*tensors, *numbers)  # type: ignore[arg-type]
        self.splits, self.softmax = call.splits, call.power == 0
        self.launches: list[Launch] = []

    def step(self, held: Sequence[Tensor]) -> Tensor:
        """`forward`, and autograd is told what was written to, in case it has kept that."""
        if "new_key" in self.slots:
            for cache in held[1:3]:
                if not cache.is_inference():
                    torch.autograd.graph.increment_version(cache)
        return self.forward(held)

    def forward(self, held: Sequence[Tensor], numbers: Sequence[Any] | None = None) -> Tensor:
        """`numbers`: of the first launch, where keys and values may be of another length than the plan was made for."""
        q, values, splits = held[0], held[2], self.splits
        (R, H, Q, _), Dv = q.shape, values.shape[3]
        out = empty_heads_last(q, Dv)
        tensors = [*held, out]
        if splits > 1:  # rows of parts and of a softmax's sums lie in the order of the output's memory
            tensors.append(q.new_empty((splits, R, Q, H, Dv), dtype=torch.float32).transpose(2, 3))
            if self.softmax:
                tensors += q.new_empty((2, splits, R * Q * H), dtype=torch.float32).unbind()
        if not self.launches:
            self.launches = self.prepare(held, tensors)
        first, *merge = self.launches
        first(tensors, numbers)
        for launch in merge:
            launch(tensors)
        return out

    def sized_numbers(self, keys: Tensor, values: Tensor) -> Sequence[Any] | None:
        """The numbers of the first launch for these keys and values; None for its own, if it is yet to be prepared."""
        if not self.launches:
            return None
        numbers = self.launches[0].numbers
        return *numbers[:4], *keys.stride(), *values.stride(), *numbers[12:31], keys.shape[2], *numbers[32:]

    def prepare(self, held: Sequence[Tensor], tensors: list[Tensor]) -> list[Launch]:
        call = DecodeCall(*self.restore(held), *self.numbers)
        out, parts = len(held), len(held) + (self.splits > 1)
        sums = [parts + 1, parts + 2] if len(tensors) > parts + 1 else [0, 0]
        strided = [0, 1, 2, parts, *self.find(("new_key", "new_value"))]
        first = [*strided, *sums, *self.find(self.fields[self.first_table :])]
        launches = [prepare(call, tensors, first)]
        if self.splits > 1:
            launches.append(prepare_merge(call, tensors, [parts, *sums, out]))
        return launches


@operator(f"decode({ARGUMENTS}) -> Tensor")
def decode(*inputs: Any) -> Tensor:
    """The output [R, H, Q, Dv] of a `DecodeCall`, in memory as [R, Q, H, Dv]; new keys and values are written."""
    plan, held = open_plan(DecodePlan, inputs)
    return plan.forward(held)


DecodePlan.operator = decode


def run_decode(*inputs: Any) -> Tensor:
    """`decode`, in eager mode by a plan."""
    if is_intercepted(*[tensor for tensor in inputs[: len(DecodePlan.fields)] if tensor is not None]):
        return decode(*inputs)
    plan, held = open_plan(DecodePlan, inputs)
    return plan.step(held)


def prepare(call: DecodeCall, tensors: list[Tensor], slots: list[int]) -> Launch:
    """The kernel that suits the shapes, one program per (row, key head, split) or, with all heads, per row."""
    q, values = call.q, call.values
    (R, H, Q, D), (_, K, capacity, Dv) = q.shape, values.shape
    # All that scales a rectified weight is one number. A softmax is taken in base 2.
    gain = call.row_factor * (call.scale**call.power if call.scales_outside else 1.0) if call.power else 1.0
    scale = call.scale if call.power else call.scale * math.log2(math.e)
    parts = tensors[slots[3]]
    strides = [tensors[slot].stride()[-4:] for slot in slots[:6]]  # of parts, those of one split
    length_step = 0 if call.lengths is None or len(call.lengths) == 1 else call.lengths.stride(0)
    ancestor_step = 0 if call.ancestors is None or len(call.ancestors) == 1 else call.ancestors.stride(0)
    numbers = (
        *chain(*strides), length_step, ancestor_step, parts.stride(0), R, H, K, Q, capacity, D, Dv,
        call.window_left, scale, gain, call.row_exponent, call.shift_factor, call.norm_epsilon,
    )  # fmt: skip
    flags = {
        **pointwise_flags(call.function, call.power, call.shift, call.head_shifts is not None, q.dtype),
        "SCALE_INSIDE": not call.power or not call.scales_outside,
        "UNIT_KEYS": call.unit_keys,
        "ROW_SCALE": row_scale_flag(call.row_exponent),
        "PER_HEAD": call.head_factors is not None,
        "RAGGED": call.lengths is not None,
        "APPEND": call.new_key is not None,
        "INDEXED": call.ancestors is not None,
        "PARTIAL": call.splits > 1,
        "SKIP_ZEROS": call.skip_zeros,
        **decode_config(call),
    }
    kernel = decode_heads_kernel if "HEADS" in flags else decode_groups_kernel
    return Launch(kernel, (R, 1 if call.all_heads else K, call.splits), tensors, slots, numbers, flags)


def prepare_merge(call: DecodeCall, tensors: list[Tensor], slots: list[int]) -> Launch:
    (R, H, Q, _), Dv = call.q.shape, call.values.shape[3]
    held = power_of_two(call.splits) * block_size(Dv)
    shape = {"SPLITS": power_of_two(call.splits), "ROWS": max(1, 2048 // held), "BLOCK_DV": block_size(Dv)}
    programs = -(-R * Q * H // shape["ROWS"])
    flags = {"SOFTMAX": call.power == 0, **shape}
    return Launch(decode_merge_kernel, (programs,), tensors, slots, (R * Q * H, Dv, call.splits), flags)


def decode_config(call: DecodeCall) -> dict[str, int]:
    """Sizes of a program's blocks and its warps, such that registers hold them; and what only one kernel has."""
    q, capacity, rows = call.q, call.keys.shape[2], queries_per_key_head(call.q, call.keys)
    config = {"BLOCK_D": block_size(q.shape[3]), "BLOCK_DV": block_size(call.values.shape[3])}
    width, exact = max(config.values()), q.dtype == torch.float32
    if takes_one_row(q, call.keys):
        heads = power_of_two(q.shape[1]) if call.all_heads else 1
        most, warps = MAX_BLOCK_KEYS, 8 if call.all_heads else 4
        if takes_small_blocks(q, call.keys) and not call.all_heads:
            most, warps = SMALL_BLOCK.keys, SMALL_BLOCK.warps
        block_keys = min(most, TILE // (heads * width), block_size(capacity))
        norm = (call.norm_gain is not None) + (call.norm_gate is not None)
        return config | {"HEADS": heads, "NORM": norm, "BLOCK_N": block_keys, "num_warps": warps}
    use = 2 if call.ancestors is not None else int(leaves_idle(q, call.keys))
    tiling = EXACT if exact else TILINGS[next(size for size in TILINGS if width <= size)][use]
    if not exact and call.ancestors is not None and capacity <= FEW_KEYS and width == 128:
        tiling = FEW
    block = {"BLOCK_M": block_size(rows), "BLOCK_N": tiling.keys, "STAGES": tiling.stages}
    return config | block | {"num_warps": tiling.warps}


@torch.library.register_fake("rectiformer::decode")
def _(q: Tensor, keys: Tensor, values: Tensor, *_: object) -> Tensor:
    return empty_heads_last(q, values.shape[3])


MINUS_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def load_length(lengths_ptr, length_step, r, capacity):
    """Keys of row r, within the cache whatever the device holds: steps of one length for all rows are 0."""
    return tl.maximum(tl.minimum(tl.load(lengths_ptr + r * length_step).to(tl.int32), capacity), 0)


@triton.jit
def split_range(length, known, left, BLOCK_N: tl.constexpr):
    """The first key seen, and from where to where this program's split of the known ones goes, in whole blocks."""
    first = tl.maximum(length - 1 - left, 0)
    begin = first // BLOCK_N * BLOCK_N
    chunk = tl.cdiv(tl.cdiv(tl.maximum(known - begin, 0), tl.num_programs(2)), BLOCK_N) * BLOCK_N
    start = begin + tl.program_id(2) * chunk
    return first, start, tl.minimum(start + chunk, known)


@triton.jit
def decode_gain(gain, exponent, length, left, factor_ptr, heads, H, PER_HEAD: tl.constexpr, ROW_SCALE: tl.constexpr):
    """What the weights of each of `heads` are multiplied with."""
    count = tl.minimum(length, left + 1)
    gain = row_gain(gain, exponent, 0, 0, 0, count, 0, 0, 1, False, ROW_SCALE)
    return gain * tl.load(factor_ptr + heads, mask=heads < H, other=0.0) if PER_HEAD else gain


@triton.jit
def decode_shift(
    factor, length, left, shifts_ptr, heads, H, SHIFT: tl.constexpr, SHIFT_PER_HEAD: tl.constexpr
):  # fmt: skip
    """What is subtracted from the scores of each of `heads`."""
    shift = 0.0
    if SHIFT > 0:
        count = tl.maximum(tl.minimum(length, left + 1), 1).to(tl.float32)
        shift = factor * shift_unit(count, SHIFT)
        shift = shift * tl.load(shifts_ptr + heads, mask=heads < H, other=0.0) if SHIFT_PER_HEAD else shift
    return shift


@triton.jit
def cache_rows(ancestors_ptr, ancestor_step, r, n, seen, INDEXED: tl.constexpr):
    """The cache row of each position, 64 bits wide: a cache may hold over 2^31 numbers."""
    if INDEXED:
        rows = tl.load(ancestors_ptr + r * ancestor_step + n, mask=seen, other=0).to(tl.int64)
    else:
        rows = r + tl.zeros_like(n).to(tl.int64)
    return rows


@triton.jit
def append(new_ptrs, cache_ptrs, inside, mine):
    """What is new, in float32, written to the cache as well where it is this program's to write."""
    new = tl.load(new_ptrs, mask=inside, other=0.0)
    tl.store(cache_ptrs, new, mask=inside & mine)
    return new.to(tl.float32)


@triton.jit
def softmax_step(scores, running_max, highest):
    """Weights in base 2, and what earlier ones shrink by, when the highest score rises from
    `running_max` to `highest`."""
    safe = tl.where(highest == MINUS_INFINITY, 0.0, highest)
    return tl.exp2(scores - safe), tl.exp2(running_max - safe)


@triton.jit
def softmax_block(scores, held, running_max, total, mixed):
    """Weights of a block of scores [M, N], with all sums of the rows brought to the new highest score."""
    scores = tl.where(held[None, :], scores, MINUS_INFINITY)
    highest = tl.maximum(running_max, tl.max(scores, 1))
    weights, _ = softmax_step(scores, scores, highest[:, None])
    _, shrink = softmax_step(running_max, running_max, highest)
    return weights, highest, total * shrink + tl.sum(weights, 1), mixed * shrink[:, None]


@triton.jit
def add_new_key(
    mixed, running_max, total, score, value, gain, mine, POWER: tl.constexpr, WEIGHT: tl.constexpr
):  # fmt: skip
    """The sums of rows [M, BLOCK_DV] with one key more, of these scores [M], where it is this program's to add."""
    if POWER == 0:
        score = tl.where(mine, score, MINUS_INFINITY)
        highest = tl.maximum(running_max, score)
        weight, shrink = softmax_step(score, running_max, highest)
        running_max, total, mixed = highest, total * shrink + weight, mixed * shrink[:, None]
        mixed += weight[:, None] * value
    else:
        weight = tl.where(mine, whole_power(WEIGHT(score), POWER), 0.0)
        mixed += weight[:, None] * gain * value
    return mixed, running_max, total


@triton.jit
def finish_softmax(mixed, running_max, total, highest_ptr, total_ptr, rows_out, inside, PARTIAL: tl.constexpr):
    """The end of a softmax: the mean, zero of no key; or, of a split, its sums, with what merging them takes."""
    if PARTIAL:
        tl.store(highest_ptr + rows_out, running_max, mask=inside)
        tl.store(total_ptr + rows_out, total, mask=inside)
    else:
        mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    return mixed


@triton.jit
def norm_row(z, gain_ptr, gate_ptr, columns, inside, E, epsilon, NORM: tl.constexpr):
    """The output norm over all heads of a row: z [HEADS, BLOCK_DV] holds zeros outside. NORM: 1 plain, 2 gated."""
    out = z * tl.rsqrt(tl.sum(tl.sum(z * z, 1), 0) / E + epsilon)
    out = out * tl.load(gain_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if NORM == 2:
        out = out * tl.sigmoid(tl.load(gate_ptr + columns, mask=inside, other=0.0).to(tl.float32) * z)
    return out


@triton.jit
def scan_keys(
    q, k_ptrs, v_ptrs, inside, inside_v, k_steps, v_steps, r, span, ancestry, scale, shift, D,
    POWER: tl.constexpr, WEIGHT: tl.constexpr, SHIFT: tl.constexpr, SCALE_INSIDE: tl.constexpr,
    UNIT_KEYS: tl.constexpr, INDEXED: tl.constexpr, SKIP_ZEROS: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """What each of BLOCK_N positions adds up over the blocks of `span`: values, and of a softmax highest score and sum.

    In a turn the keys of the next block are asked for, and so are the values of this one, which the next turn adds:
    loads are in flight while their predecessors are used. Triton pipelines no loop without matrix products.
    """
    start, stop, first = span
    ancestors_ptr, ancestor_step = ancestry
    k_batch, k_row = k_steps
    v_batch, v_row = v_steps
    n = start + tl.arange(0, BLOCK_N)
    seen = (n >= first) & (n < stop)
    rows = cache_rows(ancestors_ptr, ancestor_step, r, n, seen, INDEXED)
    first_keys = k_ptrs[None] + (rows * k_batch + n * k_row)[:, None, None]
    k = tl.load(first_keys, mask=seen[:, None, None] & inside[None], other=0.0)
    rows_ahead = cache_rows(ancestors_ptr, ancestor_step, r, n + BLOCK_N, n + BLOCK_N < stop, INDEXED)
    running_max = tl.full([BLOCK_N, HEADS], MINUS_INFINITY, tl.float32)
    total = tl.zeros([BLOCK_N, HEADS], tl.float32)
    mixed = tl.zeros([BLOCK_N, HEADS, BLOCK_DV], tl.float32)
    weights = tl.zeros([BLOCK_N, HEADS], tl.float32)
    v = tl.zeros([BLOCK_N, HEADS, BLOCK_DV], v_ptrs.dtype.element_ty)
    while start < stop:
        asked = seen[:, None, None] & inside_v[None]
        own = v_ptrs[None] + (rows * v_batch + n * v_row)[:, None, None]
        if not SKIP_ZEROS:
            v_now = tl.load(own, mask=asked, other=0.0)
        held, rows, n = seen, rows_ahead, n + BLOCK_N
        seen = (n >= first) & (n < stop)
        ahead = k_ptrs[None] + (rows * k_batch + n * k_row)[:, None, None]
        k_ahead = tl.load(ahead, mask=seen[:, None, None] & inside[None], other=0.0)
        rows_ahead = cache_rows(ancestors_ptr, ancestor_step, r, n + BLOCK_N, n + BLOCK_N < stop, INDEXED)
        scores = tl.sum(k.to(tl.float32) * q[None], 2)  # [BLOCK_N, HEADS]
        scores = scale_scores(scores, key_gains(k, D, 2, UNIT_KEYS), scale, shift, SCALE_INSIDE, SHIFT, UNIT_KEYS)
        mixed += weights[:, :, None] * v.to(tl.float32)  # of the block before
        if POWER == 0:
            scores = tl.where(held[:, None], scores, MINUS_INFINITY)
            highest = tl.maximum(running_max, scores)
            weights, shrink = softmax_step(scores, running_max, highest)
            running_max, total, mixed = highest, total * shrink + weights, mixed * shrink[:, :, None]
        else:
            weights = whole_power(WEIGHT(scores), POWER)  # keys not seen are zeros, and so are their values
        v = tl.load(own, mask=asked & (weights > 0.0)[:, :, None], other=0.0) if SKIP_ZEROS else v_now
        k = k_ahead
        start += BLOCK_N
    return mixed + weights[:, :, None] * v.to(tl.float32), running_max, total


@triton.jit
def decode_heads_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, new_k_ptr, new_v_ptr, highest_ptr, total_ptr,
    lengths_ptr, ancestors_ptr, factor_ptr, shifts_ptr, gain_ptr, gate_ptr,
    q_batch, q_head, q_row, q_column, k_batch, k_head, k_row, k_column, v_batch, v_head, v_row, v_column,
    o_batch, o_head, o_row, o_column, new_k_batch, new_k_head, new_k_row, new_k_column,
    new_v_batch, new_v_head, new_v_row, new_v_column, length_step, ancestor_step, o_split, R, H, K, Q, capacity, D, Dv,
    left, scale, gain, exponent, shift_factor, epsilon,
    POWER: tl.constexpr, WEIGHT: tl.constexpr, SLOPE: tl.constexpr, RECTIFIED: tl.constexpr, SHIFT: tl.constexpr,
    SHIFT_PER_HEAD: tl.constexpr, SCALE_INSIDE: tl.constexpr, UNIT_KEYS: tl.constexpr, ROW_SCALE: tl.constexpr,
    PER_HEAD: tl.constexpr, RAGGED: tl.constexpr, APPEND: tl.constexpr, INDEXED: tl.constexpr,
    PARTIAL: tl.constexpr, SKIP_ZEROS: tl.constexpr, NORM: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """HEADS heads of a row, one query each. SKIP_ZEROS: the value of a key that weighs nothing is not read."""
    r = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    heads, d, dv = h[:, None], tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_DV)[None, :]
    inside, inside_v = (heads < H) & (d < D), (heads < H) & (dv < Dv)
    length = load_length(lengths_ptr, length_step, r, capacity) if RAGGED else capacity
    known = length - 1 if APPEND else length
    first, start, stop = split_range(length, known, left, BLOCK_N)
    q = tl.load(q_ptr + r * q_batch + heads * q_head + d * q_column, mask=inside, other=0.0).to(tl.float32)
    k_ptrs, v_ptrs = k_ptr + heads * k_head + d * k_column, v_ptr + heads * v_head + dv * v_column
    shift = decode_shift(shift_factor, length, left, shifts_ptr, h, H, SHIFT, SHIFT_PER_HEAD)
    if APPEND:
        mine = (tl.program_id(2) == 0) & (known >= 0)  # one split alone adds and writes the new key
        new_k_own = new_k_ptr + r * new_k_batch + heads * new_k_head + d * new_k_column
        new_v_own = new_v_ptr + r * new_v_batch + heads * new_v_head + dv * new_v_column
        new_k = append(new_k_own, k_ptrs + r * k_batch + known * k_row, inside, mine)
        new_v = append(new_v_own, v_ptrs + r * v_batch + known * v_row, inside_v, mine)
        score = tl.sum(q * new_k, 1)
        score = scale_scores(score, key_gains(new_k, D, 1, UNIT_KEYS), scale, shift, SCALE_INSIDE, SHIFT, UNIT_KEYS)
    mixed, running_max, total = scan_keys(
        q, k_ptrs, v_ptrs, inside, inside_v, (k_batch, k_row), (v_batch, v_row), r, (start, stop, first),
        (ancestors_ptr, ancestor_step), scale, shift, D,
        POWER, WEIGHT, SHIFT, SCALE_INSIDE, UNIT_KEYS, INDEXED, SKIP_ZEROS, HEADS, BLOCK_N, BLOCK_D, BLOCK_DV,
    )  # fmt: skip
    highest = tl.max(running_max, 0)
    if POWER == 0:
        _, shrink = softmax_step(running_max, running_max, highest[None, :])
        mixed, total = mixed * shrink[:, :, None], total * shrink
    out, total = tl.sum(mixed, 0), tl.sum(total, 0)
    if APPEND:
        out, highest, total = add_new_key(out, highest, total, score, new_v, 1.0, mine, POWER, WEIGHT)
    if POWER == 0:
        rows_out = (tl.program_id(2) * R + r) * H + h
        out = finish_softmax(out, highest, total, highest_ptr, total_ptr, rows_out, h < H, PARTIAL)
    else:
        out = out * decode_gain(gain, exponent, length, left, factor_ptr, heads, H, PER_HEAD, ROW_SCALE)
    if NORM > 0:
        out = norm_row(out, gain_ptr, gate_ptr, heads * Dv + dv, inside_v, H * Dv, epsilon, NORM)
    out_ptrs = out_ptr + tl.program_id(2) * o_split + r * o_batch + heads * o_head + dv * o_column
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside_v)


@triton.jit
def decode_groups_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, new_k_ptr, new_v_ptr, highest_ptr, total_ptr,
    lengths_ptr, ancestors_ptr, factor_ptr, shifts_ptr, gain_ptr, gate_ptr,
    q_batch, q_head, q_row, q_column, k_batch, k_head, k_row, k_column, v_batch, v_head, v_row, v_column,
    o_batch, o_head, o_row, o_column, new_k_batch, new_k_head, new_k_row, new_k_column,
    new_v_batch, new_v_head, new_v_row, new_v_column, length_step, ancestor_step, o_split, R, H, K, Q, capacity, D, Dv,
    left, scale, gain, exponent, shift_factor, epsilon,
    POWER: tl.constexpr, WEIGHT: tl.constexpr, SLOPE: tl.constexpr, RECTIFIED: tl.constexpr, SHIFT: tl.constexpr,
    SHIFT_PER_HEAD: tl.constexpr, SCALE_INSIDE: tl.constexpr, UNIT_KEYS: tl.constexpr, ROW_SCALE: tl.constexpr,
    PER_HEAD: tl.constexpr, RAGGED: tl.constexpr, APPEND: tl.constexpr, INDEXED: tl.constexpr,
    PARTIAL: tl.constexpr, SKIP_ZEROS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """All queries of all heads that read one key head: row m is query m % Q of the group's head m // Q."""
    r, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    m, d, dv = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_DV)[None, :]
    real, heads, query = m < H // K * Q, head * (H // K) + m // Q, m % Q
    length = load_length(lengths_ptr, length_step, r, capacity) if RAGGED else capacity
    known = length - 1 if APPEND else length
    first, start, stop = split_range(length, known, left, BLOCK_N)
    q_ptrs = q_ptr + r * q_batch + (heads * q_head + query * q_row)[:, None] + d * q_column
    q = tl.load(q_ptrs, mask=real[:, None] & (d < D), other=0.0)
    k_ptrs, v_ptrs = k_ptr + head * k_head + d * k_column, v_ptr + head * v_head + dv * v_column
    wide = q.to(tl.float32)
    gain = decode_gain(gain, exponent, length, left, factor_ptr, heads[:, None], H, PER_HEAD, ROW_SCALE)
    shift = decode_shift(shift_factor, length, left, shifts_ptr, heads, H, SHIFT, SHIFT_PER_HEAD)
    running_max, total = tl.full([BLOCK_M], MINUS_INFINITY, tl.float32), tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if APPEND:
        mine = (tl.program_id(2) == 0) & (known >= 0)
        new_k_own = new_k_ptr + r * new_k_batch + head * new_k_head + d * new_k_column
        new_v_own = new_v_ptr + r * new_v_batch + head * new_v_head + dv * new_v_column
        new_k = append(new_k_own, k_ptrs + r * k_batch + known * k_row, d < D, mine)
        new_v = append(new_v_own, v_ptrs + r * v_batch + known * v_row, dv < Dv, mine)
        score = tl.sum(wide * new_k, 1)
        score = scale_scores(score, key_gains(new_k, D, 1, UNIT_KEYS), scale, shift, SCALE_INSIDE, SHIFT, UNIT_KEYS)
        mixed, running_max, total = add_new_key(mixed, running_max, total, score, new_v, gain, mine, POWER, WEIGHT)
    shift = shift[:, None] if SHIFT_PER_HEAD else shift
    # Triton pipelines the loads in order of dependence: rows of a beam, keys, and values, whose mask depends on scores.
    for begin in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        n = begin + tl.arange(0, BLOCK_N)
        held = (n >= first) & (n < stop)
        rows = cache_rows(ancestors_ptr, ancestor_step, r, n, held, INDEXED)
        k = tl.load(k_ptrs + (rows * k_batch + n * k_row)[:, None], mask=held[:, None] & (d < D), other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        scores = scale_scores(scores, key_gains(k, D, 1, UNIT_KEYS), scale, shift, SCALE_INSIDE, SHIFT, UNIT_KEYS)
        if POWER == 0:
            wide_weights, running_max, total, mixed = softmax_block(scores, held, running_max, total, mixed)
        else:
            wide_weights = whole_power(WEIGHT(scores), POWER) * gain
        weights = wide_weights.to(v_ptr.dtype.element_ty)
        asked = held & (tl.max(weights.to(tl.float32), 0) > 0.0) if SKIP_ZEROS else held
        v = tl.load(v_ptrs + (rows * v_batch + n * v_row)[:, None], mask=asked[:, None] & (dv < Dv), other=0.0)
        mixed += tl.dot(weights, v, input_precision="ieee")
    if POWER == 0:
        rows_out = ((tl.program_id(2) * R + r) * Q + query) * H + heads
        mixed = finish_softmax(mixed, running_max, total, highest_ptr, total_ptr, rows_out, real, PARTIAL)
    out_ptrs = out_ptr + tl.program_id(2) * o_split + r * o_batch + (heads * o_head + query * o_row)[:, None]
    tl.store(out_ptrs + dv * o_column, mixed.to(out_ptr.dtype.element_ty), mask=real[:, None] & (dv < Dv))


@triton.jit
def decode_merge_kernel(
    parts_ptr, highest_ptr, total_ptr, out_ptr, T, Dv, splits,
    SOFTMAX: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Rows [T, Dv] from parts [splits, T, Dv], added in a fixed order; those of a softmax shrink to a common highest
    score. All parts of a row are on their way at once."""
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dv = tl.arange(0, BLOCK_DV)
    split = tl.arange(0, SPLITS).to(tl.int64)
    rows_out, real = split[:, None] * T + t[None, :], (split[:, None] < splits) & (t[None, :] < T)
    numbers = rows_out[:, :, None] * Dv + dv[None, None, :]
    parts = tl.load(parts_ptr + numbers, mask=real[:, :, None] & (dv < Dv)[None, None, :], other=0.0)
    if SOFTMAX:
        running_max = tl.load(highest_ptr + rows_out, mask=real, other=MINUS_INFINITY)
        shrink, _ = softmax_step(running_max, running_max, tl.max(running_max, 0)[None, :])
        total = tl.sum(tl.load(total_ptr + rows_out, mask=real, other=0.0) * shrink, 0)
        parts = parts * (shrink / tl.where(total == 0.0, 1.0, total)[None, :])[:, :, None]
    inside = (t[:, None] < T) & (dv[None, :] < Dv)
    tl.store(out_ptr + t[:, None] * Dv + dv[None, :], tl.sum(parts, 0).to(out_ptr.dtype.element_ty), mask=inside)
