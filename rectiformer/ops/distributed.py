"""Context parallelism: rectified attention over a sequence that is sharded across the ranks of torch.distributed.

Rectified partial results simply add: a row is its scale times the sum over ranks of [q k]+ ** power v, with no maximum
or normalizer to carry from rank to rank. So the queries travel, keys and values stay where they are, every rank adds
its part to every row, and a reduce-scatter leaves each rank its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rectiformer.errors import ArgumentError, ShapeError
from rectiformer.ops.activations import Value
from rectiformer.ops.attention import check_call, check_lengths, run
from rectiformer.ops.call import UNBOUNDED, AttentionCall, Visibility
from rectiformer.ops.reference import scale_rows, working_dtype
from rectiformer.ops.variants import VARIANTS, find_variant

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CALL_FACTS = ("B", "H", "K", "M", "N", "D", "Dv", "dtype", "variant", "causal", "scale", "gradients")
"""What the ranks of one call must have in common, or they would wait for each other or add what does not belong."""
MOST_AXES = 8
SHARD_FACTS = ("axes", "dim", *(f"axis {axis}" for axis in range(MOST_AXES)), "bytes per number", "gradients")
"""What ranks must have in common to put a sequence together."""
T = TypeVar("T")


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: str = "rela",
    *,
    group: dist.ProcessGroup | None = None,
    causal: bool = False,
    key_lengths: Tensor | Sequence[int] | None = None,
    scale: float | None = None,
    **options: Value,
) -> Tensor:
    """This rank's rows of `rectiformer.attention`, for rectified variants and sequences sharded across ranks.

    Every rank of `group` calls it with its shards, as `shard_sequence` cuts them: of W ranks, rank r holds chunks r and
    2W - 1 - r of 2W equal ones. Under causal order early keys are seen by many queries and late ones by few: a chunk
    from either end makes the work of all ranks equal. Where neither causal order nor key lengths tell positions apart,
    any other equal division gives the same. Shards of different shapes, or arguments that one rank refuses, are an
    error on every rank.

    Queries are gathered and partial outputs reduced, which docs/scaling.md compares with gathering keys and values.
    Autograd keeps the gathered queries for the backward pass. `torch.utils.checkpoint` around the layer gathers
    them again instead. There is no second derivative. Partial sums are not scaled by the number of keys before they
    are rounded to the dtype of q: over very many keys, prefer bfloat16 to float16.

    Args:
        q: [B, H, M / W, D], this rank's queries.
        k: [B, K, N / W, D] with K dividing H, its keys.
        v: [B, K, N / W, Dv], its values.
        variant: a rectified one of `rectiformer.VARIANTS`.
        group: the ranks that share the sequence; all of them unless given.
        causal: query m of the whole sequence sees keys up to m + (N - M).
        key_lengths: [B], how many leading keys of each whole sequence are real; the same on every rank.
        scale: factor of the scores, 1 / sqrt(D) unless given.
        options: the variant's own, the same on every rank. The gradient of a tensor among them is the part
            that this rank's queries contribute; the sum over ranks is the whole.
    """
    ranks = ContextGroup.of(group)
    arguments = {"causal": causal, "scale": scale, "options": options}
    call = ranks.agree(CALL_FACTS, lambda: check_shards(q, k, v, variant, key_lengths, ranks.size, **arguments))
    parts = local_parts(call.visibility, ranks)
    bare = replace(call, variant=replace(call.variant, row_scale=None), options={})
    firsts = [part.first_query for part in parts]
    queries: tuple[Tensor, ...] = AllGather.apply(q, ranks, 2, firsts)
    partials = [
        run(rows, k[:, :, part.keys], v[:, :, part.keys], replace(bare, visibility=part.visibility), "auto")
        for rows, part in zip(queries, parts, strict=True)
    ]
    mixed: Tensor = ReduceScatter.apply(ranks, 2, firsts, *partials)
    counts = None if call.variant.row_scale is None else own_shard(call.visibility.counts(q.device), ranks, 2)
    return scale_rows(mixed, call, counts).to(q.dtype)


def attention_to_shards(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: str = "rela",
    *,
    group: dist.ProcessGroup | None = None,
    key_lengths: Tensor,
    scale: float | None = None,
    **options: Value,
) -> Tensor:
    """Attention of queries [B, H, M, D] that every rank has to keys that the ranks share: all rows, on every rank.

    Each rank adds its keys' part, and one all-reduce of B H M Dv float32 numbers ends it. Shapes are not compared
    first: a decoder calls it at each step.

    Args:
        k, v: this rank's, as `shard_sequence` cuts them.
        key_lengths: [B], how many leading keys of each whole sequence are real; the same on every rank.
    """
    ranks = ContextGroup.of(group)
    call = check_call(q, k, v, require_rectified(variant), scale=scale, options=options, function=attention_to_shards)
    M, N = q.shape[2], k.shape[2]
    seen = Visibility(M, N, key_lengths=own_lengths(key_lengths, N * ranks.size, ranks), first=N - M)
    bare = replace(call, variant=replace(call.variant, row_scale=None), options={}, visibility=seen)
    mixed: Tensor = AllReduce.apply(run(q, k, v, bare, "auto").to(working_dtype(q.dtype)), ranks)
    return scale_rows(mixed, call, key_lengths[:, None, None]).to(q.dtype)


def require_rectified(variant: str) -> str:
    """The variant itself; ArgumentError where its partial results do not add up."""
    if not find_variant(variant).rectified:
        rectified = ", ".join(name for name, row in VARIANTS.items() if row.rectified)
        raise ArgumentError(
            f"variant {variant!r} is not rectified, and only rectified parts add up over ranks (softmax needs a "
            f"running maximum and sum); use one of {rectified}"
        )
    return variant


def check_shards(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: str,
    key_lengths: Tensor | Sequence[int] | None,
    ranks: int,
    **arguments: Any,
) -> tuple[AttentionCall, dict[str, float]]:
    """The call over the whole sequence that these shards are a part of, and what all ranks must agree on."""
    call = check_call(q, k, v, require_rectified(variant), function=context_parallel_attention, **arguments)
    for name, shard in (("q", q), ("k", k)):
        if shard.shape[2] == 0 or shard.shape[2] % 2:
            raise ShapeError(
                f"{name} has {shard.shape[2]} rows on this rank, but a shard is two equal chunks; pad the sequence "
                f"to a multiple of {2 * ranks} before shard_sequence"
            )
    (B, H, M, D), (_, K, N, Dv) = q.shape, v.shape
    lengths = None if key_lengths is None else check_lengths(key_lengths, B, N * ranks, q.device)
    seen = replace(call.visibility, queries=M * ranks, keys=N * ranks, key_lengths=lengths, first=(N - M) * ranks)
    gradients = torch.is_grad_enabled() * sum(bit for bit, tensor in ((1, q), (2, k), (4, v)) if tensor.requires_grad)
    shared = (DTYPES.index(q.dtype), list(VARIANTS).index(variant), seen.right == 0, call.scale, gradients)
    return replace(call, visibility=seen), dict(zip(CALL_FACTS, (B, H, K, M, N, D, Dv, *shared), strict=True))


@dataclass(frozen=True)
class Part:
    """Some of this rank's keys, and the queries of the whole sequence that see them: all from `first_query` on."""

    first_query: int
    keys: slice
    visibility: Visibility


