"""Cosine scores in front of the long kernels: queries and keys divided by their root mean square, row by row.

`unit_rms` in ops/activations.py is the definition. A `CosinePlan` runs it by one kernel each for queries and keys, and
what it gives exists only while a call runs: the backward pass makes it again from the inputs that autograd keeps.
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
        q, k, *rest = held
        return self.inner.forward([self.unit("q", q), self.unit("k", k), *rest])

    def backward(self, d_out: Tensor, held: Sequence[Tensor]) -> Gradients:
        q, k, *rest = held
        d_q, d_k, *others = self.inner.backward(d_out, [self.unit("q", q), self.unit("k", k), *rest])
        assert d_q is not None
        assert d_k is not None
        return self.unit_gradient("d_q", d_q, q), self.unit_gradient("d_k", d_k, k), *others

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

    def unit(self, name: str, x: Tensor) -> Tensor:
        tensors = [x, empty_heads_last(x, x.shape[3])]
        launch = self.launches.get(name) or self.launches.keep(name, prepare(unit_kernel, tensors))
        launch(tensors)
        return tensors[1]

    def unit_gradient(self, name: str, d_unit: Tensor, x: Tensor) -> Tensor:
        tensors = [d_unit, x, empty_heads_last(x, x.shape[3])]
        launch = self.launches.get(name) or self.launches.keep(name, prepare(unit_backward_kernel, tensors))
        launch(tensors)
        return tensors[2]


def prepare(kernel: Any, tensors: list[Tensor]) -> Launch:
    """One program per tile of rows of a head."""
    B, H, N, D = tensors[-1].shape
    flags = {"BLOCK_N": max(1, TILE // block_size(D)), "BLOCK_D": block_size(D)}
    strides = [tensor.stride() for tensor in tensors]
    return Launch(kernel, (-(-N // flags["BLOCK_N"]), B * H), tensors, range(len(tensors)), (*strides, H, N, D), flags)


@triton.jit
def row_pointers(ptr, strides, H, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Addresses of this program's rows; offsets of heads are 64 bits wide."""
    stride_batch, stride_head, stride_row, stride_column = strides
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    n, d = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    return ptr + b * stride_batch + h * stride_head + n[:, None] * stride_row + d[None, :] * stride_column


@triton.jit
def inside_rows(N, D, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    return (n < N)[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]


@triton.jit
def unit_kernel(
    x_ptr, unit_ptr, x_strides, unit_strides, H, N, D, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    inside = inside_rows(N, D, BLOCK_N, BLOCK_D)
    x = tl.load(row_pointers(x_ptr, x_strides, H, BLOCK_N, BLOCK_D), mask=inside, other=0.0)
    tl.store(row_pointers(unit_ptr, unit_strides, H, BLOCK_N, BLOCK_D), unit_rows(x, D), mask=inside)


@triton.jit
def unit_backward_kernel(
    g_ptr, x_ptr, dx_ptr, g_strides, x_strides, dx_strides, H, N, D, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    inside = inside_rows(N, D, BLOCK_N, BLOCK_D)
    x = tl.load(row_pointers(x_ptr, x_strides, H, BLOCK_N, BLOCK_D), mask=inside, other=0.0)
    g = tl.load(row_pointers(g_ptr, g_strides, H, BLOCK_N, BLOCK_D), mask=inside, other=0.0).to(tl.float32)
    d_x = unit_rows_gradient(g, x, D).to(dx_ptr.dtype.element_ty)
    tl.store(row_pointers(dx_ptr, dx_strides, H, BLOCK_N, BLOCK_D), d_x, mask=inside)
