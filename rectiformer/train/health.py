"""Whether attention is alive: what the heads of every layer do with one batch of held-out text.

A rectified head can die: when no query of it has a positive score, it adds nothing and gets no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rectiformer.model.attention import Observation
from rectiformer.model.transformer import Site, Transformer
from rectiformer.ops.variants import find_variant
from rectiformer.ops.weights import AttentionStats
from rectiformer.text.batches import Batch


@dataclass(frozen=True)
class SiteHealth:
    """One attention of a model; means are over its heads and the real queries that see a key."""

    kind: str
    layer: int
    heads: int
    dead: int
    """Heads that attend to nothing, whatever the query."""
    null_rate: float
    """Share of rows that attend to nothing."""
    mass: float
    """Mean sum of a row of weights."""
    entropy: float
    """Mean entropy in nats of rows that attend to something, each divided by its sum."""
    zeros: float
    """Share of exact zeros among the weights of visible keys."""


@torch.no_grad()
def look(model: Transformer, batch: Batch) -> tuple[SiteHealth, ...]:
    """Every attention that has weights, encoder first, from one forward pass. The model and its observers stay as they
    are, and without dropout no random number is drawn."""
    found: list[SiteHealth] = []
    sites = [site for site in model.sites() if find_variant(site.attention.variant).has_weights]
    before = [site.attention.observer for site in sites]
    for site in sites:
        lengths = batch.source_lengths if site.kind == "encoder" else batch.target_lengths
        site.attention.observer = partial(_note, found, site, lengths)
    try:
        model(batch.source, batch.source_lengths, batch.target_input)
    finally:
        for site, observer in zip(sites, before, strict=True):
            site.attention.observer = observer
    return tuple(found)


def _note(found: list[SiteHealth], site: Site, lengths: Tensor, seen: Observation) -> None:
    found.append(describe(site, seen.stats(), lengths))


def describe(site: Site, stats: AttentionStats, lengths: Tensor) -> SiteHealth:
    """Sum up the rows [B, H, M] of one attention; `lengths` [B] says which queries are real."""
    real = (torch.arange(stats.mass.shape[2], device=lengths.device) < lengths[:, None])[:, None]
    counted = real & (stats.visible > 0)
    null = stats.null & counted
    rows, alive = counted.sum().clamp_min(1), (counted & ~null).sum()
    numbers = [
        (null.sum((0, 2)) == counted.sum((0, 2))).sum() * counted.any(),
        null.sum() / rows,
        torch.where(counted, stats.mass, 0).sum() / rows,
        torch.where(counted & ~null, stats.entropy, 0).sum() / alive.clamp_min(1),
        1 - torch.where(counted, stats.nonzero, 0).sum() / torch.where(counted, stats.visible, 0).sum().clamp_min(1),
    ]
    dead, *means = torch.stack([number.double() for number in numbers]).tolist()
    return SiteHealth(site.kind, site.layer, stats.mass.shape[1], int(dead), *means)


def summarize(sites: Sequence[SiteHealth]) -> dict[str, float]:
    """One number each for the whole model: heads and dead ones in all, means over sites of the rest."""
    if not sites:
        return {}
    means = {
        name: sum(getattr(site, name) for site in sites) / len(sites)
        for name in ("null_rate", "mass", "entropy", "zeros")
    }
    return {"heads": sum(site.heads for site in sites), "dead_heads": sum(site.dead for site in sites), **means}


def newly_dead(sites: Sequence[SiteHealth], known: dict[tuple[str, int], int]) -> Iterator[str]:
    """A phrase for every attention with more dead heads than `known` has, which is brought up to date."""
    for site in sites:
        place = (site.kind, site.layer)
        if site.dead > known.get(place, 0):
            heads = f"all {site.heads}" if site.dead == site.heads else f"{site.dead} of {site.heads}"
            yield f"{heads} heads of {site.kind} layer {site.layer + 1} attend to nothing"
        known[place] = site.dead
