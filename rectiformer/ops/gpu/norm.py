"""Norms of rows: `rectiformer::rms_norm` with or without a gate, its backward, and `rectiformer::add_norm`, a residual
sum with its LayerNorm, for inference.

A program holds whole rows [ROWS, BLOCK_E]; everything inside is float32. The backward pass runs a fixed number of
programs that each walk over many rows, keep their own sums for gain and gate, and leave them in memory for
`column_sums_kernel`: no atomics, so reruns are bitwise equal. Autograd keeps the inputs and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from rectiformer.ops.autograd import operator, recall, register_derivative
from rectiformer.ops.gpu.common import power_of_two
from rectiformer.ops.gpu.launch import Launch, launch_all
from rectiformer.ops.gpu.plans import Gradients, KernelPlan, open_plan, run_kernels
from rectiformer.ops.norm import plain_rms_norm

BACKWARD_PROGRAMS = 1056
"""Programs of the backward pass, eight for each of an H200's 132 multiprocessors. A fixed number fixes the order of the
sums."""


class NormPlan(KernelPlan):
    """One launch forward; backward one for rows, and one that sums up what they add to gain and gate."""

    fields: ClassVar = ("z", "gain", "gate")
    first_table = 0
    gradient_of: ClassVar = {"z": 0, "gain": 1, "gate": 2}

    def __init__(self, tensors: Sequence[Tensor | None], numbers: tuple[Any, ...]) -> None:
        super().__init__(tensors, numbers)
        self.launch: Launch | None = None
        self.gradients: list[Launch] = []

    def forward(self, held: Sequence[Tensor]) -> Tensor:
        z = held[0]
        out = torch.empty_like(z)
        tensors = [*held, out]
        if self.launch is None:
            width = z.shape[-1]
            count, blocks = z.numel() // width, block_config(width)
            flags, grid = {"GATED": "gate" in self.slots, **blocks}, (-(-count // blocks["ROWS"]),)
            slots = [*self.find(self.fields), len(held)]
            self.launch = Launch(rms_norm_kernel, grid, tensors, slots, (count, width, *self.numbers), flags)
        if z.numel():
            self.launch(tensors)
        return out

    def backward(self, d_out: Tensor, held: Sequence[Tensor]) -> Gradients:
        return split_vectors(*self.joint_backward(d_out, held), held[1:])

    def differentiable_backward(self, d_out: Tensor, held: Sequence[Tensor]) -> Gradients:
        d_z, d_vectors = self.backward_operator(d_out, *self.restore(held), *self.numbers)
        return split_vectors(d_z, d_vectors, held[1:])

    def joint_backward(self, d_out: Tensor, held: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Gradients for z, and for gain and gate in float32: [1 or 2, width]."""
        z, parts = held[0], len(held) - 1
        d_out, width = d_out.contiguous(), z.shape[-1]
        count = z.numel() // width
        programs = min(BACKWARD_PROGRAMS, count)  # one row at a time each
        d_z = torch.empty_like(z)
        partial = z.new_empty((programs, parts, width), dtype=torch.float32)
        if not count:
            return d_z, partial.sum(0)
        d_vectors = z.new_empty((parts, width), dtype=torch.float32)
        tensors = [*held, d_out, d_z, partial, d_vectors]
        if not self.gradients:
            self.gradients = self.prepare_backward(tensors, programs, parts * width)
        launch_all(self.gradients, tensors)
        return d_z, d_vectors

    def prepare_backward(self, tensors: list[Tensor], programs: int, columns: int) -> list[Launch]:
        z, first = tensors[0], len(self.slots)
        width, gated = z.shape[-1], "gate" in self.slots
        # sums of a row that one warp holds
        blocks = {**block_config(width), "ROWS": 1, "num_warps": max(1, width // 512), "GATED": gated}
        numbers = (z.numel() // width, width, *self.numbers)
        slots = [first, *self.find(self.fields), first + 1, first + 2]
        sums = {"BLOCK_ROWS": 128, "BLOCK_COLUMNS": 16}
        return [
            Launch(rms_norm_backward_kernel, (programs,), tensors, slots, numbers, blocks),
            Launch(
                column_sums_kernel, (-(-columns // 16),), tensors, [first + 2, first + 3], (programs, columns), sums
            ),
        ]


def split_vectors(d_z: Tensor, d_vectors: Tensor, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gradients for z and for the vectors, gain and perhaps gate, in their dtypes."""
    return d_z, *[grad.to(vector.dtype) for grad, vector in zip(d_vectors.unbind(), vectors, strict=True)]


@operator("rms_norm(Tensor z, Tensor gain, Tensor? gate, float epsilon) -> Tensor")
def fused_rms_norm(*inputs: Any) -> Tensor:
    """`plain_rms_norm` in one kernel, as `rms_norm_suits` says."""
    plan, held = open_plan(NormPlan, inputs)
    return plan.forward(held)


@operator("rms_norm_backward(Tensor d_out, Tensor z, Tensor gain, Tensor? gate, float epsilon) -> (Tensor, Tensor)")
def fused_rms_norm_backward(d_out: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    """Gradients for z, and for gain and gate in float32: [1 or 2, width]."""
    plan, held = open_plan(NormPlan, inputs)
    return plan.joint_backward(d_out, held)


NormPlan.operator, NormPlan.backward_operator = fused_rms_norm, fused_rms_norm_backward


def run_rms_norm(z: Tensor, gain: Tensor, gate: Tensor | None, epsilon: float) -> Tensor:
    """`fused_rms_norm`, in eager mode by a plan."""
    return run_kernels(NormPlan, (z, gain, gate, epsilon))


def block_config(width: int) -> dict[str, int]:
    """Rows a program holds at once: some 2,048 numbers, 16 for each of its threads."""
    row = power_of_two(width)
    rows = max(1, 2048 // row)
    return {"ROWS": rows, "BLOCK_E": row, "num_warps": max(4, row // 512)}


@torch.library.register_fake("rectiformer::rms_norm")
def _(z: Tensor, *_: object) -> Tensor:
    return z.new_empty(z.shape)


@torch.library.register_fake("rectiformer::rms_norm_backward")
def _(d_out: Tensor, z: Tensor, gain: Tensor, gate: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape), z.new_empty(1 if gate is None else 2, z.shape[-1], dtype=torch.float32)


# autograd calls the next functions with a context of its own, whose type torch does not publish.
def _differentiate(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    z, gain, gate, epsilon = recall(ctx)
    d_z, d_vectors = fused_rms_norm_backward(d_out, z, gain, gate, epsilon)
    d_z, d_gain, *d_gate = split_vectors(d_z, d_vectors, [gain] if gate is None else [gain, gate])
    return d_z, d_gain, d_gate[0] if d_gate else None, None


def _differentiate_twice(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
    """Differentiate the backward pass of the formula."""
    *tensors, epsilon = recall(ctx)
    with torch.enable_grad():
        d_out, *leaves = [tensor.detach().requires_grad_() for tensor in tensors if tensor is not None]
        z, gain, *gate = leaves
        out = plain_rms_norm(z, gain, gate[0] if gate else None, epsilon)
        first = torch.autograd.grad(out, leaves, d_out, create_graph=True)
        d_vectors = torch.stack([grad.float() for grad in first[1:]])
        second = torch.autograd.grad([first[0], d_vectors], [d_out, *leaves], cotangents, allow_unused=True)
    return *second, *[None] * (5 - len(second))


register_derivative(fused_rms_norm, _differentiate)
register_derivative(fused_rms_norm_backward, _differentiate_twice)


@operator("add_norm(Tensor x, Tensor added, Tensor weight, Tensor bias, float epsilon) -> Tensor")
def fused_add_norm(x: Tensor, added: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """`add_norm` in one kernel, as `add_norm_suits` says."""
    x, added, width = x.contiguous(), added.contiguous(), x.shape[-1]
    count, blocks = x.numel() // width, block_config(width)
    out = torch.empty_like(x)
    if count:
        with torch.cuda.device_of(x):
            add_norm_kernel[(-(-count // blocks["ROWS"]),)](
                x, added, weight.contiguous(), bias.contiguous(), out, count, width, epsilon, **blocks
            )
    return out


@torch.library.register_fake("rectiformer::add_norm")
def _(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


@triton.jit
def load_vector(ptr, columns, E):
    return tl.load(ptr + columns, mask=columns < E, other=0.0).to(tl.float32)[None, :]


@triton.jit
def rms_norm_kernel(
    z_ptr, gain_ptr, gate_ptr, out_ptr, T, E, epsilon,
    GATED: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_E)
    offsets = rows[:, None] * E + columns[None, :]
    inside = (rows[:, None] < T) & (columns[None, :] < E)  # beyond E are zeros, which do not disturb a sum
    z = tl.load(z_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    out = z * tl.rsqrt(tl.sum(z * z, 1) / E + epsilon)[:, None] * load_vector(gain_ptr, columns, E)
    if GATED:
        out = out * tl.sigmoid(load_vector(gate_ptr, columns, E) * z)
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_backward_kernel(
    g_ptr, z_ptr, gain_ptr, gate_ptr, dz_ptr, partial_ptr, T, E, epsilon,
    GATED: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Gradients of some rows, and what they add to those of gain and gate: partial is [programs, 1 or 2, E]."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK_E)
    gain = load_vector(gain_ptr, columns, E)
    gate = load_vector(gate_ptr, columns, E) if GATED else gain
    d_gain = tl.zeros([ROWS, BLOCK_E], tl.float32)
    d_gate = tl.zeros([ROWS, BLOCK_E], tl.float32)
    for start in tl.range(program * ROWS, T, tl.num_programs(0) * ROWS, num_stages=4):  # rows on their way
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        offsets = rows[:, None] * E + columns[None, :]
        inside = (rows[:, None] < T) & (columns[None, :] < E)
        z = tl.load(z_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        root = tl.rsqrt(tl.sum(z * z, 1) / E + epsilon)[:, None]
        unit = z * root
        passed = g * gain
        d_gated = g * unit
        if GATED:
            opened = tl.sigmoid(gate * z)
            d_argument = passed * unit * opened * (1.0 - opened)
            d_gate += d_argument * z
            passed = passed * opened
            d_gated = d_gated * opened
        d_gain += d_gated
        d_z = root * (passed - unit * (tl.sum(passed * unit, 1) / E)[:, None])
        if GATED:
            d_z += d_argument * gate
        tl.store(dz_ptr + offsets, d_z.to(dz_ptr.dtype.element_ty), mask=inside)
    own = partial_ptr + program * (2 if GATED else 1) * E + columns
    tl.store(own, tl.sum(d_gain, 0), mask=columns < E)
    if GATED:
        tl.store(own + E, tl.sum(d_gate, 0), mask=columns < E)


@triton.jit
def column_sums_kernel(values_ptr, out_ptr, height, width, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Sums of a float32 matrix [height, width] over its rows, some columns a program."""
    columns = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for start in tl.range(0, height, BLOCK_ROWS, num_stages=3):
        rows = start + tl.arange(0, BLOCK_ROWS)
        inside = (rows[:, None] < height) & (columns[None, :] < width)
        total += tl.load(values_ptr + rows[:, None] * width + columns[None, :], mask=inside, other=0.0)
    tl.store(out_ptr + columns, tl.sum(total, 0), mask=columns < width)


@triton.jit
def add_norm_kernel(
    x_ptr, added_ptr, weight_ptr, bias_ptr, out_ptr, T, E, epsilon, ROWS: tl.constexpr, BLOCK_E: tl.constexpr
):  # fmt: skip
    """The mean is subtracted, so columns beyond E are set to zero again before their squares are summed."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_E)
    offsets = rows[:, None] * E + columns[None, :]
    inside = (rows[:, None] < T) & (columns[None, :] < E)
    total = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(added_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    centered = tl.where(inside, total - (tl.sum(total, 1) / E)[:, None], 0.0)
    out = centered * tl.rsqrt(tl.sum(centered * centered, 1) / E + epsilon)[:, None]
    out = out * load_vector(weight_ptr, columns, E) + load_vector(bias_ptr, columns, E)
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=inside)
