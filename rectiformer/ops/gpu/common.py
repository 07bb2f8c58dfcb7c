"""What the kernels share: one description of a call on its way through torch's operators, and pieces of device code.

On the device, KEY_AXIS is the axis of a block of scores along which keys lie: 1 forward, [queries, keys]; 0 where
blocks are made transposed, so that no product's result has to be transposed to enter another product. That is slow, and
a known source of wrong code on Hopper (docs/log.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from rectiformer.ops.activations import Pointwise, RowScale, RowShift, cosine_scores, dot_scores
from rectiformer.ops.autograd import recall, second_derivatives
from rectiformer.ops.call import HIDING, AttentionCall, Packing, Visibility
from rectiformer.ops.dropout import drop_threshold
from rectiformer.ops.gpu import interpreting
from rectiformer.ops.gpu.plans import Gradients, KernelPlan
from rectiformer.ops.gpu.pointwise import pointwise_flags, shift_unit
from rectiformer.ops.variants import VARIANTS

ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? attn_bias, Tensor? attn_mask, Tensor? head_factors, Tensor? head_shifts, "
    "Tensor? row_counts, Tensor? key_lengths, Tensor? seed, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "str function, int power, str shift, float shift_factor, float scale, float dropout_p, float row_exponent, "
    "float row_factor, SymInt window_left, SymInt window_right, SymInt max_queries, SymInt max_keys, bool unit_rows"
)
"""What every operator of the short and long kernels takes: the fields of `KernelCall`, as torch names them."""
NO_GRADIENT = [None] * 18
"""Of the arguments from row_counts on."""


@dataclass(frozen=True)
class KernelCall:
    """Sum over visible keys of head_factors[h] row_factor n^-row_exponent function(x) ** power v, where x = scale q k +
    attn_bias - head_shifts[h] shift_factor shift(n).

    Power 0 is a softmax. n is counted by the kernels unless row_counts has it, as it must where a mask or bias hides
    keys. With cu_seqlens, batch row 0 holds sequences end to end, none longer than max_queries and
    max_keys; without, these are the lengths of q and k. With unit_rows, queries and keys are divided by their root mean
    square, which only the short kernels do.
    """

    q: Tensor  # [B, H, M, D]
    k: Tensor  # [B, K, N, D]
    v: Tensor  # [B, K, N, Dv]
    attn_bias: Tensor | None  # broadcasts to [B, H, M, N]
    attn_mask: Tensor | None  # bool, likewise
    head_factors: Tensor | None  # [H]
    head_shifts: Tensor | None  # [H]
    row_counts: Tensor | None  # float32 [B, H, M], at least 1
    key_lengths: Tensor | None  # [B]
    seed: Tensor | None
    cu_seqlens_q: Tensor | None  # [sequences + 1]
    cu_seqlens_k: Tensor | None
    function: str
    power: int
    shift: str  # a key of `SHIFT_FLAGS`
    shift_factor: float
    scale: float  # not negative
    dropout_p: float
    row_exponent: float
    row_factor: float
    window_left: int
    window_right: int
    max_queries: int
    max_keys: int
    unit_rows: bool

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else len(self.cu_seqlens_q) - 1

    @property
    def scales_outside(self) -> bool:
        """Whether scores may be scaled after the function: a plain ReLU lets positive factors through."""
        return self.function == "relu" and not self.shift

    @property
    def dropout_threshold(self) -> int:
        """Cells whose hash is below are dropped."""
        return drop_threshold(self.dropout_p)

    def flags(self) -> dict[str, Any]:
        """Compile-time arguments that all kernels have. No length is among them, so none compiles a kernel again."""
        return pointwise_flags(self.function, self.power, self.shift, self.head_shifts is not None, self.q.dtype) | {
            "ROW_SCALE": row_scale_flag(self.row_exponent),
            "PER_HEAD": self.head_factors is not None,
            "RAGGED": self.key_lengths is not None,
            "PACKED": self.packed,
            "DROPOUT": dropout_flag(self),
        }

    def unflatten(self, head_factors: Tensor | None, head_shifts: Tensor | None) -> AttentionCall:
        """The call that these arguments stand for, with its bias left out."""
        M, N = self.q.shape[2], self.k.shape[2]
        visibility = Visibility(
            M, N, self.window_left, self.window_right, self.key_lengths, self.attn_mask, first=N - M
        )
        factor = self.row_factor if head_factors is None else self.row_factor * head_factors
        row = RowScale(lambda options: self.row_exponent, lambda options: factor)
        by_row = self.shift_factor if head_shifts is None else self.shift_factor * head_shifts
        shift = RowShift(self.shift, lambda options: by_row) if self.shift else None
        pointwise = Pointwise(self.function, self.power, shift)
        score = cosine_scores if self.unit_rows else dot_scores
        rectified = replace(VARIANTS["rela"], pointwise=pointwise, row_scale=row, score=score)
        variant = rectified if self.power else VARIANTS["softmax"]
        return AttentionCall(variant, visibility, {}, self.scale, dropout_p=self.dropout_p, seed=self.seed)


class AttentionPlan(KernelPlan):
    """The launches of a `KernelCall`."""

    fields = tuple(field.name for field in dataclasses.fields(KernelCall) if "Tensor" in str(field.type))
    first_table = fields.index("head_factors")

    def call(self, held: Sequence[Tensor]) -> KernelCall:
        return KernelCall(*self.restore(held), *self.numbers)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_bias: Tensor | None,
        attn_mask: Tensor | None,
        key_lengths: Tensor | None,
        seed: Tensor | None,
    ) -> Tensor:
        """Run a call of this layout that has nothing else."""
        return self([q, k, v, *[x for x in (attn_bias, attn_mask, key_lengths, seed) if x is not None]])

    def forward_packed(self, held: Sequence[Tensor]) -> Tensor:
        """`forward`, where queries, keys, values and the result are [total, H, D] of packed sequences."""
        return unpacked_view(self.forward([*map(packed_view, held[:3]), *held[3:]]))

    def backward_packed(self, d_out: Tensor, held: Sequence[Tensor]) -> Gradients:
        """Likewise."""
        found = self.backward(packed_view(d_out), [*map(packed_view, held[:3]), *held[3:]])
        return tuple(unpacked_view(grad) for grad in found[:3] if grad is not None)


class PackedPlan(KernelPlan):
    """An `AttentionPlan` for tensors [total, H, D] of packed sequences: autograd has no views of them to go through."""

    fields: ClassVar = ("q", "k", "v", "seed", "cu_seqlens_q", "cu_seqlens_k")
    gradient_of: ClassVar = {"q": 0, "k": 1, "v": 2}

    def __init__(self, inner: AttentionPlan, tensors: Sequence[Tensor | None]) -> None:
        super().__init__(tensors, ())
        self.inner = inner

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bounds: tuple[Tensor, Tensor], seed: Tensor | None) -> Tensor:
        return self([q, k, v, *bounds] if seed is None else [q, k, v, seed, *bounds])

    def forward(self, held: Sequence[Tensor]) -> Tensor:
        return self.inner.forward_packed(held)

    def backward(self, d_out: Tensor, held: Sequence[Tensor]) -> Gradients:
        return self.inner.backward_packed(d_out, held)

    def differentiable_backward(self, d_out: Tensor, held: Sequence[Tensor]) -> Gradients:
        found = self.inner.differentiable_backward(packed_view(d_out), [*map(packed_view, held[:3]), *held[3:]])
        return tuple(unpacked_view(grad) for grad in found[:3] if grad is not None)


def packed_view(tensor: Tensor) -> Tensor:
    """[total, H, D] as [1, H, total, D]."""
    return tensor.transpose(0, 1).unsqueeze(0)


def unpacked_view(tensor: Tensor) -> Tensor:
    return tensor.squeeze(0).transpose(0, 1)


def flatten(
    q: Tensor,
    call: AttentionCall,
    packing: Packing | None,
    row_scale: tuple[float, float, Tensor | None],
    max_queries: int,
    max_keys: int,
    unit_rows: bool = False,
) -> tuple[Any, ...]:
    """The operators' arguments after q, k and v; `row_scale` is what the kernels are to apply of it."""
    seen, (exponent, factor, head_factors) = call.visibility, row_scale
    bounds = (None, None) if packing is None else (packing.cu_seqlens_q, packing.cu_seqlens_k)
    function, power, shift, shift_factor, head_shifts = pointwise_parts(q, call)
    counts = None
    if shift not in ("", "1") and call.counts_cells:
        counts = call.seen.counts(q.device).clamp_min(1).float().expand(q.shape[:3])
    tensors = (call.attn_bias, seen.attn_mask, head_factors, head_shifts, counts, seen.key_lengths, call.seed, *bounds)
    numbers = (function, power, shift, shift_factor, call.scale, call.dropout_p, exponent, factor)
    return *tensors, *numbers, seen.left, seen.right, max_queries, max_keys, unit_rows


