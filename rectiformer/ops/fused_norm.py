"""RMS norm of rows as operators of torch, `rectiformer::rms_norm` and its backward, beside the formula they stand for.

Triton only: one kernel forward, two backward. Autograd keeps the inputs and nothing else.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from rectiformer.ops.autograd import recall, remember

TRITON = find_spec("triton") is not None
WIDEST = 8192
"""Longest row that one program can hold."""
PROGRAMS = 1056
"""Programs of the backward pass, eight for each of an H200's 132 multiprocessors. A fixed number fixes the order of the
sums."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def plain_rms_norm(z: Tensor, gain: Tensor, gate: Tensor | None, epsilon: float) -> Tensor:
    """The definition. Inside, everything is float32 or wider."""
    wide = z.to(torch.promote_types(z.dtype, torch.float32))
    out = gain * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (out if gate is None else torch.sigmoid(gate * wide) * out).to(z.dtype)


def kernels_suit(z: Tensor, gain: Tensor, gate: Tensor | None) -> bool:
    """Whether the kernels can take this norm: on a CUDA device, no wider than float32 and `WIDEST`."""
    if not TRITON or z.device.type != "cuda" or not 0 < z.shape[-1] <= WIDEST:
        return False
    parts = [gain] if gate is None else [gain, gate]
    fit = all(part.device == z.device and part.shape == z.shape[-1:] for part in parts)
    return fit and all(tensor.dtype in DTYPES for tensor in (z, *parts))


@torch.library.custom_op("rectiformer::rms_norm", mutates_args=())
def fused_rms_norm(z: Tensor, gain: Tensor, gate: Tensor | None, epsilon: float) -> Tensor:
    """`plain_rms_norm` in one kernel, for `DTYPES` and rows of up to `WIDEST`."""
    from rectiformer.ops.kernels.norm import norm_forward

    z, width = z.contiguous(), z.shape[-1]
    count, blocks = z.numel() // width, block_shape(width)
    out = torch.empty_like(z)
    if count:
        with torch.cuda.device_of(z):  # Triton launches on the current device
            norm_forward[(-(-count // blocks["ROWS"]),)](
                z, *vectors(gain, gate), out, count, width, epsilon, GATED=gate is not None, **blocks
            )
    return out


@torch.library.custom_op("rectiformer::rms_norm_backward", mutates_args=())
def fused_rms_norm_backward(
    d_out: Tensor, z: Tensor, gain: Tensor, gate: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Gradients for z, and for gain and gate in float32: [1 or 2, width]."""
    from rectiformer.ops.kernels.norm import column_sums, norm_backward

    d_out, z, width = d_out.contiguous(), z.contiguous(), z.shape[-1]
    count, parts = z.numel() // width, 1 if gate is None else 2
    blocks = {**block_shape(width), "ROWS": 1, "num_warps": max(1, width // 512)}  # sums of a row that one warp holds
    programs = min(PROGRAMS, -(-count // blocks["ROWS"]))
    d_z = torch.empty_like(z)
    partial = z.new_empty(programs, parts, width, dtype=torch.float32)
    if not count:
        return d_z, partial.sum(0)
    d_vectors = torch.empty_like(partial[0])
    with torch.cuda.device_of(z):
        norm_backward[(programs,)](
            d_out, z, *vectors(gain, gate), d_z, partial, count, width, epsilon, GATED=gate is not None, **blocks
        )
        column_sums[(-(-parts * width // 16),)](
            partial, d_vectors, programs, parts * width, BLOCK_ROWS=128, BLOCK_COLUMNS=16
        )
    return d_z, d_vectors


def block_shape(width: int) -> dict[str, int]:
    """Rows a program holds at once: some 2,048 numbers, 16 for each of its threads."""
    row = 1 << (width - 1).bit_length()
    rows = max(1, 2048 // row)
    return {"ROWS": rows, "BLOCK_E": row, "num_warps": max(4, row // 512)}


def vectors(gain: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
    """Pointers for a kernel; without a gate the second one is never read."""
    gain = gain.contiguous()
    return gain, gain if gate is None else gate.contiguous()


@fused_rms_norm.register_fake
def _(z: Tensor, *_: object) -> Tensor:
    return z.new_empty(z.shape)


@fused_rms_norm_backward.register_fake
def _(d_out: Tensor, z: Tensor, gain: Tensor, gate: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape), z.new_empty(1 if gate is None else 2, z.shape[-1], dtype=torch.float32)


# autograd calls the next functions with a context of its own, whose type torch does not publish.
def _differentiate(ctx, d_out):  # type: ignore[no-untyped-def]
    z, gain, gate, epsilon = recall(ctx)
    d_z, d_vectors = fused_rms_norm_backward(d_out, z, gain, gate, epsilon)
    return d_z, d_vectors[0].to(gain.dtype), None if gate is None else d_vectors[1].to(gate.dtype), None


def _differentiate_twice(ctx, *cotangents):  # type: ignore[no-untyped-def]
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


fused_rms_norm.register_autograd(_differentiate, setup_context=remember)
fused_rms_norm_backward.register_autograd(_differentiate_twice, setup_context=remember)
