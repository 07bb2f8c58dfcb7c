"""Zeros by shape: single cells, pages of keys, tiles of cells. What a kernel can leave out are pages and tiles only."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from rectiformer.analyze.survey import observing, real_queries, weighing_sites
from rectiformer.model.observation import Observation
from rectiformer.text.batches import Batch
from rectiformer.translate.score import decode_forced
from rectiformer.translate.translator import Translator

SHAPES = {
    "cells": (1, 1),
    "pages of 16": (1, 16),
    "pages of 64": (1, 64),
    "tiles of 16": (16, 16),
    "tiles of 64": (64, 64),
}
"""Queries and keys of a shape."""


class ShapeMeter:
    """Counts shapes that are visible in part, and those of them that are zeros throughout."""

    def __init__(self) -> None:
        self.visible, self.zeros = (dict.fromkeys(SHAPES, 0) for _ in range(2))

    def update(self, seen: Observation, real: Tensor) -> None:
        """Add a call; `real` [B, M] says which queries are no padding. Each query sees the first keys, up to some."""
        weights = seen.weights()
        keys = torch.arange(weights.shape[-1], device=weights.device)
        visible = (keys < seen.visible()[..., None]) & real.to(weights.device)[:, None, :, None]
        visible = visible.expand_as(weights)
        used = (weights != 0) & visible
        for name, shape in SHAPES.items():
            some = pool(visible, *shape)
            self.visible[name] += int(some.sum())
            self.zeros[name] += int((some & ~pool(used, *shape)).sum())

    def shares(self) -> dict[str, float]:
        """Of the visible shapes, how many are zeros throughout."""
        return {name: round(self.zeros[name] / max(1, self.visible[name]), 5) for name in SHAPES}


def pool(cells: Tensor, height: int, width: int) -> Tensor:
    """True for each `height` x `width` tile of [..., M, N] with a True cell."""
    M, N = cells.shape[-2:]
    padded = F.pad(cells, (0, -N % width, 0, -M % height))
    return padded.unflatten(-1, (-1, width)).any(-1).unflatten(-2, (-1, height)).any(-2)


def measure_shapes(translator: Translator, batches: Iterable[Batch]) -> dict[str, dict[str, float]]:
    """Shares of zeros by shape of each kind of attention, all layers and heads together, under forced decoding."""
    meters: dict[str, ShapeMeter] = {}

    def add(meter: ShapeMeter, real: Tensor, seen: Observation) -> None:
        meter.update(seen, real)

    for batch in batches:
        with translator.inference(), ExitStack() as stack:
            for site in weighing_sites(translator.model):
                meter = meters.setdefault(site.kind, ShapeMeter())
                stack.enter_context(observing(site, partial(add, meter, real_queries(site.kind, batch))))
            decode_forced(translator, batch)
    return {kind: meter.shares() for kind, meter in meters.items()}
