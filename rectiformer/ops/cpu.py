"""Pointwise variants on the CPU, one block of scores at a time, forward and backward.

A row whose weights are a function of their own score has no maximum and no sum to carry, so a block of scores is two
matrix products with that function between, and the backward pass rebuilds the block instead of keeping it. No more than
`SCORE_BYTES` of scores exist at once. To `torch.compile` either pass is one operator, `rectiformer::pointwise` and its
backward.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rectiformer.ops.activations import Pointwise, cosine_scores, unit_rms
from rectiformer.ops.autograd import operator, recall, register_derivative, second_derivatives
from rectiformer.ops.call import AttentionCall, Run, Visibility, spans
from rectiformer.ops.dropout import keep_cells
from rectiformer.ops.reference import clear_padding, repeat_heads, scale_rows, without_autocast
from rectiformer.ops.variants import VARIANTS

SCORE_BYTES = 4 << 20
"""Scores held at once. Fewer, larger blocks mean fewer joins of the worker threads; more than this leaves the cache."""
ALONE = 512 * 1024
"""Cells from which a matrix gets a block of its own: its products fill all threads by themselves."""
SUMMED_AT_ONCE = 256
"""Products that oneDNN may add up at once: over a thousand, its error is twice that of torch's own products."""
ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
BFLOAT16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""Whether this CPU multiplies matrices of bfloat16. Asked once: torch.compile cannot trace the question."""


@dataclass(frozen=True)
class Function:
    """A function of a block of scores, one of `FUNCTIONS` in activations.py, with as few new tensors as it takes."""

    weigh: Callable[[Tensor], Tensor]
    """f(x), in the place of x where the slope can do without x."""
    pull_back: Callable[[Tensor, Tensor, Tensor], object]
    """Multiplies d by f'(x) in place: given d, f(x), and x unless `weigh` has overwritten it."""
    homogeneous: bool = False
    """f(c x) = c f(x) for c > 0: a positive scale costs nothing outside."""
    closes: bool = False
    """`pull_back` gives exactly 0 where f(x) is 0, of NaN too: hidden and dropped cells need not be zeroed again."""
    at_zero: float = 0.0
    """f(0)."""


aten = torch.ops.aten
FUNCTIONS = {
    "identity": Function(lambda x: x, lambda d, *_: d, homogeneous=True),
    "relu": Function(
        torch.relu_,
        lambda d, f, _: aten.threshold_backward.grad_input(d, f, 0, grad_input=d),
        homogeneous=True,
        closes=True,
    ),
    "leaky-relu": Function(
        lambda x: F.leaky_relu_(x, 0.01),
        lambda d, f, _: aten.leaky_relu_backward.grad_input(d, f, 0.01, True, grad_input=d),
        homogeneous=True,
    ),
    "gelu": Function(F.gelu, lambda d, _, x: aten.gelu_backward.grad_input(d, x, grad_input=d)),
    "sigmoid": Function(
        torch.sigmoid_,
        lambda d, f, _: aten.sigmoid_backward.grad_input(d, f, grad_input=d),
        at_zero=0.5,
    ),
}


class Block(NamedTuple):
    """Cells of [B, H, M, N], and where their (sequence, head) matrices lie once both axes are flattened."""

    batch: slice
    heads: slice
    queries: slice
    keys: slice
    flat: slice


