"""A sequence shared by the ranks of torch.distributed: who holds what, gathered and summed with gradients.

Of W ranks, rank r holds chunks r and 2W - 1 - r of 2W equal ones. Under causal order early keys are seen by many
queries and late ones by few; a chunk from either end makes the work of all ranks equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rectiformer.errors import ArgumentError, ShapeError
from rectiformer.ops.reference import working_dtype

T = TypeVar("T")
MOST_AXES = 8
SHARD_FACTS = ("axes", "dim", *(f"axis {axis}" for axis in range(MOST_AXES)), "bytes a number", "gradients")
"""What ranks must have in common to put a sequence together."""


def shard_sequence(x: Tensor, group: dist.ProcessGroup | None = None, dim: int = 2) -> Tensor:
    """This rank's shard of a sequence that every rank holds: of 2W equal chunks along `dim`, rank r gets r and 2W-1-r.

    A causal `rectiformer.context_parallel_attention` needs this order. The gradient reaches this rank's x only.
    """
    ranks = Ranks.of(group)
    dim = find_axis(x, dim)
    length = x.shape[dim]
    if length == 0 or length % (2 * ranks.size):
        raise ShapeError(
            f"axis {dim} is {length} long, which {ranks.size} ranks cannot share; pad it to a multiple of "
            f"{2 * ranks.size}"
        )
    return own_shard(x, ranks, dim)


def unshard_sequence(x: Tensor, group: dist.ProcessGroup | None = None, dim: int = 2) -> Tensor:
    """The whole sequence on every rank, from the shards that `shard_sequence` dealt.

    Every rank of the group calls it. The gradient of a shard is the sum of what all ranks' results contribute.
    """
    ranks = Ranks.of(group)
    axis = ranks.agree(SHARD_FACTS, lambda: check_shard(x, dim))
    whole: tuple[Tensor, ...] = Gather.apply(x, ranks, axis, [0])
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
    return axis, {"axes": x.dim(), "dim": axis, **sizes, "bytes a number": x.element_size(), "gradients": gradients}


def find_axis(x: Tensor, dim: int) -> int:
    """The axis `dim`, counted from the front."""
    if not -x.dim() <= dim < x.dim():
        raise ShapeError(f"dim = {dim}, but the tensor is {list(x.shape)}")
    return dim % x.dim()


@dataclass(frozen=True)
class Ranks:
    """The processes that share a sequence, seen from one of them."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Ranks:
        if not (dist.is_available() and dist.is_initialized()):
            raise ArgumentError(
                "no process group to share a sequence; call torch.distributed.init_process_group first, under torchrun"
            )
        rank = dist.get_rank(group)
        if rank < 0:
            raise ArgumentError(f"process {dist.get_rank()} is not in the group given; only its members may call")
        return cls(group, rank, dist.get_world_size(group))

    def gather(self, shard: Tensor) -> Tensor:
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

    def add(self, partial: Tensor) -> Tensor:
        """The sum over ranks of what each has."""
        total = partial.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
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
        rows = self.gather(own if on_host else own.cuda()).tolist()
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


def own_shard(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """This rank's two chunks of a whole sequence, one after the other."""
    chunks = x.chunk(2 * ranks.size, dim)
    return torch.cat([chunks[ranks.rank], chunks[-1 - ranks.rank]], dim)


def own_lengths(lengths: Tensor, keys: int, ranks: Ranks) -> Tensor:
    """How many of the first lengths[b] of `keys` keys are this rank's: they come first in its shard."""
    chunk = keys // (2 * ranks.size)
    starts = (ranks.rank * chunk, (2 * ranks.size - 1 - ranks.rank) * chunk)
    return sum(((lengths - start).clamp(0, chunk) for start in starts), torch.zeros_like(lengths))


def deal(x: Tensor, ranks: int, axis: int) -> Tensor:
    """The shards of all ranks out of a whole sequence: [W, ...]."""
    chunks = x.unflatten(axis, (2 * ranks, -1)).movedim(axis, 0)
    return torch.stack([chunks[:ranks], chunks[ranks:].flip(0)], axis + 1).flatten(axis + 1, axis + 2)


def join(shards: Tensor, axis: int) -> Tensor:
    """The whole sequence out of the shards of all ranks: what `deal` undoes."""
    early, late = shards.unflatten(axis + 1, (2, -1)).unbind(axis + 1)
    return torch.cat([early, late.flip(0)]).movedim(0, axis).flatten(axis, axis + 1)


def rows_from(whole: Tensor, axis: int, first: int) -> Tensor:
    return whole.narrow(axis, first, whole.shape[axis] - first)


# autograd calls the next methods with a context of its own, whose type torch does not publish.
class Gather(torch.autograd.Function):
    """The whole sequence from this rank's shard, once for each of `firsts`, from there on; backward adds up."""

    @staticmethod
    def forward(ctx, shard, ranks, axis, firsts):  # type: ignore[no-untyped-def]
        ctx.ranks, ctx.axis, ctx.firsts, ctx.dtype = ranks, axis, firsts, shard.dtype
        whole = join(ranks.gather(shard), axis)
        return tuple(rows_from(whole, axis, first) for first in firsts)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        d_shard = add_and_scatter(grads, ctx.ranks, ctx.axis, ctx.firsts)
        return d_shard.to(ctx.dtype), None, None, None


class SumOverRanks(torch.autograd.Function):
    """This rank's shard of the sum over all ranks of partial results, each of which starts at its own first row."""

    @staticmethod
    def forward(ctx, ranks, axis, firsts, *partials):  # type: ignore[no-untyped-def]
        ctx.ranks, ctx.axis, ctx.firsts, ctx.dtype = ranks, axis, firsts, partials[0].dtype
        return add_and_scatter(partials, ranks, axis, firsts)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):  # type: ignore[no-untyped-def]
        whole = join(ctx.ranks.gather(d_out.to(ctx.dtype)), ctx.axis)
        return None, None, None, *(rows_from(whole, ctx.axis, first) for first in ctx.firsts)


class AddOverRanks(torch.autograd.Function):
    """The sum over ranks of partial results, on every rank, and so of the gradients that all ranks' use of it gives."""

    @staticmethod
    def forward(ctx, partial, ranks):  # type: ignore[no-untyped-def]
        ctx.ranks = ranks
        return ranks.add(partial)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):  # type: ignore[no-untyped-def]
        return ctx.ranks.add(d_out), None


def add_and_scatter(partials: Sequence[Tensor], ranks: Ranks, axis: int, firsts: Sequence[int]) -> Tensor:
    """Add what this rank has for the whole sequence, in float32 at least, then over ranks: this rank's shard of it."""
    shape = list(partials[0].shape)
    shape[axis] += firsts[0]
    total = partials[0].new_zeros(shape, dtype=working_dtype(partials[0].dtype))
    for partial, first in zip(partials, firsts, strict=True):
        rows_from(total, axis, first).add_(partial)
    return ranks.reduce_scatter(deal(total, ranks.size, axis))
