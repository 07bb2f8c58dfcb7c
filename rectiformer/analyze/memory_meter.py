"""What is measured of feed-forward memories: output variance, top scores, similarity of values, use of slots."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TOP_SHARES = (0.002, 0.01, 0.1)
"""Shares of the slots, for which `top_score_ratio` is measured."""
BLOCK_CELLS = 1 << 20
"""Weights sorted at once."""


@dataclass(frozen=True)
class MemorySummary:
    """One memory over all tokens that it saw."""

    variance_ratio: float
    """Variance of the memory's output over that of the residual stream it is added to."""
    top_score_ratio: dict[str, float]
    """Share of a token's total weight in its largest weights, by their share of the slots (at least one slot); the mean
    over tokens that have weights."""
    anisotropy: float
    """Mean cosine of two different values."""
    slots: int
    used_slots: float
    """Share of slots to which some token gives a weight other than exactly 0."""
    usage_entropy: float
    """Entropy (nats) of the weights of all tokens over the slots; log(slots) if they are spread evenly."""


class VarianceMeter:
    """The variance of all values seen, without the cancellation that sums of squares would bring."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    def update(self, x: Tensor) -> None:
        if x.numel():
            x = x.double()
            mean = x.mean()
            self.merge(x.numel(), float(mean), float((x - mean).square().sum()))

    def result(self) -> float:
        return self.squares / max(1, self.count)

    def state(self) -> tuple[int, float, float]:
        return self.count, self.mean, self.squares

    def merge(self, count: int, mean: float, squares: float) -> None:
        if not count:
            return
        step, total = mean - self.mean, self.count + count
        self.squares += squares + step**2 * self.count * count / total
        self.mean += step * count / total
        self.count = total


class MemoryMeter:
    """Sums over tokens of one memory, whose `values` [N, E] are read for the result."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.kept = [max(1, round(share * len(values))) for share in TOP_SHARES]
        self.output, self.residual = VarianceMeter(), VarianceMeter()
        self.top = torch.zeros(len(TOP_SHARES), dtype=torch.float64)
        self.tokens = 0
        self.used = torch.zeros(len(values), dtype=torch.bool)
        self.usage = torch.zeros(len(values), dtype=torch.float64)

    def update(self, weights: Tensor, output: Tensor, residual: Tensor) -> None:
        """Add T tokens: their weights [T, N], the memory's output [T, E], the residual stream [T, E]."""
        self.output.update(output)
        self.residual.update(residual)
        for block in weights.split(max(1, BLOCK_CELLS // len(self.values))):
            block = block.double()
            self.used |= (block != 0).any(0).cpu()
            self.usage += block.sum(0).cpu()
            total = block.sum(-1)
            weighed = total > 0
            held = block[weighed].topk(max(self.kept)).values.cumsum(-1) / total[weighed, None]
            self.top += held[:, [count - 1 for count in self.kept]].sum(0).cpu()
            self.tokens += int(weighed.sum())

    def state(self) -> list[Any]:
        """All that it has seen, as `merge` takes it."""
        sums = (self.top, self.used, self.usage)
        return [self.output.state(), self.residual.state(), self.tokens, *(each.tolist() for each in sums)]

    def merge(self, state: list[Any]) -> None:
        """Add the state of a meter of the same memory."""
        output, residual, tokens, top, used, usage = state
        self.output.merge(*output)
        self.residual.merge(*residual)
        self.tokens += tokens
        self.top += torch.tensor(top, dtype=torch.float64)
        self.used |= torch.tensor(used)
        self.usage += torch.tensor(usage, dtype=torch.float64)

    def result(self) -> MemorySummary:
        """The summary; 0 for each measure without data."""
        ratios = (self.top / max(1, self.tokens)).tolist()
        residual, total = self.residual.result(), float(self.usage.sum())
        return MemorySummary(
            variance_ratio=self.output.result() / residual if residual else 0.0,
            top_score_ratio={str(share): ratio for share, ratio in zip(TOP_SHARES, ratios, strict=True)},
            anisotropy=anisotropy(self.values),
            slots=len(self.values),
            used_slots=float(self.used.double().mean()),
            usage_entropy=math.log(total) - float(torch.special.xlogy(self.usage, self.usage).sum()) / total
            if total
            else 0.0,
        )


def anisotropy(values: Tensor) -> float:
    """Mean cosine of two different rows of values [N, E], in N E steps: the squared sum of unit vectors has all pairs.

    Rows of zeros have no direction and are left out; fewer than two others give 0.
    """
    values = values.detach().double()
    directions = F.normalize(values[values.any(-1)], dim=-1)
    count = len(directions)
    if count < 2:
        return 0.0
    return (float(directions.sum(0).square().sum()) - count) / (count * (count - 1))
