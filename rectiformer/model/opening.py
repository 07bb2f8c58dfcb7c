"""Scores raised by a constant, so that rectified attention begins open: near uniform, as a softmax begins."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rectiformer.errors import ConfigError


class Opening(nn.Module):
    """Adds a number to every score of every head, through the first of the head's dimensions, which it takes.

    No kernel, cache or export has to know of it: queries hold the number there, and keys 1.

    A softmax is (1 + x)/n to first order in its scores x, less their mean: it begins with a mean of all values, and
    every key has a gradient. Rectified attention cuts half of the keys before anything is learned. Opened by its power
    p it is [x + p]+^p, to first order (1 + x) times a constant too, and cuts a key once its score has fallen by p.

    Args:
        sizes: widths of queries, keys and values.
        head: dimensions of a head.
        amount: the number.
    """

    keep: Tensor
    values: Tensor
    keys: Tensor

    def __init__(self, sizes: Sequence[int], head: int, amount: float) -> None:
        super().__init__()
        if head < 2:
            raise ConfigError(f"heads of {head} dimension have none left for scores beside the one that opens them")
        self.amount = amount
        queries, keys, values = (torch.arange(size) % head == 0 for size in sizes)
        taken = torch.cat([queries, keys, torch.zeros_like(values)])
        self.register_buffer("keep", (~taken).float(), persistent=False)
        raised = queries * (amount * math.sqrt(head))  # scores are products of queries and keys over sqrt(head)
        self.register_buffer("values", torch.cat([raised, torch.zeros(len(keys) + len(values))]), persistent=False)
        self.register_buffer("keys", keys.float(), persistent=False)

    def forward(self, weight: Tensor, bias: Tensor | None, rows: slice) -> tuple[Tensor, Tensor]:
        """Rows of the projections, with the number in place of a query's first dimension and 0 of a key's."""
        keep, values = self.keep[rows].to(weight.dtype), self.values[rows].to(weight.dtype)
        return weight * keep[:, None], values if bias is None else bias * keep + values

    def raise_keys(self, keys: Tensor) -> Tensor:
        """Keys [..., E], centered or not, with the 1 that the number is multiplied with."""
        return keys + self.keys.to(keys.dtype)
