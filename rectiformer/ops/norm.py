"""Norms of rows: their definition in plain torch, and the kernels where they can run."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rectiformer.ops.gpu import add_norm_suits, rms_norm_suits, transforms_active


@dataclass(frozen=True)
class OutputNorm:
    """An `rms_norm` over all heads of a row together."""

    gain: Tensor  # [H * Dv]
    gate: Tensor | None
    epsilon: float


def plain_rms_norm(z: Tensor, gain: Tensor, gate: Tensor | None, epsilon: float) -> Tensor:
    """The definition. Inside, everything is float32 or wider."""
    wide = z.to(torch.promote_types(z.dtype, torch.float32))
    out = gain * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (out if gate is None else torch.sigmoid(gate * wide) * out).to(z.dtype)


def rms_norm(z: Tensor, gain: Tensor, gate: Tensor | None, epsilon: float) -> Tensor:
    """[sigmoid(gate z)] gain z / sqrt(mean(z^2) + epsilon) over the last axis, by the kernels where they can run."""
    if not rms_norm_suits(z, gain, gate) or transforms_active():
        return plain_rms_norm(z, gain, gate, epsilon)
    from rectiformer.ops.gpu.norm import run_rms_norm

    return run_rms_norm(z, gain, gate, epsilon)


def norm_heads(out: Tensor, norm: OutputNorm) -> Tensor:
    """The norm of [R, H, Q, Dv] over all heads, in the same memory order."""
    joined = out.transpose(1, 2).flatten(2)
    normed = rms_norm(joined, norm.gain, norm.gate, norm.epsilon)
    return normed.unflatten(2, (out.shape[1], -1)).transpose(1, 2)


def add_norm(x: Tensor, added: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """LayerNorm of x + added over the last axis, in the dtype of x; one kernel where no gradient is asked for."""
    if add_norm_suits(x, added, weight, bias):
        from rectiformer.ops.gpu.norm import fused_add_norm

        return fused_add_norm(x, added, weight, bias, epsilon)
    total = x + added.to(x.dtype)  # under autocast a sublayer may end with the sum of a float32 bias
    return F.layer_norm(total, weight.shape, weight, bias, epsilon).to(x.dtype)
