"""Exact zeros, rows of nothing, row mass and entropy of heads, summed up batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from rectiformer.errors import ArgumentError
from rectiformer.ops.weights import AttentionStats

BINS = 8


@dataclass(frozen=True)
class HeadSummary:
    """One number a head. Queries that see no key count nowhere."""

    sparsity: list[float]
    """Share of exactly zero weights among the visible cells."""
    null_rate: list[float]
    """Share of queries that attend to nothing."""
    mass: list[float]
    """Mean sum of a query's weights, 0 for one that attends to nothing."""
    entropy: list[float]
    """Mean in nats over the queries that attend to something: those that do not have no distribution."""
    active_queries: list[float]
    """Share of queries that attend to something."""
    nonzero_keys: list[float]
    """Mean number of keys that a query weighs."""


class HeadMeter:
    """Sums over queries, a head at a time."""

    def __init__(self, heads: int) -> None:
        self.totals = torch.zeros(6, heads, dtype=torch.float64)  # rows, visible, non-zero, null, mass, entropy

    @property
    def rows(self) -> int:
        """Rows of weights counted so far, of all heads together."""
        return int(self.totals[0].sum())

    def update(self, stats: AttentionStats, real: Tensor) -> None:
        """Add a batch; `real` [B, M] says which queries are no padding."""
        counted = real[:, None] & (stats.visible > 0)  # [B, H, M]
        parts = (counted, stats.visible, stats.nonzero, stats.null, stats.mass, stats.entropy)
        sums = [torch.where(counted, part, 0).sum((0, 2), dtype=torch.float64) for part in parts]
        self.totals += torch.stack(sums).cpu()

    def numbers(self) -> list[list[float]]:
        """All that it has seen, as `add` takes it."""
        return self.totals.tolist()

    def add(self, numbers: list[list[float]]) -> None:
        """Add the numbers of a meter of as many heads."""
        self.totals += torch.tensor(numbers, dtype=torch.float64)

    def merge(self, other: HeadMeter) -> None:
        """Add what another meter of as many heads has seen."""
        self.totals += other.totals

    def pooled(self) -> HeadMeter:
        """A meter of one head that has seen the rows of all."""
        pooled = HeadMeter(1)
        pooled.totals = self.totals.sum(1, keepdim=True)
        return pooled

    def result(self) -> HeadSummary:
        """What was seen; 0 for each measure that saw nothing."""
        rows, visible, nonzero, null, mass, entropy = self.totals
        per_row = torch.stack([null, mass, rows - null, nonzero]) / rows.clamp_min(1)
        null_rate, mean_mass, active, nonzero_keys = per_row.tolist()
        return HeadSummary(
            sparsity=((visible - nonzero) / visible.clamp_min(1)).tolist(),
            null_rate=null_rate,
            mass=mean_mass,
            entropy=(entropy / (rows - null).clamp_min(1)).tolist(),
            active_queries=active,
            nonzero_keys=nonzero_keys,
        )


@dataclass(frozen=True)
class LengthSummary:
    """Zeros against the length of the source, all heads together; bin i has lengths[i] <= length < lengths[i + 1]."""

    lengths: list[int]
    sparsity: list[float]
    null_rate: list[float]
    rows: list[int]
    """Rows of weights in each bin."""


class LengthMeter:
    """One meter a bin of source lengths.

    Args:
        edges: where bins begin, and where the last one ends; a length outside of them counts nowhere.
    """

    def __init__(self, edges: Sequence[int], heads: int) -> None:
        self.edges = list(edges)
        self.bins = [HeadMeter(heads) for _ in self.edges[1:]]

    def update(self, stats: AttentionStats, real: Tensor, lengths: Tensor) -> None:
        """Add a batch; `real` [B, M] as in `HeadMeter`, `lengths` [B] of the sources."""
        for meter, (start, stop) in zip(self.bins, pairwise(self.edges), strict=True):
            inside = (lengths >= start) & (lengths < stop)
            if inside.any():
                meter.update(stats, real & inside[:, None])

    def numbers(self) -> list[list[list[float]]]:
        """All that it has seen, as `add` takes it."""
        return [meter.numbers() for meter in self.bins]

    def add(self, numbers: list[list[list[float]]]) -> None:
        """Add the numbers of a meter with the same bins."""
        for meter, its in zip(self.bins, numbers, strict=True):
            meter.add(its)

    def merge(self, other: LengthMeter) -> None:
        """Add what another meter with the same bins has seen."""
        if self.edges != other.edges:
            raise ArgumentError(f"bins {other.edges} do not fit bins {self.edges}; measure both with the same edges")
        self.add(other.numbers())

    def result(self) -> LengthSummary:
        """What was seen; 0 for a bin that saw nothing."""
        found = [meter.pooled().result() for meter in self.bins]
        return LengthSummary(
            lengths=self.edges,
            sparsity=[each.sparsity[0] for each in found],
            null_rate=[each.null_rate[0] for each in found],
            rows=[meter.rows for meter in self.bins],
        )


def length_edges(lengths: Sequence[int] | np.ndarray, bins: int = BINS) -> list[int]:
    """Edges of at most `bins` bins that share these lengths about equally; none of them is empty."""
    starts = np.unique(np.quantile(lengths, np.arange(bins) / bins, method="lower"))
    return [*(int(start) for start in starts), int(np.max(lengths)) + 1]