@dataclass(frozen=True)
class Scores:
    """Everything that turns queries and keys into f(x); both passes compute it alike."""

    q: Tensor  # [B * H, M, D]
    k: Tensor  # [B * H, N, D]
    call: AttentionCall
    """Its mask also hides the padding where that would not come out as 0."""
    batch: int
    heads: int
    inner: float
    outer: float
    """Weights are (outer f(inner q k + bias)) ** power."""

    @property
    def visibility(self) -> Visibility:
        return self.call.visibility

    @property
    def row(self) -> Pointwise:
        assert self.call.variant.pointwise is not None
        return self.call.variant.pointwise

    @property
    def function(self) -> Function:
        return FUNCTIONS[self.row.function]

    @property
    def power(self) -> int:
        return self.row.find_power({})  # a number here: `flatten` has looked it up

    def blocks(self, buffers: int) -> Iterator[Block]:
        """All blocks that hold a visible cell, sized so that `buffers` of them fit in `SCORE_BYTES`."""
        visibility = self.visibility
        if 0 in (self.batch, self.heads, visibility.queries, visibility.keys):
            return
        lengths = None if visibility.key_lengths is None else visibility.key_lengths.tolist()
        group, rows, columns = block_sizes(self, buffers)
        # Whole sequences, or some heads of one: either lies together once flattened.
        groups = spans(self.batch, max(1, group // self.heads)), spans(self.heads, min(group, self.heads))
        for batch, heads in itertools.product(*groups):
            flat = slice(batch.start * self.heads + heads.start, (batch.stop - 1) * self.heads + heads.stop)
            longest = visibility.keys if lengths is None else max(lengths[batch])
            for queries in spans(visibility.queries, rows):
                first_key = max(0, visibility.first + queries.start - visibility.left)
                last_key = min(longest, visibility.first + queries.stop + visibility.right)
                for key in range(first_key, last_key, columns):
                    yield Block(batch, heads, queries, slice(key, min(key + columns, last_key)), flat)

    def evaluate(self, block: Block, buffer: Tensor, transposed: bool = False) -> tuple[Tensor, Tensor]:
        """f(x) of one block, with hidden and dropped cells exactly 0, and x unless f(x) has taken its place.

        Both are [b * h, m, n], or [b * h, n, m].
        """
        rows, columns = self.q[block.flat, block.queries], self.k[block.flat, block.keys]
        factors = (columns, rows) if transposed else (rows, columns)
        bias = self.call.attn_bias
        if bias is None and self.row.function == "relu":
            x = value = self.rectified_product(*factors, buffer)
        else:
            x = product(*factors, buffer)
            if bias is not None:
                cells = self.cells(x, block, transposed)
                # Two roundings in this order, as in the reference: a score that is exactly 0 there is exactly 0 here.
                torch.add(over_block(bias, block), cells, alpha=self.inner, out=cells)
            elif self.inner != 1:
                x.mul_(self.inner)
            value = self.function.weigh(x)
        self.hide(self.cells(value, block, transposed), block)
        return value, x

    def differentiate(self, block: Block, d_weights: Tensor, value: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient of the scores but for constant factors, and the weights f(x) ** power, of a block [n, m].

        Given what `evaluate` returned; both results overwrite what was given. Cells where f(x) was set to 0 have none.
        """
        function, power = self.function, self.power
        if power > 1:
            d_weights.mul_(value if power == 2 else value.pow(power - 1))
        function.pull_back(d_weights, value, x)
        if not function.closes:
            self.hide(self.cells(d_weights, block, transposed=True), block)
        return d_weights, value.pow_(power) if power > 1 else value

    def rectified_product(self, a: Tensor, b: Tensor, buffer: Tensor) -> Tensor:
        """[a b^T]+. oneDNN's ReLU comes for free but makes 0 of NaN: it is taken where no product can be NaN."""
        if runs_alone(len(a), a.dtype) and self.bounded:
            return linear(a[0], b[0], "relu")[None]
        return product(a, b, buffer).relu_()

    @cached_property
    def bounded(self) -> bool:
        """Whether all numbers are finite and so small that no sum of products overflows."""
        largest = (torch.linalg.vector_norm(tensor, math.inf).item() for tensor in (self.q, self.k))
        return math.prod(largest) * self.q.shape[-1] < torch.finfo(self.q.dtype).max

    def cells(self, scores: Tensor, block: Block, transposed: bool) -> Tensor:
        """A block of scores seen as [b, h, m, n]."""
        return (scores.mT if transposed else scores).unflatten(0, (block.batch.stop - block.batch.start, -1))

    def hide(self, cells: Tensor, block: Block) -> None:
        """Zero the cells that are not visible or were dropped. Padding has keys of zeros; `prepare` masks it where that
        is not enough."""
        seen, (rows, columns) = self.visibility, cells.shape[2:]
        corner = seen.first + block.queries.start - block.keys.start
        last_seen_by_all = corner + seen.right
        first_seen_by_all = corner + rows - 1 - seen.left
        if last_seen_by_all < columns - 1:
            # Only a part of the columns needs it, but a part has gaps, which cost a copy: worth it for a small one.
            start = last_seen_by_all + 1 if 2 * last_seen_by_all > columns else 0
            keep_triangle(cells[..., start:], lower=True, diagonal=last_seen_by_all - start)
        if first_seen_by_all > 0:
            stop = first_seen_by_all if 2 * first_seen_by_all < columns else columns
            keep_triangle(cells[..., :stop], lower=False, diagonal=corner - seen.left)
        if seen.attn_mask is not None:
            cells.masked_fill_(over_block(seen.attn_mask, block).logical_not(), 0)
        if self.call.dropout_p:
            assert self.call.seed is not None
            cells.mul_(keep_cells(self.call.seed, self.call.dropout_p, block[:4], self.heads, self.call.origin))


def block_sizes(scores: Scores, buffers: int) -> tuple[int, int, int]:
    """Matrices, rows and columns of a block of which `buffers` fit in `SCORE_BYTES`; measured in docs/log.md."""
    queries, keys = scores.visibility.queries, scores.visibility.keys
    cells = SCORE_BYTES // (buffers * scores.q.element_size())
    # Under causal order or a window, short blocks waste fewer hidden cells.
    banded = scores.visibility.banded
    if scores.q.element_size() == 2:
        # A sum over keys in pieces would round to 16 bits after each piece, so a block spans all keys.
        columns, rows = keys, 256 if banded else 1024
    else:
        columns = min(keys, cells // 1024)
        short, long = (128, cells // 2048) if banded else (512 if buffers > 1 else 1024, 1024)
        rows = short if keys < 2048 else long
    rows = min(rows, queries, max(16, cells // columns))
    return 1 if rows * columns >= ALONE else max(1, cells // (rows * columns)), rows, columns


def keep_triangle(cells: Tensor, lower: bool, diagonal: int) -> None:
    """Zero what lies above (or below) a diagonal, in whichever order the cells lie in memory."""
    if cells.stride(-1) == 1:
        cells.tril_(diagonal) if lower else cells.triu_(diagonal)
    else:
        cells.mT.triu_(-diagonal) if lower else cells.mT.tril_(-diagonal)


def over_block(broadcast: Tensor, block: Block) -> Tensor:
    """The part of a tensor with four axes, each full or 1, that lies over a block."""
    axes = zip(block[:4], broadcast.shape, strict=True)
    return broadcast[tuple(span if size > 1 else slice(None) for span, size in axes)]


def prepare(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Scores, Tensor]:
    """Flatten sequences and heads, repeat grouped heads, clear padding: the scores to be, and values [B * H, N, Dv]."""
    B, H = q.shape[:2]
    visibility, bias = call.visibility, call.attn_bias
    mask, lengths = visibility.attn_mask, visibility.key_lengths
    k, v = (repeat_heads(clear_padding(kv, visibility), H).flatten(0, 1) for kv in (k, v))
    if bias is not None:
        bias = bias.to(q.dtype)
    scores = Scores(q.flatten(0, 1), k, replace(call, attn_bias=bias), B, H, inner=call.scale, outer=1.0)
    if bias is None and scores.function.homogeneous:
        scores = replace(scores, inner=1.0, outer=call.scale)
    if lengths is not None and (bias is not None or scores.function.at_zero or not q.isfinite().all()):
        # A bias could lift padding above zero, and infinity times zero is NaN, so padding joins the mask.
        real = (torch.arange(visibility.keys, device=q.device) < lengths[:, None])[:, None, None]
        visibility = replace(visibility, attn_mask=real if mask is None else real & mask)
        scores = replace(scores, call=replace(scores.call, visibility=visibility))
    return scores, v


def product(a: Tensor, b: Tensor, buffer: Tensor) -> Tensor:
    """a times b transposed for each matrix of a batch; written to `buffer` where the library lets us."""
    if runs_alone(len(a), a.dtype):
        return linear(a[0], b[0], "none")[None]
    shape = len(a), a.shape[1], b.shape[1]
    return torch.bmm(a, b.mT, out=buffer[: math.prod(shape)].view(shape))


def add_product(total: Tensor, a: Tensor, b: Tensor, alpha: float) -> None:
    """total += alpha a b, where the total may be wider than the factors, or have gaps."""
    if runs_alone(len(a), a.dtype) and a.is_contiguous():
        for piece in spans(a.shape[2], SUMMED_AT_ONCE):
            total[0].add_(linear(a[0, :, piece], b[0, piece].mT, "none"), alpha=alpha)
    elif total.dtype == a.dtype and (len(a) == 1 or total.is_contiguous()):
        total.baddbmm_(a, b, alpha=alpha)
    else:  # batched products into a tensor with gaps would run one by one
        with without_autocast(total.device):  # which leaves alone what writes in place, as all other products here do
            total.add_(torch.bmm(a, b), alpha=alpha)


def runs_alone(matrices: int, dtype: torch.dtype) -> bool:
    """Whether to take oneDNN's single product, with its ReLU for free: for large float32 matrices it is the fastest."""
    return matrices == 1 and dtype == torch.float32 and ONEDNN


def linear(a: Tensor, b: Tensor, activation: str) -> Tensor:
    """a b^T. A second factor with gaps between its rows would send oneDNN down a path hundreds of times slower."""
    dense = b.is_contiguous() or b.mT.is_contiguous()
    return torch.ops.mkldnn._linear_pointwise(a, b if dense else b.contiguous(), None, activation, [], "")


def ungroup(grad: Tensor, like: Tensor, heads: int) -> Tensor:
    """Sum the gradients of the query heads that shared one key or value head: [B * H, N, D] to [B, K, N, D]."""
    B, K, N, D = like.shape
    if heads > K:
        grad = grad.view(B, K, heads // K, N, D).sum(2)
    return grad.view(B, K, N, D).to(like.dtype)


def grow_buffer(block: Block, buffer: Tensor) -> Tensor:
    """A flat buffer that holds the block: the one given, or a larger one. A block that runs alone needs none."""
    matrices, rows = block.flat.stop - block.flat.start, block.queries.stop - block.queries.start
    cells = matrices * rows * (block.keys.stop - block.keys.start)
    enough = buffer.numel() >= cells or runs_alone(matrices, buffer.dtype)
    return buffer if enough else buffer.new_empty(cells)


ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? attn_bias, Tensor? attn_mask, Tensor? key_lengths, Tensor? seed, "
    "str function, int power, float scale, float dropout_p, SymInt window_left, SymInt window_right, "
    "SymInt query_origin, SymInt key_origin"
)
"""Of both operators. The mask hides what a bias hides, too, and the bias holds the shifts of rows. The origin is where
query 0 and key 0 lie in the dropout pattern of a packed batch."""
NO_GRADIENT = [None] * 11
"""Of the arguments from attn_mask on."""


def choose_blocked(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Run | str:
    """`blocked_attention`, or why it cannot take this call."""
    if call.variant.pointwise is None:
        return f"weights of {call.variant.name!r} depend on more than their own score"
    return blocked_attention if q.device.type == "cpu" else f"it runs on the CPU, and q is on {q.device}"


def blocked_attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """`reference_attention` for pointwise variants, without ever holding M x N scores."""
    dtype = q.dtype
    if dtype == torch.float16 or (dtype == torch.bfloat16 and not BFLOAT16):
        q, k, v = q.float(), k.float(), v.float()
    if call.variant.score is cosine_scores:
        q, k = unit_rms(q), unit_rms(clear_padding(k, call.visibility))
    scale = call.scale
    if scale < 0:  # a positive scale leaves the ReLU, a negative one must not
        q, scale = -q, -scale
    # Hidden before the shift of its row is added: what hides a key is the bias that was given.
    shifted = replace(call, visibility=call.seen, attn_bias=add_shift(call, q.dtype), scale=scale)
    return scale_rows(pointwise(q, k, v, *flatten(shifted)), call).to(dtype)


def add_shift(call: AttentionCall, dtype: torch.dtype) -> Tensor | None:
    """The bias less the shifts of rows, which are a bias with one key: [B|1, H|1, M, 1] where no other is given."""
    assert call.variant.pointwise is not None
    shift, bias = call.variant.pointwise.shift, call.attn_bias
    if shift is None:
        return bias
    wide = torch.promote_types(dtype, torch.float32)
    count = call.seen.counts(torch.device("cpu")).clamp_min(1).to(wide)[..., None]
    shifts = shift(count, call.options)
    return -shifts if bias is None else bias - shifts


def flatten(call: AttentionCall) -> tuple[Any, ...]:
    """The operators' arguments after q, k and v."""
    assert call.variant.pointwise is not None
    seen, row = call.visibility, call.variant.pointwise
    tensors = call.attn_bias, seen.attn_mask, seen.key_lengths, call.seed
    numbers = row.function, row.find_power(call.options), call.scale, call.dropout_p
    return *tensors, *numbers, seen.left, seen.right, *call.origin


def unflatten(q: Tensor, k: Tensor, arguments: Sequence[Any]) -> AttentionCall:
    """The call that an operator's arguments stand for; its variant has the function and power, and no row scale."""
    attn_bias, attn_mask, key_lengths, seed, function, power, scale, dropout_p, left, right, *origin = arguments
    M, N = q.shape[2], k.shape[2]
    visibility = Visibility(M, N, left, right, key_lengths, attn_mask, first=N - M)
    variant = replace(VARIANTS["rela"], pointwise=Pointwise(function, power))
    return AttentionCall(variant, visibility, {}, scale, attn_bias, dropout_p, seed, tuple(origin))


@operator(f"pointwise({ARGUMENTS}) -> Tensor")
def pointwise(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Tensor:
    """sum over visible keys of f(scale q k + attn_bias) ** power v: [B, H, M, Dv]. The scale is not negative."""
    call = unflatten(q, k, arguments)
    scores, values = prepare(q, k, v, call)
    power = scores.power
    factor = scores.outer**power / (1 - call.dropout_p)
    out = q.new_zeros(values.shape[0], q.shape[2], v.shape[3])
    buffer = q.new_empty(0)
    for block in scores.blocks(buffers=1):
        buffer = grow_buffer(block, buffer)
        weights, x = scores.evaluate(block, buffer)
        if power > 1:
            weights.pow_(power)
        add_product(out[block.flat, block.queries], weights, values[block.flat, block.keys], factor)
        del weights, x  # so that the next block takes their memory, still in the cache
    return out.view(*q.shape[:3], v.shape[3])


@operator(f"pointwise_backward(Tensor d_out, {ARGUMENTS}, bool wants_bias) -> (Tensor, Tensor, Tensor, Tensor)")
def pointwise_backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Gradients of `pointwise` for q, k, v and the bias (empty unless wanted). Needs nothing but its inputs.

    Blocks are [n, m] here, keys first: four of the five matrix products then read them without a transpose.
    """
    *described, wants_bias = arguments
    call = unflatten(q, k, described)
    scores, values = prepare(q, k, v, call)
    d_out = d_out.flatten(0, 1)
    power = scores.power
    factor = scores.outer**power / (1 - call.dropout_p)
    # Sums over blocks are kept in float32 at least; within a block the matrix product itself sums wide. A row of d_q
    # is one block's alone where blocks span all keys, as they do in 16 bits.
    wide = torch.float32 if q.element_size() == 2 else q.dtype
    # Contiguous, as the operator's fake implementation promises: zeros_like would keep the strides of the inputs.
    d_q = q.new_zeros(scores.q.shape)
    d_k, d_v = (q.new_zeros(tensor.shape, dtype=wide) for tensor in (scores.k, values))
    d_bias = q.new_zeros(call.attn_bias.shape, dtype=wide) if wants_bias and call.attn_bias is not None else None
    buffer = other = q.new_empty(0)
    for block in scores.blocks(buffers=2):
        buffer, other = grow_buffer(block, buffer), grow_buffer(block, other)
        rows, keys = (block.flat, block.queries), (block.flat, block.keys)
        d_rows = d_out[rows]
        value, x = scores.evaluate(block, buffer, transposed=True)
        d_weights = product(values[keys], d_rows, other)
        d_scores, weights = scores.differentiate(block, d_weights, value, x)
        add_product(d_v[keys], weights, d_rows, factor)
        add_product(d_k[keys], d_scores, scores.q[rows], factor * power * scores.inner)
        add_product(d_q[rows], d_scores.mT, scores.k[keys], factor * power * scores.inner)
        if d_bias is not None:
            target = over_block(d_bias, block)
            cells = scores.cells(d_scores, block, transposed=True)
            target.add_(cells.to(wide).sum_to_size(target.shape), alpha=factor * power)
            del cells
        del value, x, d_weights, d_scores, weights  # so that the next block takes their memory, still in the cache
    d_bias = q.new_zeros(0) if d_bias is None or call.attn_bias is None else d_bias.to(call.attn_bias.dtype)
    # What is not finite in d_out times a weight of 0 is NaN, but padding has no gradient.
    d_k, d_v = (clear_padding(ungroup(d, kv, q.shape[1]), call.visibility) for d, kv in ((d_k, k), (d_v, v)))
    return d_q.view(q.shape), d_k, d_v, d_bias


@torch.library.register_fake("rectiformer::pointwise")
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


@torch.library.register_fake("rectiformer::pointwise_backward")
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, attn_bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    d_bias = q.new_empty(0) if attn_bias is None or not rest[-1] else attn_bias.new_empty(attn_bias.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_bias


# autograd calls the next functions with a context of its own, whose type torch does not publish.
def _differentiate(ctx, d_out):  # type: ignore[no-untyped-def]
    wants_bias = ctx.needs_input_grad[3]
    d_q, d_k, d_v, d_bias = pointwise_backward(d_out.contiguous(), *recall(ctx), wants_bias)
    return d_q, d_k, d_v, d_bias if wants_bias else None, *NO_GRADIENT


def _differentiate_twice(ctx, *cotangents):  # type: ignore[no-untyped-def]
    d_out, q, k, v, attn_bias, *rest, wants_bias = recall(ctx)
    leaves = [d_out, q, k, v, attn_bias, None]
    cotangents = cotangents if wants_bias else (*cotangents[:3], None)
    second = second_derivatives(lambda _: unflatten(q, k, [None, *rest]), leaves, cotangents)
    return *second[:5], *NO_GRADIENT, None


register_derivative(pointwise, _differentiate)
register_derivative(pointwise_backward, _differentiate_twice)
