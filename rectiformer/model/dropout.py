"""Dropout of activations."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rectiformer.ops.dropout import GOLDEN, drop_seed, murmur3


class Dropout(nn.Module):
    """`nn.Dropout`, except that compiled code draws its numbers from a hash of (seed, row, column).

    A compiled kernel is otherwise bound by torch's generator: ten rounds of Philox a number, and again in the backward
    pass. Two multiplications are enough here, and the numbers cost less than reading the activations.
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
            return F.dropout(x, self.probability)
        rows = x.reshape(-1, x.shape[-1])
        keep = keep_numbers(drop_seed(None, x.device), self.probability, *rows.shape)
        return torch.where(keep, rows * (1 / (1 - self.probability)), 0).view(x.shape)


def keep_numbers(seed: Tensor, probability: float, rows: int, columns: int) -> Tensor:
    """True where a number survives: [rows, columns], a pure function of the seed."""
    word = (seed ^ (seed >> 32)).to(torch.int32)  # [1]
    row = murmur3(word + torch.arange(rows, device=seed.device, dtype=torch.int32) * GOLDEN)
    column = torch.arange(columns, device=seed.device, dtype=torch.int32) * GOLDEN
    return murmur3(row[:, None] + column) >= round(probability * 2**32) - 2**31
