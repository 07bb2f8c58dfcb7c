"""Attention of short sequences with the ReLA norms begun in its epilogue: `rectiformer::short_gated` and its backward.

The norm [sigmoid(gate z)] gain z / sqrt(mean(z^2) + epsilon) spans all heads, which no kernel holds at once. But its
root is one number a row, and a row's factor may as well follow the output projection:

    W (x / root) = (W x) / root, with x = [sigmoid(gate z)] gain z

So the kernel gives x, and for each head the sum of squares of z. What is left to do is a factor for whole rows, which
`torch.compile` merges into whatever comes next. Autograd keeps the inputs and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rectiformer.ops.launching import DTYPES, block, heads_last
from rectiformer.ops.operators import recall, remember
from rectiformer.ops.reference import Call
from rectiformer.ops.short import (
    INPUTS,
    Problem,
    flat_arguments,
    plain_attention,
    rows_for_gradients,
    short_obstacle,
)


def gated_attention(
    q: Tensor, k: Tensor, v: Tensor, gain: Tensor, gate: Tensor | None, call: Call
) -> tuple[Tensor, Tensor]:
    """x = [sigmoid(gate z)] gain z as [B, H, M, Dv] in the dtype of q, and sums of z^2 in float32 as [B, H, M].

    z is what `attention` gives; gain and gate are [H * Dv].
    """
    q, factors, numbers, sizes = flat_arguments(q, call)
    tables = (factors, call.visibility.key_lengths, call.seed, None, None)  # it takes no packed sequences
    return short_gated(gain, gate, q, k, v, *tables, numbers, sizes)


def gated_obstacle(q: Tensor, k: Tensor, v: Tensor, gain: Tensor, gate: Tensor | None, call: Call) -> str:
    """Why these kernels cannot take this call; empty when they can."""
    for vector in [gain] if gate is None else [gain, gate]:
        if vector.shape != (q.shape[1] * v.shape[3],) or vector.dtype not in DTYPES or vector.device != q.device:
            return f"it takes a gain and gate [H * Dv] beside q, and one is {list(vector.shape)} of {vector.dtype}"
    return short_obstacle(q, k, v, call)


@torch.library.custom_op(
    "rectiformer::short_gated", mutates_args=(), schema=f"(Tensor gain, Tensor? gate, {INPUTS}) -> (Tensor, Tensor)"
)
def short_gated(gain: Tensor, gate: Tensor | None, *inputs: Any) -> tuple[Tensor, Tensor]:
    """`short` with its result z gated, and the sums of squares of z."""
    from rectiformer.ops.kernels.short import short_forward

    problem, (q, k, v) = Problem(*inputs), inputs[:3]
    x, squares = heads_last(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)
    flat = [gain, gate, squares, None, None]
    for room in problem.rooms():
        room |= {"NORM": norm(gate), **problem.tune(room, backward=False)}
        problem.launch(short_forward, q.shape[0] * q.shape[1], [q, k, v, x], flat, room)
    return x, squares


@torch.library.custom_op(
    "rectiformer::short_gated_backward",
    mutates_args=(),
    schema=f"(Tensor d_x, Tensor d_squares, Tensor gain, Tensor? gate, {INPUTS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def short_gated_backward(
    d_x: Tensor, d_squares: Tensor, gain: Tensor, gate: Tensor | None, *inputs: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `short_gated`: those of gain and gate as [1 or 2, H * Dv], then for q, k, v and factors.

    The first and the last are in float32, the last is empty without factors. Sums over the batch are made in a fixed
    order.
    """
    from rectiformer.ops.kernels.gated import gated_backward
    from rectiformer.ops.kernels.norm import column_sums

    problem, (q, k, v) = Problem(*inputs), inputs[:3]
    d_q, d_k, d_v = (heads_last(tensor, tensor.shape[3]) for tensor in (q, k, v))
    vectors = gain.new_empty(norm(gate), gain.numel(), dtype=torch.float32)
    by_batch = vectors.new_empty(q.shape[0], *vectors.shape)
    by_sequence = vectors.new_empty(q.shape[:2] if problem.factors is not None else (0, 0))
    strided, flat = [d_x, q, k, v, d_q, d_k, d_v, d_squares], [gain, gate, by_batch, by_sequence]
    rows, keys = block(q.shape[2]), block(k.shape[2])
    room = {"BLOCK_M": rows_for_gradients(rows, keys), "BLOCK_N": keys, "NORM": norm(gate)}
    room["num_warps"] = problem.warps(max(room["BLOCK_M"], room["BLOCK_N"]), heavy=True)
    problem.launch(gated_backward, q.shape[0] * k.shape[1], strided, flat, room)
    width = vectors.numel()
    with torch.cuda.device_of(q):
        column_sums[(-(-width // 16),)](by_batch, vectors, len(by_batch), width, BLOCK_ROWS=128, BLOCK_COLUMNS=16)
    return vectors, d_q, d_k, d_v, by_sequence.sum(0)


def norm(gate: Tensor | None) -> int:
    """How the kernels tell a gain alone from a gain and a gate."""
    return 1 if gate is None else 2


@short_gated.register_fake
def _(gain: Tensor, gate: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return heads_last(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@short_gated_backward.register_fake
def _(d_x: Tensor, d_squares: Tensor, gain: Tensor, gate: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
    q, k, v, factors, *_ = inputs
    d_vectors = gain.new_empty(norm(gate), gain.numel(), dtype=torch.float32)
    d_factors = d_vectors.new_empty(0 if factors is None else q.shape[1])
    return d_vectors, *(heads_last(tensor, tensor.shape[3]) for tensor in (q, k, v)), d_factors


def plain_gated(gain: Tensor, gate: Tensor | None, *inputs: Any) -> tuple[Tensor, Tensor]:
    """What `short_gated` computes, by the reference."""
    mixed = plain_attention(*inputs)
    z = mixed.to(torch.promote_types(mixed.dtype, torch.float32))
    by_head = (z.shape[1], 1, z.shape[3])
    x = gain.view(by_head) * z
    x = x if gate is None else torch.sigmoid(gate.view(by_head) * z) * x
    return x.to(mixed.dtype), z.square().sum(-1)


def _differentiate(ctx, d_x, d_squares):  # type: ignore[no-untyped-def]
    inputs = recall(ctx)
    gain, gate, *_ = inputs
    d_vectors, *d_qkv, d_factors = short_gated_backward(d_x, d_squares, *inputs)
    d_gate = None if gate is None else d_vectors[1].to(gate.dtype)
    return d_vectors[0].to(gain.dtype), d_gate, *d_qkv, None if inputs[5] is None else d_factors, *[None] * 6


def _differentiate_twice(ctx, *cotangents):  # type: ignore[no-untyped-def]
    """Differentiate the reference's own backward pass; sequences are short, so its scores are affordable."""
    tensors = recall(ctx)
    with torch.enable_grad():
        tensors[:8] = [None if x is None else x.detach().requires_grad_() for x in tensors[:8]]
        upstream, leaves = tensors[:2], [leaf for leaf in tensors[2:8] if leaf is not None]
        first = list(torch.autograd.grad(plain_gated(*tensors[2:]), leaves, upstream, create_graph=True))
        vectors = slice(norm(tensors[3]))
        first[vectors] = [torch.stack([grad.float() for grad in first[vectors]])]
        held = [tensor for tensor in tensors[:8] if tensor is not None]
        second = iter(torch.autograd.grad(first, held, cotangents[: len(first)], allow_unused=True))
    return *(None if tensor is None else next(second) for tensor in tensors[:8]), *[None] * 6


short_gated.register_autograd(_differentiate, setup_context=remember)
short_gated_backward.register_autograd(_differentiate_twice, setup_context=remember)
