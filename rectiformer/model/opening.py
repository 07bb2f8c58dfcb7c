"""Numbers that queries add to their scores: thresholds of rectified attention, which may begin as open as a softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rectiformer.errors import ConfigError


class Opening(nn.Module):
    """Adds a number to the scores of every query, through the first dimension of each head, which it takes.

    Queries hold the number there: at first the same for all, then what they have learned to add to it, so that a head
    can close for a query, or open further. Keys hold what scores are divided by. No kernel, cache or export has to know
    of it.

    A softmax is (1 + x)/n to first order in its scores x, less their mean: it begins with a mean of all values, and
    every key has a gradient. Rectified attention cuts half of the keys before anything is learned. Opened by its power
    p it is [x + p]+^p, to first order (1 + x) times a constant too, and cuts a key once its score has fallen by p.
    Squared it is 1.5-entmax with a threshold that is learned, not solved for so that weights add up to 1.

    Opened by 0 it is a threshold alone. Of centered keys half have scores above 0, in a segment of a document as in a
    sentence; to look at few of them a query has to subtract something from all.

    Args:
        sizes: widths of queries, keys and values.
        head: dimensions of a head.
        amount: the number at first.
    """

    keep: Tensor
    values: Tensor
    keys: Tensor

    def __init__(self, sizes: Sequence[int], head: int, amount: float) -> None:
        super().__init__()
        if head < 2:
            raise ConfigError(
                f"heads of {head} dimension have none left for scores beside the one that opens them; use fewer heads, "
                "or model.score_bias = 'none'"
            )
        self.amount, self.head = amount, head
        queries, keys = (torch.arange(size) % head == 0 for size in sizes[:2])
        self.register_buffer("keep", torch.cat([torch.ones(sizes[0]), ~keys, torch.ones(sizes[2])]), persistent=False)
        self.register_buffer(
            "values", torch.cat([queries * amount, torch.zeros(sizes[1] + sizes[2])]), persistent=False
        )
        self.register_buffer("keys", keys * math.sqrt(head), persistent=False)

    def reset(self, weight: Tensor) -> None:
        """Let queries add nothing yet."""
        weight[: len(weight) - 2 * len(self.keys)][:: self.head] = 0

    def forward(self, weight: Tensor, bias: Tensor | None, rows: slice) -> tuple[Tensor, Tensor]:
        """Rows of the projections, with the number added to a query's first dimension and 0 in place of a key's."""
        keep, values = self.keep[rows].to(weight.dtype), self.values[rows].to(weight.dtype)
        return weight * keep[:, None], values if bias is None else bias * keep + values

    def raise_keys(self, keys: Tensor) -> Tensor:
        """Keys [..., E], centered or not, with what the number is multiplied with."""
        return keys + self.keys.to(keys.dtype)
