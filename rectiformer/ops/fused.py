"""Fused attention of short sequences as operators of torch: `rectiformer::short` and its backward.

One kernel each way, Triton only. Autograd keeps the inputs and nothing else. Results lie in memory as [B, M, H, D], so
that joining the heads afterwards moves nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from rectiformer.ops.activations import RowScale
from rectiformer.ops.operators import recall, remember
from rectiformer.ops.reference import Call, reference_attention
from rectiformer.ops.variants import VARIANTS
from rectiformer.ops.visibility import Visibility

TRITON = find_spec("triton") is not None
LARGEST = {torch.float32: 64, torch.bfloat16: 128, torch.float16: 128}
"""Most queries or keys, and largest head size: what one program can hold and, in float32, compile in seconds."""


def fused_attention(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """`reference_attention` for rectified rows and softmax of short sequences, as `LARGEST` says."""
    if call.scale < 0:  # a positive scale leaves the ReLU, a negative one must not
        q, call = -q, replace(call, scale=-call.scale)
    exponent, factor, factors = row_scale_parts(q, call)
    seen = call.visibility
    numbers = [call.scale, call.dropout, exponent, factor]
    sizes = [call.variant.power, seen.left, seen.right]
    return short(q, k, v, factors, seen.key_lengths, call.seed, numbers, sizes)


def row_scale_parts(q: Tensor, call: Call) -> tuple[float, float, Tensor | None]:
    """The row scale as exponent of the count, factor of all rows, and factors of the heads [H] if they have any."""
    row = call.variant.row_scale
    if row is None:
        return 0.0, 1.0, None
    exponent, factor = row.exponent(call.options), row.head_factor(call.options, torch.float32)
    if isinstance(factor, Tensor):
        return exponent, 1.0, factor.to(q.device).expand(q.shape[1]).contiguous()
    return exponent, float(factor), None


def fused_obstacle(q: Tensor, k: Tensor, v: Tensor, call: Call) -> str:
    """Why the fused kernels cannot take this call; empty when they can."""
    seen = call.visibility
    if not (call.variant.rectified or call.variant.name == "softmax"):
        return f"variant {call.variant.name!r} has no fused kernel"
    if q.device.type != "cuda" and not interpreting():
        return f"it runs on CUDA devices, and q is on {q.device}"
    if q.dtype not in LARGEST or not q.dtype == k.dtype == v.dtype:
        return f"it takes one of float32, bfloat16 and float16, and q is {q.dtype}, k {k.dtype}, v {v.dtype}"
    if max(seen.queries, seen.keys, q.shape[3], v.shape[3]) > LARGEST[q.dtype]:
        return f"in {q.dtype} it takes up to {LARGEST[q.dtype]} queries and keys, and head sizes up to that"
    if k.shape[1] != q.shape[1]:
        return "it has no grouped key heads"
    if call.bias is not None or seen.attn_mask is not None or call.origin != (0, 0):
        return "it has no bias, mask or packed sequences"
    if not (q.shape[0] and seen.queries and seen.keys):
        return "nothing is to be computed"
    return "" if TRITON else "Triton is not installed"


def interpreting() -> bool:
    """Whether Triton runs kernels in Python, on any device: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def heads_last(like: Tensor, size: int) -> Tensor:
    """Room for [B, H, length, size] in the memory order [B, length, H, size]."""
    B, H, length, _ = like.shape
    return like.new_empty(B, length, H, size).transpose(1, 2)


@torch.library.custom_op("rectiformer::short", mutates_args=())
def short(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factors: Tensor | None,
    key_lengths: Tensor | None,
    seed: Tensor | None,
    numbers: Sequence[float],
    sizes: Sequence[int],
) -> Tensor:
    """Sum over visible keys of factors[h] factor n^-exponent [scale q k]+ ** power v; power 0 is a softmax.

    numbers: scale, dropout, exponent, factor. sizes: power, left, right.
    """
    from rectiformer.ops.kernels.short import short_forward

    out = heads_last(q, v.shape[3])
    launch(short_forward, [q, k, v, out], [factors, key_lengths, seed], (q, k, v), numbers, sizes)
    return out


