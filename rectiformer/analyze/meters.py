"""What is measured of attention and of feed-forward memories, summed up batch by batch.

Attention: zeros, rows of nothing, row mass and entropy per head; how much the heads differ; how far cross-attention
reaches in documents. Memories: output variance, top scores, similarity of values, use of slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rectiformer.ops.weights import AttentionStats

BINS = 8
BLOCK_CELLS = 1 << 18
"""Weights to give to a meter at once, which holds about five copies in float64."""
NOWHERE = -1
"""The sentence index of what is in no sentence: separators, the end, padding."""
TOP_SHARES = (0.002, 0.01, 0.1)
"""Shares of the slots, for which `top_score_ratio` is measured."""
MEMORY_CELLS = 1 << 20
"""Weights sorted at once."""


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


class Meter:
    """Sums over what was observed; ranks exchange their states and merge them."""

    totals: Tensor

    def state(self) -> Any:
        """All that it has seen, as JSON values."""
        return self.totals.tolist()

    def merge(self, state: Any) -> None:
        """Add the state of another meter."""
        self.totals += torch.tensor(state, dtype=torch.float64)


class HeadMeter(Meter):
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


class LengthMeter(Meter):
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
        return [meter.state() for meter in self.bins]

    def merge(self, state: list[list[list[float]]]) -> None:
        for meter, its in zip(self.bins, state, strict=True):
            meter.merge(its)

    def result(self) -> LengthSummary:
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


class DiversityMeter(Meter):
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


class DistanceMeter(Meter):
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
        mass, (null, rows) = self.totals[:4], self.totals[4:].tolist()
        total = float(mass.sum())
        aligned, neighbors, farther, between = (mass / total).tolist() if total else [0.0] * 4
        return DistanceSummary(aligned, neighbors, farther, between, null / max(1, rows))


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


class MemoryMeter(Meter):
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
        for block in weights.split(max(1, MEMORY_CELLS // len(self.values))):
            block = block.double()
            self.used |= (block != 0).any(0).cpu()
            self.usage += block.sum(0).cpu()
            total = block.sum(-1)
            weighed = total > 0
            held = block[weighed].topk(max(self.kept)).values.cumsum(-1) / total[weighed, None]
            self.top += held[:, [count - 1 for count in self.kept]].sum(0).cpu()
            self.tokens += int(weighed.sum())

    def state(self) -> list[Any]:
        sums = (self.top, self.used, self.usage)
        return [self.output.state(), self.residual.state(), self.tokens, *(each.tolist() for each in sums)]

    def merge(self, state: list[Any]) -> None:
        output, residual, tokens, top, used, usage = state
        self.output.merge(*output)
        self.residual.merge(*residual)
        self.tokens += tokens
        self.top += torch.tensor(top, dtype=torch.float64)
        self.used |= torch.tensor(used)
        self.usage += torch.tensor(usage, dtype=torch.float64)

    def result(self) -> MemorySummary:
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