def with_positive_scale(q: Tensor, call: AttentionCall) -> tuple[Tensor, AttentionCall]:
    """The same scores: a positive scale may leave the ReLU, a negative one must not."""
    return (-q, replace(call, scale=-call.scale)) if call.scale < 0 else (q, call)


def row_scale_parts(q: Tensor, call: AttentionCall) -> tuple[float, float, Tensor | None]:
    """The row scale as exponent of the count, factor of all rows, and factors of the heads [H] if they have any."""
    row = call.variant.row_scale
    if row is None:
        return 0.0, 1.0, None
    exponent, factor = row.exponent(call.options), row.head_factor(call.options, torch.float32)
    if isinstance(factor, Tensor):
        return exponent, 1.0, factor.to(q.device).expand(q.shape[1]).contiguous()
    return exponent, float(factor), None


def pointwise_parts(q: Tensor, call: AttentionCall) -> tuple[str, int, str, float, Tensor | None]:
    """Function and power, and the shift of rows: its unit, factor of all rows, and factors of the heads [H] if any."""
    row = call.variant.pointwise
    if row is None:
        return "relu", 0, "", 0.0, None  # softmax
    power = row.find_power(call.options)
    if row.shift is None:
        return row.function, power, "", 0.0, None
    factor = row.shift.factor(call.options)
    if isinstance(factor, Tensor):
        return row.function, power, row.shift.unit, 1.0, factor.to(q.device).float().expand(q.shape[1]).contiguous()
    return row.function, power, row.shift.unit, float(factor), None