@torch.library.custom_op("rectiformer::short_backward", mutates_args=())
def short_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factors: Tensor | None,
    key_lengths: Tensor | None,
    seed: Tensor | None,
    numbers: Sequence[float],
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `short` for q, k, v and factors; the last is empty without factors."""
    from rectiformer.ops.kernels import short as kernels

    d_q, d_k, d_v = (heads_last(tensor, tensor.shape[3]) for tensor in (q, k, v))
    by_sequence = q.new_empty(q.shape[:2] if factors is not None else (0, 0), dtype=torch.float32)
    strided, flat = [d_out, q, k, v, d_q, d_k, d_v], [by_sequence, factors, key_lengths, seed]
    launch(kernels.short_backward, strided, flat, (q, k, v), numbers, sizes)
    return d_q, d_k, d_v, by_sequence.sum(0)


def launch(
    kernel: Any,
    strided: list[Tensor],
    flat: list[Tensor | None],
    qkv: tuple[Tensor, Tensor, Tensor],
    numbers: Sequence[float],
    sizes: Sequence[int],
) -> None:
    """Run one program a (sequence, head). `flat` ends with factors, key lengths and seed."""
    q, k, v = qkv
    (B, H, M, D), N, Dv = q.shape, k.shape[2], v.shape[3]
    (scale, dropout, exponent, factor), (power, left, right) = numbers, sizes
    # All that scales a rectified weight is one number. A softmax is taken in base 2.
    gain = (factor * scale**power if power else 1.0) / (1 - dropout)
    scale = scale * math.log2(math.e)
    strides = [stride for tensor in strided for stride in tensor.stride()]
    pointers = [q if tensor is None else tensor.contiguous() for tensor in flat]  # those of None are never read
    blocks = {"BLOCK_M": block(M), "BLOCK_N": block(N), "BLOCK_D": block(D), "BLOCK_DV": block(Dv)}
    with torch.cuda.device_of(q):  # Triton launches on the current device
        kernel[(B * H,)](
            *strided,
            *pointers,
            *strides,
            *[H, M, N, D, Dv, left, right, scale, gain, exponent, round(dropout * 2**32) - 2**31],
            POWER=power,
            ROW_SCALE={0.0: 0, 0.5: 1, 1.0: 2}.get(exponent, 3),
            PER_HEAD=flat[-3] is not None,
            BANDED=Visibility(M, N, left, right, first=N - M).banded,
            RAGGED=flat[-2] is not None,
            DROPS=flat[-1] is not None and dropout > 0,
            **blocks,
            num_warps={16: 1, 32: 1, 64: 4, 128: 8}[max(blocks["BLOCK_M"], blocks["BLOCK_N"])],
        )


def block(size: int) -> int:
    """The power of two that holds `size`, and at least the 16 that a matrix product needs."""
    return max(16, 1 << (size - 1).bit_length())


@short.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return heads_last(q, v.shape[3])


@short_backward.register_fake
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, factors: Tensor | None, *_: object) -> tuple[Tensor, ...]:
    d_factors = q.new_empty(0 if factors is None else q.shape[1], dtype=torch.float32)
    return *(heads_last(tensor, tensor.shape[3]) for tensor in (q, k, v)), d_factors


def _differentiate(ctx, d_out):  # type: ignore[no-untyped-def]
    inputs = recall(ctx)
    d_q, d_k, d_v, d_factors = short_backward(d_out, *inputs)
    return d_q, d_k, d_v, None if inputs[3] is None else d_factors, *[None] * 4


def _differentiate_twice(ctx, *cotangents):  # type: ignore[no-untyped-def]
    """Differentiate the reference's own backward pass; sequences are short, so its scores are affordable."""
    *tensors, key_lengths, seed, numbers, sizes = recall(ctx)
    with torch.enable_grad():
        d_out, *leaves = [tensor.detach().requires_grad_() for tensor in tensors if tensor is not None]
        q, k, v, *factors = leaves
        call = describe_call(q, k, factors[0] if factors else None, key_lengths, seed, numbers, sizes)
        out = reference_attention(q, k, v, call)
        first = torch.autograd.grad(out, leaves, d_out, create_graph=True)
        second = torch.autograd.grad(first, [d_out, *leaves], cotangents[: len(leaves)], allow_unused=True)
    return *second, *[None] * (9 - len(second))


def describe_call(
    q: Tensor,
    k: Tensor,
    factors: Tensor | None,
    key_lengths: Tensor | None,
    seed: Tensor | None,
    numbers: Sequence[float],
    sizes: Sequence[int],
) -> Call:
    """The call that the operators' flat arguments stand for."""
    (scale, dropout, exponent, factor), (power, left, right) = numbers, sizes
    row = RowScale(lambda options: exponent, lambda options: factor if factors is None else factor * factors)
    variant = replace(VARIANTS["rela"], power=power, row_scale=row) if power else VARIANTS["softmax"]
    M, N = q.shape[2], k.shape[2]
    visibility = Visibility(M, N, left, right, key_lengths, first=N - M)
    return Call(variant, visibility, {}, scale, dropout=dropout, seed=seed)


short.register_autograd(_differentiate, setup_context=remember)
short_backward.register_autograd(_differentiate_twice, setup_context=remember)
