"""What is measured of attention, summed up batch by batch.

Zeros, rows of nothing, row mass and entropy per head; how much the heads differ; how far cross-attention reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rectiformer.ops.weights import AttentionStats

BINS = 8


@dataclass(frozen=True)
class HeadSummary:
    """One value per head. Queries that see no key are not counted."""

    sparsity: list[float]
    """Share of exactly zero weights among the visible cells."""
    null_rate: list[float]
    """Share of queries that attend to nothing."""
    mass: list[float]
    """Mean sum of a query's weights, 0 for one that attends to nothing."""
    entropy: list[float]
    """Mean entropy (nats) over the queries that attend to something; the others have no distribution."""
    active_queries: list[float]
    """Share of queries that attend to something."""
    nonzero_keys: list[float]
    """Mean number of keys that a query weighs."""


class SumMeter:
    """Sums that can be merged with those of another meter."""

    totals: Tensor

    def state(self) -> Any:
        """All that it has seen, as JSON values."""
        return self.totals.tolist()

    def merge(self, state: Any) -> None:
        """Add the state of another meter."""
        self.totals += torch.tensor(state, dtype=torch.float64)


class HeadMeter(SumMeter):
    """Sums over queries, per head."""

    def __init__(self, heads: int) -> None:
        self.totals = torch.zeros(6, heads, dtype=torch.float64)  # rows, visible, non-zero, null, mass, entropy

    @property
    def rows(self) -> int:
        """Rows of weights counted so far, of all heads together."""
        return int(self.totals[0].sum())

    def update(self, stats: AttentionStats, real: Tensor) -> None:
        """Add a batch; `real` [B, M] marks the queries that are not padding."""
        counted = real[:, None] & (stats.visible > 0)  # [B, H, M]
        parts = (counted, stats.visible, stats.nonzero, stats.null, stats.mass, stats.entropy)
        sums = [torch.where(counted, part, 0).sum((0, 2), dtype=torch.float64) for part in parts]
        self.totals += torch.stack(sums).cpu()

    def pooled(self) -> HeadMeter:
        """A meter of one head with the rows of all heads."""
        pooled = HeadMeter(1)
        pooled.totals = self.totals.sum(1, keepdim=True)
        return pooled

    def result(self) -> HeadSummary:
        """The summary; 0 for each measure without data."""
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
    """Zeros by length of the source, all heads together; bin i has lengths[i] <= length < lengths[i + 1]."""

    lengths: list[int]
    sparsity: list[float]
    null_rate: list[float]
    rows: list[int]
    """Rows of weights in each bin."""