def hidden_sides(call: KernelCall) -> tuple[bool, bool]:
    """Whether causal order or a window hides later keys from some query, and whether it hides earlier ones."""
    M, N = call.max_queries, call.max_keys
    if call.packed:  # wherever the queries of a sequence stand among its keys
        return call.window_right < max(M, N) - 1, call.window_left < N - 1
    seen = Visibility(M, N, call.window_left, call.window_right, first=N - M)
    return seen.hides_later, seen.hides_earlier


def dropout_flag(call: KernelCall) -> int:
    """How weights are dropped: not at all, by comparing each cell's hash, or those of two at once.

    The latter is for weights of 16 bits, and the threshold must be a number when it is read as a float16.
    """
    if call.seed is None or not call.dropout_p:
        return 0
    pairs = call.q.element_size() == 2 and call.dropout_threshold <= 0x7C00 << 16
    return 2 if pairs and not interpreting() else 1


def row_scale_flag(exponent: float) -> int:
    """How `row_gain` computes n^-exponent: not at all, by a root, by a quotient, or by a power of 2."""
    return {0.0: 0, 0.5: 1, 1.0: 2}.get(exponent, 3)


def differentiate_twice(ctx: Any, cotangents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Gradients for d_out and all of `ARGUMENTS`; cotangents belong to d_q, d_k, d_v, d_attn_bias, d_head_factors
    and d_head_shifts."""
    d_out, *inputs = recall(ctx)
    call = KernelCall(*inputs)
    leaves = [d_out, call.q, call.k, call.v, call.attn_bias, call.head_factors, call.head_shifts]
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        second = second_derivatives(call.unflatten, leaves, cotangents)
    else:
        second = packed_second_derivatives(call, Packing(call.cu_seqlens_q, call.cu_seqlens_k), leaves, cotangents)
    return *second[:5], None, *second[5:], *NO_GRADIENT


def packed_second_derivatives(
    call: KernelCall, packing: Packing, inputs: Sequence[Tensor | None], cotangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """`second_derivatives`, one sequence after the other; packed sequences have no bias."""
    totals = [None if tensor is None else torch.zeros_like(tensor) for tensor in inputs]
    d_out, (of_q, of_k, of_v, _, *of_heads) = inputs[0], cotangents
    assert d_out is not None
    assert of_q is not None
    assert of_k is not None
    assert of_v is not None
    for q, k, v, alone in packing.split(call.q, call.k, call.v, call.unflatten(None, None)):
        start, key_start = alone.origin
        rows = slice(None), slice(None), slice(start, start + q.shape[2])
        keys = slice(None), slice(None), slice(key_start, key_start + k.shape[2])

        def describe(*of_heads: Tensor | None, alone: AttentionCall = alone) -> AttentionCall:
            return replace(call.unflatten(*of_heads), visibility=alone.visibility, origin=alone.origin)

        parts = [d_out[rows], q, k, v, None, *inputs[5:]]
        found = second_derivatives(describe, parts, [of_q[rows], of_k[keys], of_v[keys], None, *of_heads])
        for total, grad, part in zip(totals, found, (rows, rows, keys, keys, None, None, None), strict=True):
            if total is not None and grad is not None:
                (total if part is None else total[part]).add_(grad)
    return totals


def empty_heads_last(like: Tensor, head_dim: int) -> Tensor:
    """Uninitialized [B, H, length, head_dim] in the memory order [B, length, H, head_dim]: joining heads moves
    nothing."""
    B, H, length, _ = like.shape
    return like.new_empty_strided((B, H, length, head_dim), (length * H * head_dim, head_dim, H * head_dim, 1))


def pointer(tensor: Tensor | None, unread: Tensor) -> Tensor:
    """What a kernel reads by address alone: the tensor without gaps; for None anything, as a flag keeps it unread."""
    return unread if tensor is None else tensor.contiguous()


def power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def block_size(size: int) -> int:
    """The power of two that holds `size`, and at least the 16 that a matrix product needs."""
    return max(16, power_of_two(size))


GOLDEN = tl.constexpr(-1640531527)
HIDING_BIAS = tl.constexpr(HIDING)


@triton.jit
def murmur3(word):
    """The finalizer of MurmurHash3, as ops/dropout.py has it; the masks make shifts of signed words logical."""
    word = (word ^ ((word >> 16) & 0xFFFF)) * -2048144789
    word = (word ^ ((word >> 13) & 0x7FFFF)) * -1028477387
    return word ^ ((word >> 16) & 0xFFFF)


@triton.jit
def dropout_words(seed_ptr, threshold, pattern, DROPOUT: tl.constexpr):
    """What `dropout_keeps` knows of a pattern: (a word for its queries, one for its keys, the threshold of a cell)."""
    of_queries, of_keys = 0, 0
    if DROPOUT > 0:
        seed = tl.load(seed_ptr)
        of_queries = murmur3(murmur3(seed.to(tl.int32)) + pattern * GOLDEN)
        of_keys = murmur3(of_queries ^ (seed >> 32).to(tl.int32))
    return of_queries, of_keys, threshold


@triton.jit
def scatter(word, index):
    """Numbers of queries or keys, as ops/dropout.py has them."""
    place = word + index * GOLDEN
    return place * place ^ place


@triton.jit
def dropout_hash(words, m, n, KEY_AXIS: tl.constexpr):
    """The hash of each cell: of the cell's own, one product."""
    of_queries, of_keys, _ = words
    row, column = scatter(of_queries, m) | 1, scatter(of_keys, n)
    return tl.expand_dims(row, KEY_AXIS) * tl.expand_dims(column, 1 - KEY_AXIS)


@triton.jit
def dropout_keeps(words, m, n, KEY_AXIS: tl.constexpr):
    """True where dropout spares a weight: the same cells as in every other implementation, whatever the tile.

    A pure hash of (seed, pattern, query, key): the backward pass asks again instead of reading a mask.
    """
    _, _, threshold = words
    return (dropout_hash(words, m, n, KEY_AXIS) & 0x7FFFFFFF) >= threshold


@triton.jit
def drop(values, words, seq, m, n, KEY_AXIS: tl.constexpr, DROPOUT: tl.constexpr):
    """The values of a tile, 0 where dropout drops a weight. DROPOUT: see `dropout_flag`.

    In pairs, the 15 bits that decide are compared as the magnitudes of two float16: these have the order of their bits,
    and NaN, which the largest of them are, is kept. With the masks in registers it takes 5 instructions for two cells;
    a predicate for each cell takes 3 for each, and as many again to keep predicates until the scores are there.
    """
    if DROPOUT > 0:
        _, _, _, q_start, k_start, _, _, _ = seq
        if DROPOUT == 2 and values.dtype.primitive_bitwidth == 16:
            _, _, threshold = words
            cells = dropout_hash(words, q_start + m, k_start + n, KEY_AXIS)
            bits = tl.inline_asm_elementwise(
                """{
                .reg .b32 pair;
                prmt.b32 pair, $2, $3, 0x7632;
                abs.f16x2 pair, pair;
                set.geu.u32.f16x2 pair, pair, $4;
                and.b32 $0, $1, pair;
                }""",
                "=r,r,r,r,r,r",
                [values.to(tl.int16, bitcast=True), cells, (threshold >> 16) * 0x10001],
                dtype=tl.int16,
                is_pure=True,
                pack=2,
            )
            values = bits.to(values.dtype, bitcast=True)
        else:
            values = tl.where(dropout_keeps(words, q_start + m, k_start + n, KEY_AXIS), values, 0.0)
    return values


@triton.jit
def visible(
    m, n, M, N, length, left, right, KEY_AXIS: tl.constexpr, HIDES_LATER: tl.constexpr, HIDES_EARLIER: tl.constexpr
):  # fmt: skip
    """True where a query sees a key: of the `length` keys, causal order or a window hides later ones, or earlier ones.

    Each comparison left out is one less per cell; what ends a row is found once per row.
    """
    key = tl.expand_dims(n, 1 - KEY_AXIS)
    position = tl.expand_dims(m + (N - M), KEY_AXIS)  # the last query is aligned with the last key
    seen = key < tl.minimum(position + right + 1, length) if HIDES_LATER else key < length
    if HIDES_EARLIER:
        seen = seen & (key >= position - left)
    return seen


@triton.jit
def count_keys(m, M, N, length, left, right, BANDED: tl.constexpr):
    """n, the keys that a row sees, at least 1: one number for all rows without BANDED, since all see the same keys."""
    count = length
    if BANDED:
        position = m + (N - M)
        count = tl.minimum(position + right + 1, length) - tl.maximum(position - left, 0)
    return tl.maximum(count, 1).to(tl.float32)


@triton.jit
def row_gain(
    gain, exponent, m, M, N, length, left, right,
    KEY_AXIS: tl.constexpr, BANDED: tl.constexpr, ROW_SCALE: tl.constexpr,
):  # fmt: skip
    """What a row's weights are multiplied with: `gain`, times n^-exponent where the rows are scaled.

    One number for all rows without BANDED. Roots and quotients are the correctly rounded ones, as in torch; the default
    ones of a GPU are not.
    """
    if ROW_SCALE > 0:
        count = count_keys(m, M, N, length, left, right, BANDED)
        if ROW_SCALE == 1:
            gain = tl.div_rn(gain, tl.sqrt_rn(count))
        elif ROW_SCALE == 2:
            gain = tl.div_rn(gain, count)
        else:
            gain = gain * tl.exp2(-exponent * tl.log2(count))
        if BANDED:
            gain = tl.expand_dims(gain, KEY_AXIS)
    return gain


# Pieces of the kernels for long sequences. A sequence's numbers travel as one tuple
#     seq = (batch row, query head, key head, first query, first key, queries, keys, keys that are real)
# and what shapes its scores as window = (left, right) and mask_args = (bias pointer, its strides, mask pointer, its
# strides).


@triton.jit
def locate_sequence(
    sequence, head, group, M, N, lengths_ptr, q_bounds_ptr, k_bounds_ptr,
    RAGGED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The tuple `seq`; packed sequences share batch row 0."""
    q_start, k_start = 0, 0
    b = sequence
    if PACKED:
        q_start = tl.load(q_bounds_ptr + sequence).to(tl.int32)
        k_start = tl.load(k_bounds_ptr + sequence).to(tl.int32)
        M = tl.load(q_bounds_ptr + sequence + 1).to(tl.int32) - q_start
        N = tl.load(k_bounds_ptr + sequence + 1).to(tl.int32) - k_start
        b = sequence * 0
    length = N
    if RAGGED:
        length = tl.minimum(tl.load(lengths_ptr + sequence).to(tl.int32), N)
    return b, head, head // group, q_start, k_start, M, N, length


@triton.jit
def tile_pointers(ptr, strides, b, h, row, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Addresses [BLOCK, BLOCK_D]; the far part of an offset is 64 bits wide, the near part 32."""
    stride_batch, stride_head, stride_row, stride_column = strides
    row, b, h = tl.cast(row, tl.int64), tl.cast(b, tl.int64), tl.cast(h, tl.int64)
    first = ptr + b * stride_batch + h * stride_head + row * stride_row
    return first + tl.arange(0, BLOCK)[:, None] * stride_row + tl.arange(0, BLOCK_D)[None, :] * stride_column


@triton.jit
def load_tile(
    source, ptr, strides, b, h, start, row, limit, D,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """Rows `row` on of the sequence that begins at `start`: [BLOCK, BLOCK_D], zeros beyond the tensor.

    CLEAR: zeros from `limit` on also where the tensor goes on, with another sequence or with padding. `source` is a
    descriptor for the tensor copy engine if TMA. Tiles to clear are read by pointers nevertheless: clearing what the
    copy engine brought becomes wrong code under Triton 3.6's own ptxas (docs/log.md).
    """
    if TMA and not CLEAR:
        tile = source.load([b, h, start + row, 0]).reshape([BLOCK, BLOCK_D])
    else:
        inside = (row + tl.arange(0, BLOCK) < limit)[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
        tile = tl.load(tile_pointers(ptr, strides, b, h, start + row, BLOCK, BLOCK_D), mask=inside, other=0.0)
    return tile


@triton.jit
def store_tile(
    ptr, strides, b, h, start, row, limit, D, values, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """By pointers: the copy engine knows where the tensor ends, but not where a sequence does."""
    inside = ((row + tl.arange(0, BLOCK)) < limit)[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
    pointers = tile_pointers(ptr, strides, b, h, start + row, BLOCK, BLOCK_D)
    tl.store(pointers, values.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_mask_tile(ptr, strides, seq, m, n, other, KEY_AXIS: tl.constexpr):
    """A tile of bias or mask, `other` beyond the queries and keys of the sequence; broadcast axes have stride 0."""
    b, h, _, _, _, M, N, _ = seq
    stride_batch, stride_head, stride_row, stride_column = strides
    row, column = tl.expand_dims(m, KEY_AXIS), tl.expand_dims(n, 1 - KEY_AXIS)
    first = ptr + tl.cast(b, tl.int64) * stride_batch + tl.cast(h, tl.int64) * stride_head
    offsets = row.to(tl.int64) * stride_row + column * stride_column
    return tl.load(first + offsets, mask=(row < M) & (column < N), other=other)


@triton.jit
def row_shifts(
    shift_args, m, H, rows, seq, window,
    KEY_AXIS: tl.constexpr, BANDED: tl.constexpr, SHIFT: tl.constexpr, SHIFT_PER_HEAD: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """What is subtracted from the scores of each row, and its unit: the shift is linear in the factor of its head.

    `shift_args` = (factor, pointer to those of the heads, pointer to counts of keys). COUNTED: counts [B, H, rows] are
    given, where a mask or bias may hide any key.
    """
    unit, factor = 0.0, 0.0
    if SHIFT > 0:
        factor, shifts_ptr, counts_ptr = shift_args
        b, h, _, _, _, M, N, length = seq
        left, right = window
        if SHIFT_PER_HEAD:
            factor = factor * tl.load(shifts_ptr + h)
        if COUNTED:
            count = tl.load(counts_ptr + tl.cast(b * H + h, tl.int64) * rows + m, mask=m < M, other=1.0)
        else:
            count = count_keys(m, M, N, length, left, right, BANDED)
        unit = shift_unit(count, SHIFT)
        if BANDED or COUNTED:
            unit = tl.expand_dims(unit, KEY_AXIS)
    return unit * factor, unit


@triton.jit
def seen_scores(
    scores, m, n, seq, window, mask_args, shift, scale,
    KEY_AXIS: tl.constexpr, EDGE: tl.constexpr, BANDED: tl.constexpr,
    BIAS: tl.constexpr, MASK: tl.constexpr, SCALE_INSIDE: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Scores, scaled if SCALE_INSIDE, biased if BIAS and shifted if SHIFT, with zeros where a query does not see a key:
    0 is what a ReLU makes of a hidden score, forward and backward. And where it sees one, for other functions.

    Without EDGE, bias and mask nothing is tested: every cell is seen, or belongs to a key that was loaded as zeros.
    """
    bias_ptr, bias_strides, mask_ptr, mask_strides = mask_args
    _, _, _, _, _, M, N, length = seq
    left, right = window
    if SCALE_INSIDE:
        scores = scores * scale
    if BIAS:
        bias = load_mask_tile(bias_ptr, bias_strides, seq, m, n, 0.0, KEY_AXIS).to(tl.float32)
        hidden = bias <= HIDING_BIAS
        scores = tl.where(hidden, 0.0, scores + bias)
    if SHIFT > 0:
        scores = scores - shift
    seen = 0
    if EDGE or BIAS or MASK:
        seen = visible(m, n, M, N, length, left, right, KEY_AXIS, BANDED, BANDED)
        if MASK:
            seen = seen & (load_mask_tile(mask_ptr, mask_strides, seq, m, n, 0, KEY_AXIS) != 0)
        scores = tl.where(seen, scores, 0.0)
        if BIAS:
            seen = seen & ~hidden
    return scores, seen


@triton.jit
def safe_log(weights):
    """Natural logarithms, finite where a weight is 0."""
    return tl.log(tl.maximum(weights, 1.2e-38))


@triton.jit
def key_range(row, rows, seq, window, BLOCK: tl.constexpr, BANDED: tl.constexpr):
    """Keys that queries `row` to `row + rows` see: begin and end of all tiles, and of those that all of them see."""
    _, _, _, _, _, M, N, length = seq
    left, right = window
    begin, full_begin, end, full_end = 0, 0, length, length
    if BANDED:
        first = row + (N - M)
        last = tl.minimum(row + rows, M) - 1 + (N - M)
        begin = tl.minimum(tl.maximum(first - left, 0), length)
        full_begin = tl.minimum(tl.maximum(last - left, 0), length)
        end = tl.maximum(tl.minimum(last + right + 1, length), begin)
        full_end = tl.maximum(tl.minimum(first + right + 1, length), 0)
    begin = begin // BLOCK * BLOCK
    full_begin = tl.cdiv(full_begin, BLOCK) * BLOCK
    return begin, full_begin, tl.maximum(full_end // BLOCK * BLOCK, full_begin), end
