"""A residual sum and its LayerNorm in one pass; everything inside is float32."""

from __future__ import annotations

import triton
import triton.language as tl

from rectiformer.ops.kernels.norm import load_vector


@triton.jit
def add_norm_forward(
    x_ptr, added_ptr, weight_ptr, bias_ptr, out_ptr, T, E, epsilon, ROWS: tl.constexpr, BLOCK_E: tl.constexpr
):  # fmt: skip
    """A program holds whole rows [ROWS, BLOCK_E]; columns beyond E hold zeros and do not disturb a sum."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_E)
    cells = rows[:, None] * E + columns[None, :]
    inside = (rows[:, None] < T) & (columns[None, :] < E)
    total = tl.load(x_ptr + cells, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(added_ptr + cells, mask=inside, other=0.0).to(tl.float32)
    centered = tl.where(inside, total - (tl.sum(total, 1) / E)[:, None], 0.0)
    out = centered * tl.rsqrt(tl.sum(centered * centered, 1) / E + epsilon)[:, None]
    out = out * load_vector(weight_ptr, columns, E) + load_vector(bias_ptr, columns, E)
    tl.store(out_ptr + cells, out.to(out_ptr.dtype.element_ty), mask=inside)
