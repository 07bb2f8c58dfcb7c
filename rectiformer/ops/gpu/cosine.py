"""Cosine scores in front of the long kernels: queries and keys divided by their root mean square, row by row.

`unit_rms` in ops/activations.py is the definition. A `CosinePlan` runs it by one kernel for queries and keys, and what
it gives exists only while a call runs: the backward pass makes it again from the inputs that autograd keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from rectiformer.ops.activations import unit_rms
from rectiformer.ops.gpu.common import AttentionPlan, block_size, empty_heads_last
from rectiformer.ops.gpu.launch import Launch
from rectiformer.ops.gpu.plans import Gradients, PlanCache
from rectiformer.ops.gpu.pointwise import unit_rows, unit_rows_gradient

TILE = 4096
"""Numbers that a program holds."""


class CosinePlan(AttentionPlan):
    """An `AttentionPlan` whose queries and keys are brought to a root mean square of 1 first."""

    gradient_of: ClassVar = {}  # the inner plan's

    def __init__(self, inner: AttentionPlan, tensors: Sequence[Tensor | None]) -> None:
        super().__init__(tensors, inner.numbers)
        self.inner, self.results = inner, inner.results
        self.launches: PlanCache[Launch] = PlanCache()

    def forward(self, held: Sequence[Tensor]) -> Tensor:
        return self.inner.forward(self.unit(held))

    def backward(self, d_out: Tensor, held: Sequence[Tensor]) -> Gradients:
        d_q, d_k, *others = self.inner.backward(d_out, self.unit(held))
        assert d_q is not None
        assert d_k is not None
        q, k = held[:2]
        tensors = [d_q, q, empty_heads_last(q, q.shape[3]), d_k, k, empty_heads_last(k, k.shape[3])]
        launch = self.launches.get("backward") or self.launches.keep("backward", prepare(unit_backward_kernel, tensors))
        launch(tensors)
        return tensors[2], tensors[5], *others

    def differentiable_backward(self, d_out: Tensor, held: Sequence[Tensor]) -> Gradients:
        """The same by operators of torch, whose gradients are known."""
        with torch.enable_grad():
            q, k, *rest = held
            out = self.inner.operator(*self.restore([unit_rms(q), unit_rms(k), *rest]), *self.numbers)
            wanted = [(result, x) for result, x in zip(self.results, held, strict=True) if x.requires_grad]
            grads = torch.autograd.grad(out, [x for _, x in wanted], d_out, create_graph=True, allow_unused=True)
        found: list[Tensor | None] = [None] * (1 + max(self.inner.gradient_of.values()))
        for (result, _), grad in zip(wanted, grads, strict=True):
            if result is not None:
                found[result] = grad
        return tuple(found)

    def unit(self, held: Sequence[Tensor]) -> list[Tensor]:
        """`held` with queries and keys of a root mean square of 1."""
        q, k, *rest = held
        tensors = [q, empty_heads_last(q, q.shape[3]), k, empty_heads_last(k, k.shape[3])]
        launch = self.launches.get("forward") or self.launches.keep("forward", prepare(unit_kernel, tensors))
        launch(tensors)
        return [tensors[1], tensors[3], *rest]


def prepare(kernel: Any, tensors: list[Tensor]) -> Launch:
    """One launch for queries and keys, whose tensors are the first and the second half: one program per tile of rows of
    a head."""
    q, k = tensors[0], tensors[-1]
    (B, H, M, D), (_, K, N, _) = q.shape, k.shape
    flags = {"BLOCK_N": max(1, TILE // block_size(D)), "BLOCK_D": block_size(D)}
    strides = [tensor.stride() for tensor in tensors]
    grid = (-(-max(M, N) // flags["BLOCK_N"]), B * (H + K))
    return Launch(kernel, grid, tensors, range(len(tensors)), (*strides, B, H, K, M, N, D), flags)


@triton.jit
def row_offsets(strides, b, h, N, D, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Where this program's rows of a head lie, and which of them there are."""
    stride_batch, stride_head, stride_row, stride_column = strides
    n, d = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    first = b.to(tl.int64) * stride_batch + h.to(tl.int64) * stride_head  # 64 bits wide
    offsets = first + n.to(tl.int64)[:, None] * stride_row + d[None, :] * stride_column
    return offsets, (n < N)[:, None] & (d < D)[None, :]


@triton.jit
def unit_head(
    x_ptr, unit_ptr, x_strides, unit_strides, b, h, N, D, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    offsets, inside = row_offsets(x_strides, b, h, N, D, BLOCK_N, BLOCK_D)
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0)
    offsets, inside = row_offsets(unit_strides, b, h, N, D, BLOCK_N, BLOCK_D)
    tl.store(unit_ptr + offsets, unit_rows(x, D), mask=inside)


@triton.jit
def unit_kernel(
    q_ptr, q_unit_ptr, k_ptr, k_unit_ptr, q_strides, q_unit_strides, k_strides, k_unit_strides,
    B, H, K, M, N, D, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The heads of the queries, and after them those of the keys."""
    head = tl.program_id(1)
    if head < B * H:
        unit_head(q_ptr, q_unit_ptr, q_strides, q_unit_strides, head // H, head % H, M, D, BLOCK_N, BLOCK_D)
    else:
        head -= B * H
        unit_head(k_ptr, k_unit_ptr, k_strides, k_unit_strides, head // K, head % K, N, D, BLOCK_N, BLOCK_D)


@triton.jit
def unit_head_gradient(
    g_ptr, x_ptr, dx_ptr, g_strides, x_strides, dx_strides, b, h, N, D, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    offsets, inside = row_offsets(x_strides, b, h, N, D, BLOCK_N, BLOCK_D)
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0)
    offsets, inside = row_offsets(g_strides, b, h, N, D, BLOCK_N, BLOCK_D)
    g = tl.load(g_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    offsets, inside = row_offsets(dx_strides, b, h, N, D, BLOCK_N, BLOCK_D)
    tl.store(dx_ptr + offsets, unit_rows_gradient(g, x, D).to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def unit_backward_kernel(
    gq_ptr, q_ptr, dq_ptr, gk_ptr, k_ptr, dk_ptr, gq_strides, q_strides, dq_strides, gk_strides, k_strides, dk_strides,
    B, H, K, M, N, D, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    if head < B * H:
        b, h = head // H, head % H
        unit_head_gradient(
            gq_ptr, q_ptr, dq_ptr, gq_strides, q_strides, dq_strides, b, h, M, D, BLOCK_N, BLOCK_D
        )  # fmt: skip
    else:
        b, h = (head - B * H) // K, (head - B * H) % K
        unit_head_gradient(
            gk_ptr, k_ptr, dk_ptr, gk_strides, k_strides, dk_strides, b, h, N, D, BLOCK_N, BLOCK_D
        )  # fmt: skip
