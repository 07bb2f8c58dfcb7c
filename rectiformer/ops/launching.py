"""What every fused operator needs on the host: whether it can run, row scales as numbers, room for results."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from rectiformer.ops.call import AttentionCall

TRITON = find_spec("triton") is not None
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def kernel_obstacle(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str:
    """Why no fused kernel can take this call; empty when one may."""
    if not (call.variant.rectified or call.variant.name == "softmax"):
        return f"variant {call.variant.name!r} has no fused kernel"
    if q.device.type != "cuda" and not interpreting():
        return f"it runs on CUDA devices, and q is on {q.device}"
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        return f"it takes one of float32, bfloat16 and float16, and q is {q.dtype}, k {k.dtype}, v {v.dtype}"
    if not (q.shape[0] and call.visibility.queries and call.visibility.keys):
        return "nothing is to be computed"
    return "" if TRITON else "Triton is not installed"


def interpreting() -> bool:
    """Whether Triton runs kernels in Python, on any device: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def transforms_active() -> bool:
    """Whether torch.func transforms or forward-mode duals are around, which custom operators do not support."""
    if torch.compiler.is_compiling():
        return False
    return torch.autograd.forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def row_scale_parts(q: Tensor, call: AttentionCall) -> tuple[float, float, Tensor | None]:
    """The row scale as exponent of the count, factor of all rows, and factors of the heads [H] if they have any."""
    row = call.variant.row_scale
    if row is None:
        return 0.0, 1.0, None
    exponent, factor = row.exponent(call.options), row.head_factor(call.options, torch.float32)
    if isinstance(factor, Tensor):
        return exponent, 1.0, factor.to(q.device).expand(q.shape[1]).contiguous()
    return exponent, float(factor), None


def heads_last(like: Tensor, size: int) -> Tensor:
    """Room for [B, H, length, size] in the memory order [B, length, H, size]."""
    B, H, length, _ = like.shape
    return like.new_empty(B, length, H, size).transpose(1, 2)


def table(tensor: Tensor | None, unread: Tensor) -> Tensor:
    """What a kernel reads by address alone: the tensor without gaps; anything where there is none, and none is read."""
    return unread if tensor is None else tensor.contiguous()


def block(size: int) -> int:
    """The power of two that holds `size`, and at least the 16 that a matrix product needs."""
    return max(16, 1 << (size - 1).bit_length())
