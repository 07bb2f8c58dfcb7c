"""Dropout of activations."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rectiformer.ops.dropout import GOLDEN, drop_seed, murmur3


class Dropout(nn.Module):
    """`nn.Dropout`, except that compiled code draws its numbers from a hash of (seed, row, column), and a CPU four from
    each number of torch's generator.

    Both are otherwise bound by that generator. In a compiled kernel it takes ten rounds of Philox a number, and again
    in the backward pass, where two multiplications are enough. On a CPU it is a sixth of a small model's update.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def extra_repr(self) -> str:
        return f"{self.probability}"

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.probability:
            return x
        if not torch.compiler.is_compiling():
            return x * draw_factors(x, self.probability) if x.device.type == "cpu" else F.dropout(x, self.probability)
        rows = x.reshape(-1, x.shape[-1])
        keep = keep_numbers(drop_seed(None, x.device), self.probability, *rows.shape)
        return torch.where(keep, rows * (1 / (1 - self.probability)), 0).view(x.shape)


def draw_factors(x: Tensor, probability: float) -> Tensor:
    """What each number on a CPU is multiplied with: 0 with this probability, to a 65,536th, and else what makes up."""
    words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    dropped = min(round(probability * 2**16), 2**16 - 1)
    keep = words.view(torch.int16)[: x.numel()].view(x.shape) >= dropped - 2**15
    return keep.to(x.dtype).mul_(1 / (1 - dropped / 2**16))


def keep_numbers(seed: Tensor, probability: float, rows: int, columns: int) -> Tensor:
    """True where a number survives: [rows, columns], a pure function of the seed."""
    word = (seed ^ (seed >> 32)).to(torch.int32)  # [1]
    row = murmur3(word + torch.arange(rows, device=seed.device, dtype=torch.int32) * GOLDEN)
    column = torch.arange(columns, device=seed.device, dtype=torch.int32) * GOLDEN
    return murmur3(row[:, None] + column) >= round(probability * 2**32) - 2**31