class LengthMeter:
    """One meter per bin of source lengths.

    Args:
        edges: where bins begin, and where the last one ends; lengths outside are not counted.
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

    def state(self) -> list[list[list[float]]]:
        """All that it has seen, as `merge` takes it."""
        return [meter.state() for meter in self.bins]

    def merge(self, state: list[list[list[float]]]) -> None:
        """Add the state of a meter with the same bins."""
        for meter, its in zip(self.bins, state, strict=True):
            meter.merge(its)

    def result(self) -> LengthSummary:
        """The summary; 0 for an empty bin."""
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


BLOCK_CELLS = 1 << 18
"""Weights to give to a meter at once, which holds about five copies in float64."""


@dataclass(frozen=True)
class Diversity:
    """Means over queries; 0 without queries."""

    js: float
    """Generalized JS divergence (nats) of the heads that attend to something, over queries with any such
    head: 0 if they agree (or there is only one), log H if no two of H heads share a key."""
    js_zero: float
    """The same, with a head that attends to nothing as a vector of zeros with entropy 0."""
    dropped: float
    """Share of rows that `js` leaves out because they attend to nothing."""
    support_overlap: float
    """Mean Jaccard index of the keys that two heads weigh, of all pairs of heads that attend to something."""


class DiversityMeter(SumMeter):
    """Sums over queries. Rows are absolute weights divided by their sum."""

    def __init__(self) -> None:
        # js, js_zero and overlap; the queries that have each; null rows; rows
        self.totals = torch.zeros(8, dtype=torch.float64)

    def update(self, weights: Tensor, visible: Tensor) -> None:
        """Add weights [B, H, M, N]; `visible` [B, H, M] counts the keys a row sees, 0 in padding."""
        H = weights.shape[1]
        sees = visible.transpose(1, 2) > 0  # [B, M, H]
        queries = sees.any(-1)
        sees = sees[queries]  # [Q, H]
        size = weights.transpose(1, 2)[queries].double().abs()  # [Q, H, N]
        mass = size.sum(-1)
        active = (mass > 0).sum(-1)  # [Q]
        share = size / mass.clamp_min(torch.finfo(mass.dtype).tiny)[..., None]
        js = divergence(share, active)
        # Zeros only thin the mixture: with c of H heads left, c/H (js + log(H/c)) is what its definition comes to.
        left = active.double() / H
        js_zero = left * js - torch.special.xlogy(left, left)
        overlap = mean_jaccard(size != 0, active)
        counts = (active > 0).sum(), active.new_tensor(len(active)), (active > 1).sum()
        null = (sees & (mass == 0)).sum()
        sums = js.sum(), js_zero.sum(), overlap.sum(), *counts, null, sees.sum()
        self.totals += torch.stack([part.double() for part in sums]).cpu()

    def result(self) -> Diversity:
        """The summary."""
        js, js_zero, overlap = (self.totals[:3] / self.totals[3:6].clamp_min(1)).tolist()
        dropped = float(self.totals[6] / self.totals[7].clamp_min(1))
        return Diversity(js=js, js_zero=js_zero, dropped=dropped, support_overlap=overlap)


def divergence(share: Tensor, active: Tensor) -> Tensor:
    """Jensen-Shannon divergence [Q] of `active` [Q] distributions in each share [Q, H, N], the others being zeros."""
    count = active.clamp_min(1)
    mixture = share.sum(1) / count[:, None]  # [Q, N]
    return (entropy(mixture) - entropy(share).sum(-1) / count).clamp_min(0)  # below 0 only by rounding


def entropy(share: Tensor) -> Tensor:
    """Entropy (nats) of the last axis."""
    return -torch.special.xlogy(share, share).sum(-1)


def mean_jaccard(support: Tensor, active: Tensor) -> Tensor:
    """Mean Jaccard index [Q] of the pairs among the `active` [Q] non-empty sets in support [Q, H, N]; 0 for no pair."""
    keys = support.float()
    common = keys @ keys.mT  # [Q, H, H]
    sizes = keys.sum(-1)
    union = sizes[:, :, None] + sizes[:, None] - common
    total = (common.double() / union.clamp_min(1)).sum((1, 2)) - active  # each set has index 1 with itself
    return total / (active * (active - 1)).clamp_min(1)


NOWHERE = -1
"""The sentence index of what is in no sentence: separators, the end, padding."""


@dataclass(frozen=True)
class DistanceSummary:
    """Where the absolute weights of all rows and heads go: shares that add up to 1, or 0 without weights.

    Rows are those that generate a sentence; separators and the end belong to none.
    """

    aligned: float
    """To the source sentence of the same index."""
    neighbors: float
    """To the ones just before and after."""
    farther: float
    """To all others."""
    between: float
    """To separators and the end."""
    null_rate: float
    """Share of rows that attend to nothing."""


class DistanceMeter(SumMeter):
    """Sums over rows of weights, by how many sentences apart query and key are."""

    def __init__(self) -> None:
        # mass that is aligned, with neighbors, farther, between; null rows; rows
        self.totals = torch.zeros(6, dtype=torch.float64)

    def update(self, weights: Tensor, queries: Tensor, keys: Tensor) -> None:
        """Add weights [B, H, M, N] of queries and keys in sentences of these indices, [B, M] and [B, N]."""
        counted = queries != NOWHERE  # [B, M]
        size = weights.transpose(1, 2)[counted].double().abs()  # [Q, H, N]
        apart = (keys[:, None] - queries[:, :, None]).abs().clamp_max(2)  # [B, M, N]
        group = torch.where(keys[:, None] == NOWHERE, 3, apart)[counted]  # [Q, N]
        total = size.sum(1)  # [Q, N]
        mass = [total[group == each].sum() for each in range(4)]
        null, rows = (size == 0).all(-1).sum().double(), total.new_tensor(size.shape[0] * size.shape[1])
        self.totals += torch.stack([*mass, null, rows]).cpu()

    def result(self) -> DistanceSummary:
        """The summary; 0 for each measure without data."""
        mass, (null, rows) = self.totals[:4], self.totals[4:].tolist()
        total = float(mass.sum())
        aligned, neighbors, farther, between = (mass / total).tolist() if total else [0.0] * 4
        return DistanceSummary(aligned, neighbors, farther, between, null / max(1, rows))
