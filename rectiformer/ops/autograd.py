"""Operators of torch: how attention's are defined and differentiated, once and twice.

Second derivatives come from the reference's own backward pass, a few query rows at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rectiformer.ops.call import AttentionCall, spans
from rectiformer.ops.reference import reference_attention

SCORE_BYTES = 1 << 22
"""Scores held at once."""

Describe = Callable[..., AttentionCall]


def second_derivatives(
    describe: Describe, inputs: Sequence[Tensor | None], cotangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of <first gradients, cotangents> for d_out, q, k, v, bias and numbers of heads, in this order.

    `describe` makes the call from the numbers of heads (factors of rows, shifts), its bias left out; `cotangents`
    belong to the gradients of q, k, v, bias and these numbers.
    """
    totals = [None if tensor is None else torch.zeros_like(tensor) for tensor in inputs]
    q, k = (tensor for tensor in inputs[1:3] if tensor is not None)
    step = max(1, SCORE_BYTES // max(1, 8 * q.shape[0] * q.shape[1] * k.shape[2]))
    for rows in spans(q.shape[2], step):
        _add_rows(totals, describe, inputs, cotangents, rows)
    return totals


def _add_rows(
    totals: Sequence[Tensor | None],
    describe: Describe,
    inputs: Sequence[Tensor | None],
    cotangents: Sequence[Tensor | None],
    rows: slice,
) -> None:
    """Add what some query rows contribute."""
    bias = inputs[4]
    by_row = [True, True, False, False, bias is not None and bias.shape[2] > 1, *[False] * len(inputs[5:])]

    def part(tensor: Tensor, sliced: bool) -> Tensor:
        return tensor[:, :, rows] if sliced else tensor

    with torch.enable_grad():
        leaves = [
            None if tensor is None else part(tensor, sliced).detach().requires_grad_()
            for tensor, sliced in zip(inputs, by_row, strict=True)
        ]
        bias, *of_heads = leaves[4:]
        d_out, q, k, v = (leaf for leaf in leaves[:4] if leaf is not None)
        call = replace(describe(*of_heads).slice_queries(rows.start, rows.stop), attn_bias=bias)
        out = reference_attention(q, k, v, call)
        wanted = [leaf for leaf in leaves[1:] if leaf is not None]
        first = iter(torch.autograd.grad(out, wanted, d_out, create_graph=True))
        inner = torch.zeros((), dtype=torch.promote_types(out.dtype, torch.float32), device=out.device)
        for leaf, side, sliced in zip(leaves[1:], cotangents, by_row[1:], strict=False):
            if leaf is not None and side is not None:
                inner = inner + (next(first) * part(side, sliced)).sum()
        held = [leaf for leaf in leaves if leaf is not None]
        second = iter(torch.autograd.grad(inner, held, allow_unused=True))
    for total, sliced in zip(totals, by_row, strict=True):
        grad = None if total is None else next(second)
        if total is not None and grad is not None:
            part(total, sliced).add_(grad)


LIBRARY = torch.library.Library("rectiformer", "FRAGMENT")
_DERIVATIVES: dict[str, type[torch.autograd.Function]] = {}


def operator(schema: str) -> Callable[[Callable[..., Any]], torch._ops.OpOverload]:
    """Decorator: the function as an operator of torch, `rectiformer::` and the name in the schema.

    `torch.library.custom_op` does the same, but fills in default arguments at every call in a time quadratic in the
    number of arguments: 0.1 ms for 19, where a kernel runs for 0.01. To torch.compile it is one opaque call; give it a
    `torch.library.register_fake`, and a `register_derivative` unless it has none.
    """
    name = schema.partition("(")[0]

    def define(run: Callable[..., Any]) -> torch._ops.OpOverload:
        LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
        overload: torch._ops.OpOverload = getattr(torch.ops.rectiformer, name).default
        about = enumerate(overload._schema.arguments)
        written = [index for index, info in about if info.alias_info is not None and info.alias_info.is_write]

        def run_differentiably(*inputs: Any) -> Any:
            for index in written:  # so that autograd notices where it has kept what is written to
                if not inputs[index].is_inference():
                    torch.autograd.graph.increment_version(inputs[index])
            if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
                return _DERIVATIVES[name].apply(*inputs)
            with torch._C._AutoDispatchBelowAutograd():
                return overload(*inputs)

        LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        LIBRARY.impl(name, run_differentiably, "Autograd")
        register_derivative(overload, None)
        return overload

    return define


def register_derivative(
    overload: torch._ops.OpOverload,
    differentiate: Callable[..., Any] | None,
    setup_context: Callable[..., None] | None = None,
) -> None:
    """Tell how to differentiate an operator: `differentiate(ctx, *gradients of its results)` gives those of all inputs.

    `setup_context(ctx, inputs, output)` keeps what that takes, all inputs unless given.
    """
    keep = setup_context or remember

    class Derivative(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                output = overload(*inputs)
            keep(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            if differentiate is None:
                raise NotImplementedError(f"{overload.name()} has no gradient")
            return differentiate(ctx, *gradients)

    _DERIVATIVES[overload.name().partition("::")[2].partition(".")[0]] = Derivative


# autograd calls the next functions with a context of its own, whose type torch does not publish.
def remember(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.is_tensor = [isinstance(value, Tensor) for value in inputs]
    ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))
    ctx.others = [value for value in inputs if not isinstance(value, Tensor)]


def recall(ctx) -> list:  # type: ignore[no-untyped-def]
    tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
    return [next(tensors if is_tensor else others) for is_tensor in ctx.is_tensor]
