"""How far results are off from float64, compared with eager torch in the same dtype: a part of them stands for all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from kernel_timing import Attend, both_work, forward_work
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from closeness import assert_no_worse

from rectiformer.ops.attention import check_call
from rectiformer.ops.call import AttentionCall
from rectiformer.ops.decode import follow
from rectiformer.ops.reference import reference_attention
from rectiformer.ops.variants import VARIANTS

NAMES = ("out", "d_q", "d_k", "d_v")


@dataclass(frozen=True)
class Errors:
    """Relative errors against float64, and what tests/closeness.py has to complain of: nothing where it is empty."""

    own: float
    eager: float
    complaint: str


def compare(results: list[Tensor], eager: list[Tensor], exact: list[Tensor]) -> Errors:
    """The worst of several results."""
    results, eager, exact = ([tensor.detach() for tensor in tensors] for tensors in (results, eager, exact))
    complaint = ""
    try:
        names = NAMES[1:] if len(results) == 3 else NAMES[: len(results)]
        for name, *three in zip(names, results, eager, exact, strict=True):
            assert_no_worse(name, *three)
    except AssertionError as error:
        complaint = str(error)
    return Errors(worst(results, exact), worst(eager, exact), complaint)


def worst(results: list[Tensor], exact: list[Tensor]) -> float:
    return max(((r.double() - e).norm() / e.norm()).item() for r, e in zip(results, exact, strict=True))


def describe_call(q: Tensor, k: Tensor, v: Tensor, variant: str, **arguments: Any) -> AttentionCall:
    """The checked call of `attention` with these arguments."""
    options = {name: arguments.pop(name) for name in VARIANTS[variant].options if name in arguments}
    return check_call(q, k, v, variant, options=options, **arguments)


def part_errors(
    attend: Attend, tensors: list[Tensor], direction: str, variant: str, heads: int = 2, rows: int = 2048, **arguments
) -> Errors:
    """Errors of the output, or of the gradients, of the last `rows` queries of the first heads of one sequence.

    Upstream gradients of all other queries are zero, so those of keys and values are complete too.
    """
    q, k, v, upstream = tensors
    first = max(0, q.shape[2] - rows)
    picked = torch.zeros_like(upstream)
    picked[:1, :heads, first:] = upstream.detach()[:1, :heads, first:]
    of_queries, of_keys = (slice(1), slice(heads), slice(first, None)), (slice(1), slice(heads))
    parts = [of_queries] if direction == "forward" else [of_queries, of_keys, of_keys]
    found = results(direction, attend, [q, k, v, picked])
    mine = [tensor[part] for tensor, part in zip(found, parts, strict=True)]
    own = {name: cut_argument(value, heads) for name, value in arguments.items()}
    call = describe_call(q[of_keys], k[of_keys], v[of_keys], variant, **own).slice_queries(first, q.shape[2])

    def reference(dtype: torch.dtype) -> Attend:
        return lambda q, k, v: reference_attention(q, k, v, call, precision=dtype)

    parts = [q[of_queries], k[of_keys], v[of_keys], picked[of_queries]]
    return compare(mine, *both_references(direction, reference, parts))


def packed_errors(
    attend: Attend, tensors: list[Tensor], bounds: tuple[Tensor, Tensor], causal: bool, sequences: int = 8
) -> Errors:
    """Errors of output and gradients of the first sequences of a packed batch."""
    starts, key_starts = (bound[: sequences + 1].tolist() for bound in bounds)
    M, N = starts[-1], key_starts[-1]
    found = results("forward+backward", attend, tensors)
    mine = [result[:end] for result, end in zip(found, (M, M, N, N), strict=True)]
    parts = [tensor[:end] for tensor, end in zip(tensors, (M, N, N, M), strict=True)]

    def reference(dtype: torch.dtype) -> Attend:
        def one(*own: Tensor) -> Tensor:
            q, k, v = (tensor.transpose(0, 1)[None] for tensor in own)
            call = describe_call(q, k, v, "rela", causal=causal)
            return reference_attention(q, k, v, call, precision=dtype)[0].transpose(0, 1)

        def all_of_them(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows = [slice(*pair) for pair in pairwise(starts)]
            keys = [slice(*pair) for pair in pairwise(key_starts)]
            return torch.cat([one(q[row], k[key], v[key]) for row, key in zip(rows, keys, strict=True)])

        return all_of_them

    return compare(mine, *both_references("forward+backward", reference, parts))


def results(direction: str, attend: Attend, tensors: list[Tensor]) -> list[Tensor]:
    """The output, its gradients, or all of them."""
    if direction == "forward":
        return [forward_work(attend, tensors)()]
    return both_work(attend, tensors)()[1 if direction == "backward" else 0 :]


def both_references(
    direction: str, reference: Callable[[torch.dtype], Attend], parts: list[Tensor]
) -> Iterator[list[Tensor]]:
    """Results in the dtype of the parts, then in float64."""
    for dtype in (parts[0].dtype, torch.float64):
        leaves = [part.detach().to(dtype).requires_grad_() for part in parts]
        yield results(direction, reference(dtype), leaves)


def cut_argument(value: object, heads: int) -> object:
    """What is left of an argument for one sequence and its first heads: lengths are whole numbers, gammas are not."""
    if not isinstance(value, Tensor):
        return value
    return value[:heads].detach() if value.is_floating_point() else value[:1]


def cached_errors(attend: Attend, q: Tensor, k: Tensor, v: Tensor, ancestors: Tensor | None, rows: int = 8) -> Errors:
    """Errors of the output of one decoding step, in its first rows."""
    with torch.no_grad():
        out = attend(q, k, v)[:rows]
        if ancestors is not None:
            k, v = (follow(held, ancestors[:rows]) for held in (k, v))
        parts = [tensor[:rows] for tensor in (q, k, v)]
        call = describe_call(*parts, "rela")
        eager, exact = (
            reference_attention(*(part.to(dtype) for part in parts), call, precision=dtype)
            for dtype in (q.dtype, torch.float64)
        )
    return compare([out], [eager], [exact])