def local_parts(seen: Visibility, ranks: ContextGroup) -> list[Part]:
    """This rank's work: all its keys at once where positions do not matter, else one part per chunk.

    The last query is aligned with the last key of the sequence, so with the last key of a chunk plus all keys after it:
    causal order within a part is a window to the right, and queries before the chunk are left out.
    """
    chunk = seen.keys // (2 * ranks.size)
    causal = seen.right == 0
    if not causal and seen.key_lengths is None:
        return [Part(0, slice(0, 2 * chunk), Visibility(seen.queries, 2 * chunk, first=2 * chunk - seen.queries))]
    parts = []
    for half, index in enumerate((ranks.rank, 2 * ranks.size - 1 - ranks.rank)):
        start, stop = index * chunk, (index + 1) * chunk
        first_query = max(0, start - seen.first) if causal else 0
        queries = seen.queries - first_query
        right = seen.keys - stop if causal else UNBOUNDED
        lengths = None if seen.key_lengths is None else (seen.key_lengths - start).clamp(0, chunk)
        visibility = Visibility(queries, chunk, UNBOUNDED, right, lengths, first=chunk - queries)
        parts.append(Part(first_query, slice(half * chunk, (half + 1) * chunk), visibility))
    return parts


def shard_sequence(x: Tensor, group: dist.ProcessGroup | None = None, dim: int = 2) -> Tensor:
    """This rank's shard of a sequence that every rank holds: of 2W equal chunks along `dim`, rank r gets r and 2W-1-r.

    A causal `rectiformer.context_parallel_attention` needs this order. The gradient reaches this rank's x only.
    """
    ranks = ContextGroup.of(group)
    dim = find_axis(x, dim)
    length = x.shape[dim]
    if length == 0 or length % (2 * ranks.size):
        raise ShapeError(
            f"axis {dim} is {length} long, which {ranks.size} ranks cannot share; pad it to a multiple of "
            f"{2 * ranks.size}"
        )
    return own_shard(x, ranks, dim)


