"""How far attention to the source reaches in documents: the sentence being translated, its neighbors, farther ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rectiformer.analyze.diversity import BLOCK_CELLS
from rectiformer.analyze.segments import JoinedPairs
from rectiformer.analyze.survey import Meter, observing, weighing_sites
from rectiformer.model.observation import Observation
from rectiformer.model.transformer import Transformer
from rectiformer.ops.weights import weight_blocks
from rectiformer.text.batches import Batch

NOWHERE = -1
"""The number of a sentence that is none: separators, the end, padding."""


@dataclass(frozen=True)
class DistanceSummary:
    """Where the absolute weights of all rows and heads together go: shares that add up to 1, or are 0 without any.

    Rows are those that write a sentence; separators and the end write none.
    """

    aligned: float
    """To the source sentence of the same number."""
    neighbors: float
    """To the ones just before and after."""
    farther: float
    """To all others."""
    between: float
    """To separators and the end."""
    null_rate: float
    """Share of rows that attend to nothing."""


@dataclass(frozen=True, kw_only=True)
class DistanceFindings(DistanceSummary):
    """One attention to the source."""

    layer: int


class DistanceMeter:
    """Sums over rows of weights, by how many sentences apart query and key are."""

    def __init__(self) -> None:
        self.mass = torch.zeros(4, dtype=torch.float64)  # aligned, neighbors, farther, between
        self.null = self.rows = 0

    def update(self, weights: Tensor, queries: Tensor, keys: Tensor) -> None:
        """Add weights [B, H, M, N] of queries and keys in sentences of these numbers, [B, M] and [B, N]."""
        counted = queries != NOWHERE  # [B, M]
        size = weights.transpose(1, 2)[counted].double().abs()  # [Q, H, N]
        apart = (keys[:, None] - queries[:, :, None]).abs().clamp_max(2)  # [B, M, N]
        group = torch.where(keys[:, None] == NOWHERE, 3, apart)[counted]  # [Q, N]
        total = size.sum(1)  # [Q, N]
        self.mass += torch.stack([total[group == each].sum() for each in range(4)]).cpu()
        self.null += int((size == 0).all(-1).sum())
        self.rows += size.shape[0] * size.shape[1]

    def numbers(self) -> tuple[list[float], int, int]:
        """All that it has seen, as `add` takes it."""
        return self.mass.tolist(), self.null, self.rows

    def add(self, numbers: tuple[list[float], int, int]) -> None:
        """Add the numbers of another meter."""
        mass, null, rows = numbers
        self.mass += torch.tensor(mass, dtype=torch.float64)
        self.null += null
        self.rows += rows

    def result(self) -> DistanceSummary:
        """What was seen; 0 for each measure that saw nothing."""
        total = float(self.mass.sum())
        aligned, neighbors, farther, between = (self.mass / total).tolist() if total else [0.0] * 4
        return DistanceSummary(aligned, neighbors, farther, between, self.null / max(1, self.rows))


class DistanceSurvey:
    """Meters of every attention to the source, over the documents of `joined`."""

    def __init__(self, model: Transformer, joined: JoinedPairs) -> None:
        self.joined = joined
        self.sites = [site for site in weighing_sites(model) if site.kind == "cross"]
        self.meters = [DistanceMeter() for _ in self.sites]

    def all_meters(self) -> list[Meter]:
        """Every meter."""
        return list(self.meters)

    def watching(self, batch: Batch) -> Iterator[AbstractContextManager[None]]:
        """The contexts in which the model adds this batch to the meters."""
        keys, queries = (
            torch.from_numpy(self.joined.sentence_numbers(side, batch.pairs, ids.shape[1]))
            for side, ids in enumerate((batch.source, batch.target))
        )

        def add(seen: Observation, meter: DistanceMeter) -> None:
            device = seen.q.device
            for rows, weights in weight_blocks(seen.q, seen.k, seen.variant, cells=BLOCK_CELLS, **seen.call):
                meter.update(weights, queries[:, rows].to(device), keys.to(device))

        for site, meter in zip(self.sites, self.meters, strict=True):
            yield observing(site, partial(add, meter=meter))

    def results(self) -> list[DistanceFindings]:
        """What was seen, layer by layer."""
        return [
            DistanceFindings(layer=site.layer, **vars(meter.result()))
            for site, meter in zip(self.sites, self.meters, strict=True)
        ]
