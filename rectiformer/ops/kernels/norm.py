"""RMS norm over rows, with or without a gate, forward and backward; everything inside is float32.

A program holds whole rows [ROWS, BLOCK_E]. The backward pass runs a fixed number of programs that each walk over many
rows, keep their own sums for gain and gate, and leave them in memory for `column_sums`: no atomics, so reruns are
bitwise equal. Columns beyond E hold zeros and do not disturb a sum.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_vector(ptr, columns, E):
    return tl.load(ptr + columns, mask=columns < E, other=0.0).to(tl.float32)[None, :]


@triton.jit
def norm_forward(
    z_ptr, gain_ptr, gate_ptr, out_ptr, T, E, epsilon,
    GATED: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_E)
    cells = rows[:, None] * E + columns[None, :]
    inside = (rows[:, None] < T) & (columns[None, :] < E)
    z = tl.load(z_ptr + cells, mask=inside, other=0.0).to(tl.float32)
    out = z * tl.rsqrt(tl.sum(z * z, 1) / E + epsilon)[:, None] * load_vector(gain_ptr, columns, E)
    if GATED:
        out = out * tl.sigmoid(load_vector(gate_ptr, columns, E) * z)
    tl.store(out_ptr + cells, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward(
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
    for start in tl.range(program * ROWS, T, tl.num_programs(0) * ROWS, num_stages=4):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        cells = rows[:, None] * E + columns[None, :]
        inside = (rows[:, None] < T) & (columns[None, :] < E)
        z = tl.load(z_ptr + cells, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + cells, mask=inside, other=0.0).to(tl.float32)
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
        tl.store(dz_ptr + cells, d_z.to(dz_ptr.dtype.element_ty), mask=inside)
    own = partial_ptr + program * (2 if GATED else 1) * E + columns
    tl.store(own, tl.sum(d_gain, 0), mask=columns < E)
    if GATED:
        tl.store(own + E, tl.sum(d_gate, 0), mask=columns < E)


@triton.jit
def column_sums(values_ptr, out_ptr, height, width, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Sums of a float32 matrix [height, width] over its rows, some columns a program."""
    columns = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for start in tl.range(0, height, BLOCK_ROWS, num_stages=3):
        rows = start + tl.arange(0, BLOCK_ROWS)
        inside = (rows[:, None] < height) & (columns[None, :] < width)
        total += tl.load(values_ptr + rows[:, None] * width + columns[None, :], mask=inside, other=0.0)
    tl.store(out_ptr + columns, tl.sum(total, 0), mask=columns < width)
