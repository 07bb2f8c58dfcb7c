"""LayerNorm of a residual sum as one operator of torch, `rectiformer::add_norm`: for inference, Triton only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rectiformer.ops.fused_norm import DTYPES, WIDEST, block_shape
from rectiformer.ops.launching import TRITON, interpreting


def add_norm(x: Tensor, added: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """LayerNorm of x + added over the last axis, in the dtype of x; one kernel where no gradient is asked for."""
    if add_norm_suits(x, added, weight, bias):
        return fused_add_norm(x, added, weight, bias, epsilon)
    total = x + added.to(x.dtype)  # under autocast a sublayer may end with the sum of a float32 bias
    return F.layer_norm(total, weight.shape, weight, bias, epsilon).to(x.dtype)


def add_norm_suits(x: Tensor, added: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Whether the kernel can take this sum; torch.compile makes one of its own."""
    if not TRITON or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    fit = x.shape == added.shape and 0 < x.shape[-1] <= WIDEST and (x.device.type == "cuda" or interpreting())
    return fit and all(tensor.dtype in DTYPES and tensor.device == x.device for tensor in (x, added, weight, bias))


@torch.library.custom_op("rectiformer::add_norm", mutates_args=())
def fused_add_norm(x: Tensor, added: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """`add_norm` in one kernel, for `DTYPES` and rows of up to `WIDEST`."""
    from rectiformer.ops.kernels.add_norm import add_norm_forward

    x, added, width = x.contiguous(), added.contiguous(), x.shape[-1]
    count, blocks = x.numel() // width, block_shape(width)
    out = torch.empty_like(x)
    if count:
        with torch.cuda.device_of(x):  # Triton launches on the current device
            add_norm_forward[(-(-count // blocks["ROWS"]),)](
                x, added, weight.contiguous(), bias.contiguous(), out, count, width, epsilon, **blocks
            )
    return out


@fused_add_norm.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)