def unshard_sequence(x: Tensor, group: dist.ProcessGroup | None = None, dim: int = 2) -> Tensor:
    """The whole sequence on every rank, from the shards that `shard_sequence` cut.

    Every rank of the group calls it. The gradient of a shard is the sum of what all ranks' results contribute.
    """
    ranks = ContextGroup.of(group)
    axis = ranks.agree(SHARD_FACTS, lambda: check_shard(x, dim))
    whole: tuple[Tensor, ...] = AllGather.apply(x, ranks, axis, [0])
    return whole[0]


def check_shard(x: Tensor, dim: int) -> tuple[int, dict[str, float]]:
    """The axis that is sharded, counted from the front, and what all ranks must agree on."""
    axis = find_axis(x, dim)
    if x.dim() > MOST_AXES:
        raise ShapeError(f"a shard has {x.dim()} axes, but {MOST_AXES} are the most")
    if x.shape[axis] == 0 or x.shape[axis] % 2:
        raise ShapeError(f"axis {axis} of this shard is {x.shape[axis]} long, but a shard is two equal chunks")
    sizes = {f"axis {index}": size for index, size in enumerate(x.shape)}
    gradients = torch.is_grad_enabled() and x.requires_grad
    return axis, {"axes": x.dim(), "dim": axis, **sizes, "bytes per number": x.element_size(), "gradients": gradients}


def find_axis(x: Tensor, dim: int) -> int:
    """The axis `dim`, counted from the front."""
    if not -x.dim() <= dim < x.dim():
        raise ShapeError(f"dim = {dim}, but the tensor is {list(x.shape)}")
    return dim % x.dim()


@dataclass(frozen=True)
class ContextGroup:
    """The processes that share a sequence, seen from one of them."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> ContextGroup:
        if not (dist.is_available() and dist.is_initialized()):
            raise ArgumentError(
                "no process group to share a sequence; call torch.distributed.init_process_group first, under torchrun"
            )
        rank = dist.get_rank(group)
        if rank < 0:
            raise ArgumentError(f"process {dist.get_rank()} is not in the group given; only its members may call")
        return cls(group, rank, dist.get_world_size(group))

    def all_gather(self, shard: Tensor) -> Tensor:
        """The shards of all ranks, stacked: [W, ...]."""
        shard = shard.contiguous()
        shards = shard.new_empty(self.size, *shard.shape)
        dist.all_gather(list(shards), shard, group=self.group)
        return shards

    def reduce_scatter(self, shards: Tensor) -> Tensor:
        """The sum over ranks of what each has for this rank, out of [W, ...]."""
        total = shards.new_empty(shards.shape[1:])
        dist.reduce_scatter(total, list(shards.contiguous()), group=self.group)
        return total

    def agree(self, names: Sequence[str], check: Callable[[], tuple[T, Mapping[str, float]]]) -> T:
        """What `check` returns, where it succeeds on every rank with the same facts; else an error on every rank.

        Without it, a rank that refuses its arguments would leave the others waiting for it.
        """
        failure: Exception | None = None
        facts: Mapping[str, float] = {}
        try:
            result, facts = check()
        except Exception as error:  # whatever it is, the others must hear of it
            failure = error
        own = torch.tensor([failure is None, *(facts.get(name, 0) for name in names)], dtype=torch.float64)
        # A group with a backend for the CPU compares there, and no GPU has to wait.
        on_host = "cpu" in dist.get_backend_config(self.group)
        rows = self.all_gather(own if on_host else own.cuda()).tolist()
        if failure is not None:
            raise failure
        for rank, (accepted, *theirs) in enumerate(rows):
            if not accepted:
                raise ArgumentError(f"rank {rank} refused its arguments, so no rank continues; its own error says why")
            for name, value, first in zip(names, theirs, rows[0][1:], strict=True):
                if value != first:
                    raise ShapeError(
                        f"rank {rank} has {name} = {value:.17g} but rank 0 has {first:.17g}; all ranks need shards and "
                        "arguments that are alike"
                    )
        return result


def own_shard(x: Tensor, ranks: ContextGroup, dim: int) -> Tensor:
    """This rank's two chunks of a whole sequence, one after the other."""
    chunks = x.chunk(2 * ranks.size, dim)
    return torch.cat([chunks[ranks.rank], chunks[-1 - ranks.rank]], dim)


