"""Validation on held-out text: loss over all of it, BLEU and chrF of some translations, and whether attention is alive.

A rectified head can die: when none of its queries has a positive score, it adds nothing and gets no gradient.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rectiformer.config import Config
from rectiformer.errors import ConfigError
from rectiformer.measure.bleu import score
from rectiformer.model.transformer import Site, Transformer
from rectiformer.ops.variants import find_variant
from rectiformer.ops.weights import AttentionStats
from rectiformer.text.batches import Batch, collate
from rectiformer.text.prepared import Prepared
from rectiformer.train.loss import batch_losses
from rectiformer.train.update import autocast
from rectiformer.translate.documents import translate_segments
from rectiformer.translate.evaluate import symbols_of
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator, cut_batches

EXTRA_LENGTH = 20
"""Tokens a validation translation may be longer than its source, which bounds the cost of a model that never ends."""


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


@dataclass(frozen=True)
class Validation:
    """The results of one validation."""

    loss: float
    """Cross-entropy in nats per target token, without smoothing."""
    bleu: float
    chrf: float
    seconds: float
    health: tuple[SiteHealth, ...] = ()
    """Of each attention, from one batch."""

    def value(self, metric: str) -> float:
        """The metric that decides which checkpoint is best, higher is better."""
        return -self.loss if metric == "loss" else float(getattr(self, metric))


class Validator:
    """Validates one model on the validation part of prepared data.

    Args:
        check: called between batches; what it raises ends the validation.
    """

    def __init__(self, model: Transformer, prepared: Prepared, config: Config, check: Callable[[], None]) -> None:
        self.model, self.prepared, self.config, self.check = model, prepared, config, check
        self.device, precision = next(model.parameters()).device, config.training.precision
        self.translator = Translator(model, prepared.source, prepared.target, device=self.device, precision=precision)

    def validate(self) -> Validation:
        start = time.perf_counter()
        with self.translator.inference(), torch.compiler.set_stance("force_eager"):
            loss = self.loss()
            health = self.health()
            scores = score(*self.translate())
        return Validation(loss, scores["bleu"].value, scores["chrf"].value, time.perf_counter() - start, health)

    def translate(self) -> tuple[list[str], list[str]]:
        """Translations and references: of sentences, or of segments, each one line with spaces for separators."""
        limit, beam = self.config.validation.sentences, self.config.validation.beam
        arguments: dict[str, Any] = {
            "options": SearchOptions(beam=beam, extra_length=EXTRA_LENGTH),
            "batch_tokens": max(1, self.config.training.batch_tokens // beam),
            "progress": lambda *_: self.check(),
        }
        if not self.prepared.segment_length:
            texts = self.prepared.valid_text[:limit]
            found = self.translator.translate([source for source, _ in texts], warn=lambda _: None, **arguments)
            return [each.text for each in found], [target for _, target in texts]
        segments = self.prepared.valid_segments
        before = accumulate((len(sources) for sources, _ in segments), initial=0)
        segments = [segment for segment, sentences in zip(segments, before, strict=False) if sentences < limit]
        parts = translate_segments(self.translator, [sources for sources, _ in segments], **arguments)
        return [" ".join(each) for each in parts], [" ".join(targets) for _, targets in segments]

    def loss(self) -> float:
        total, tokens = 0.0, 0
        for pairs in self.batches():
            self.check()
            batch = self.collate(pairs)
            with autocast(self.config.training, self.device):
                logits = self.model(batch.source, batch.source_lengths, batch.target_input)
            _, plain = batch_losses(logits, batch.target, batch.target_lengths, self.config.training)
            total += plain.item()
            tokens += batch.tokens
        return total / max(1, tokens)

    def health(self) -> tuple[SiteHealth, ...]:
        """From the middle batch, whose pairs are of medium length."""
        batches = self.batches()
        if not batches:
            return ()
        batch = self.collate(batches[len(batches) // 2])
        with autocast(self.config.training, self.device):
            return attention_health(self.model, batch)

    def batches(self) -> list[list[int]]:
        """All validation pairs, short ones first."""
        valid = self.prepared.valid
        assert valid is not None
        longer = np.maximum(valid.source_lengths, valid.target_lengths) + 1
        order = np.argsort(longer, kind="stable").tolist()
        return list(cut_batches(order, longer.tolist(), self.config.training.batch_tokens))

    def collate(self, pairs: list[int]) -> Batch:
        """A batch of some validation pairs, on the device of the model."""
        assert self.prepared.valid is not None
        return collate(self.prepared.valid, np.array(pairs), symbols_of(self.prepared)).to(self.device)


def require_validation(config: Config, validates: bool) -> None:
    """ConfigError where the configuration asks for something that needs validation data, and there is none."""
    if not validates and config.validation.patience:
        raise ConfigError("validation.patience needs data.valid_source and data.valid_target")


@torch.no_grad()
def attention_health(model: Transformer, batch: Batch) -> tuple[SiteHealth, ...]:
    """The health of every attention that has weights, encoder first, from one forward pass.

    The model and its observers stay as they are, and without dropout no random number is drawn.
    """
    found: list[SiteHealth] = []
    sites = [site for site in model.sites() if find_variant(site.attention.variant).has_weights]
    before = [site.attention.observer for site in sites]
    for site in sites:
        lengths = batch.source_lengths if site.kind == "encoder" else batch.target_lengths
        site.attention.observer = lambda seen, site=site, lengths=lengths: found.append(
            site_health(site, seen.stats(), lengths)
        )
    try:
        model(batch.source, batch.source_lengths, batch.target_input)
    finally:
        for site, observer in zip(sites, before, strict=True):
            site.attention.observer = observer
    return tuple(found)


def site_health(site: Site, stats: AttentionStats, lengths: Tensor) -> SiteHealth:
    """Health from the statistics [B, H, M] of one attention; `lengths` [B] says which queries are real."""
    real = (torch.arange(stats.mass.shape[2], device=lengths.device) < lengths[:, None])[:, None]
    counted = real & (stats.visible > 0)
    null = stats.null & counted
    rows, alive = counted.sum().clamp_min(1), (counted & ~null).sum()
    measured = [
        (null.sum((0, 2)) == counted.sum((0, 2))).sum() * counted.any(),
        null.sum() / rows,
        torch.where(counted, stats.mass, 0).sum() / rows,
        torch.where(counted & ~null, stats.entropy, 0).sum() / alive.clamp_min(1),
        1 - torch.where(counted, stats.nonzero, 0).sum() / torch.where(counted, stats.visible, 0).sum().clamp_min(1),
    ]
    dead, *means = torch.stack([each.double() for each in measured]).tolist()
    return SiteHealth(site.kind, site.layer, stats.mass.shape[1], int(dead), *means)


def summarize_health(sites: Sequence[SiteHealth]) -> dict[str, float]:
    """The same for the whole model: heads and dead heads in total, means over sites of the rest."""
    if not sites:
        return {}
    means = {
        name: sum(getattr(site, name) for site in sites) / len(sites)
        for name in ("null_rate", "mass", "entropy", "zeros")
    }
    return {"heads": sum(site.heads for site in sites), "dead_heads": sum(site.dead for site in sites), **means}


def newly_dead(sites: Sequence[SiteHealth], known: dict[tuple[str, int], int]) -> Iterator[str]:
    """A phrase for every attention with more dead heads than in `known`, which is updated."""
    for site in sites:
        key = (site.kind, site.layer)
        if site.dead > known.get(key, 0):
            heads = f"all {site.heads}" if site.dead == site.heads else f"{site.dead} of {site.heads}"
            yield f"{heads} heads of {site.kind} layer {site.layer + 1} attend to nothing"
        known[key] = site.dead
