"""How much the heads of one attention differ, query by query, from a few rows of weights at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_CELLS = 1 << 18
"""Weights to give to a meter at once, which holds them some five times over in float64."""


@dataclass(frozen=True)
class Diversity:
    """Means over queries; each is 0 where no query has it."""

    js: float
    """Generalized Jensen-Shannon divergence in nats of the heads that attend to something, of queries with any such
    head: 0 where they agree (or there is only one), log H where no two of all H look at the same key."""
    js_zero: float
    """The same with a head that attends to nothing counted as a vector of zeros whose entropy is 0."""
    dropped: float
    """Share of the heads' rows that `js` leaves out because they attend to nothing."""
    support_overlap: float
    """Mean Jaccard index of the keys that two heads weigh, of all pairs of heads that attend to something."""


class DiversityMeter:
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

    def numbers(self) -> list[float]:
        """All that it has seen, as `add` takes it."""
        return self.totals.tolist()

    def add(self, numbers: list[float]) -> None:
        """Add the numbers of another meter."""
        self.totals += torch.tensor(numbers, dtype=torch.float64)

    def merge(self, other: DiversityMeter) -> None:
        """Add what another meter has seen."""
        self.totals += other.totals

    def result(self) -> Diversity:
        """What was seen."""
        js, js_zero, overlap = (self.totals[:3] / self.totals[3:6].clamp_min(1)).tolist()
        dropped = float(self.totals[6] / self.totals[7].clamp_min(1))
        return Diversity(js=js, js_zero=js_zero, dropped=dropped, support_overlap=overlap)


def divergence(share: Tensor, active: Tensor) -> Tensor:
    """Jensen-Shannon divergence [Q] of `active` [Q] distributions in each share [Q, H, N], the others being zeros."""
    count = active.clamp_min(1)
    mixture = share.sum(1) / count[:, None]  # [Q, N]
    return (entropy(mixture) - entropy(share).sum(-1) / count).clamp_min(0)  # below 0 only by rounding


def entropy(share: Tensor) -> Tensor:
    """In nats, of the last axis."""
    return -torch.special.xlogy(share, share).sum(-1)


def mean_jaccard(support: Tensor, active: Tensor) -> Tensor:
    """Mean Jaccard index [Q] of the pairs among the `active` [Q] non-empty sets in support [Q, H, N]; 0 for no pair."""
    keys = support.float()
    common = keys @ keys.mT  # [Q, H, H]
    sizes = keys.sum(-1)
    union = sizes[:, :, None] + sizes[:, None] - common
    total = (common.double() / union.clamp_min(1)).sum((1, 2)) - active  # each set has index 1 with itself
    return total / (active * (active - 1)).clamp_min(1)