def own_lengths(lengths: Tensor, keys: int, ranks: ContextGroup) -> Tensor:
    """How many of the first lengths[b] of `keys` keys are this rank's: they come first in its shard."""
    chunk = keys // (2 * ranks.size)
    starts = (ranks.rank * chunk, (2 * ranks.size - 1 - ranks.rank) * chunk)
    return sum(((lengths - start).clamp(0, chunk) for start in starts), torch.zeros_like(lengths))


def to_shards(x: Tensor, ranks: int, axis: int) -> Tensor:
    """The shards of all ranks out of a whole sequence: [W, ...]."""
    chunks = x.unflatten(axis, (2 * ranks, -1)).movedim(axis, 0)
    return torch.stack([chunks[:ranks], chunks[ranks:].flip(0)], axis + 1).flatten(axis + 1, axis + 2)


def from_shards(shards: Tensor, axis: int) -> Tensor:
    """The whole sequence out of the shards of all ranks: the inverse of `to_shards`."""
    early, late = shards.unflatten(axis + 1, (2, -1)).unbind(axis + 1)
    return torch.cat([early, late.flip(0)]).movedim(0, axis).flatten(axis, axis + 1)


def rows_from(whole: Tensor, axis: int, first: int) -> Tensor:
    return whole.narrow(axis, first, whole.shape[axis] - first)


# autograd calls the next methods with a context of its own, whose type torch does not publish.
class AllGather(torch.autograd.Function):
    """The whole sequence from this rank's shard, once for each of `firsts`, from there on; backward adds up."""

    @staticmethod
    def forward(ctx, shard, ranks, axis, firsts):  # type: ignore[no-untyped-def]
        ctx.ranks, ctx.axis, ctx.firsts, ctx.dtype = ranks, axis, firsts, shard.dtype
        whole = from_shards(ranks.all_gather(shard), axis)
        return tuple(rows_from(whole, axis, first) for first in firsts)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        d_shard = add_and_scatter(grads, ctx.ranks, ctx.axis, ctx.firsts)
        return d_shard.to(ctx.dtype), None, None, None


class ReduceScatter(torch.autograd.Function):
    """This rank's shard of the sum over all ranks of partial results, each of which starts at its own first row."""

    @staticmethod
    def forward(ctx, ranks, axis, firsts, *partials):  # type: ignore[no-untyped-def]
        ctx.ranks, ctx.axis, ctx.firsts, ctx.dtype = ranks, axis, firsts, partials[0].dtype
        return add_and_scatter(partials, ranks, axis, firsts)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):  # type: ignore[no-untyped-def]
        whole = from_shards(ctx.ranks.all_gather(d_out.to(ctx.dtype)), ctx.axis)
        return None, None, None, *(rows_from(whole, ctx.axis, first) for first in ctx.firsts)


class AllReduce(torch.autograd.Function):
    """The sum over ranks of partial results, on every rank, and so of the gradients that all ranks' use of it gives."""

    @staticmethod
    def forward(ctx, partial, ranks):  # type: ignore[no-untyped-def]
        ctx.ranks = ranks
        total = partial.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ranks.group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):  # type: ignore[no-untyped-def]
        return AllReduce.apply(d_out, ctx.ranks), None


def add_and_scatter(partials: Sequence[Tensor], ranks: ContextGroup, axis: int, firsts: Sequence[int]) -> Tensor:
    """Add what this rank has for the whole sequence, in float32 at least, then over ranks: this rank's shard of it."""
    shape = list(partials[0].shape)
    shape[axis] += firsts[0]
    total = partials[0].new_zeros(shape, dtype=working_dtype(partials[0].dtype))
    for partial, first in zip(partials, firsts, strict=True):
        rows_from(total, axis, first).add_(partial)
    return ranks.reduce_scatter(to_shards(total, ranks.size, axis))
