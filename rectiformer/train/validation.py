"""Looking at held-out text: loss over all of it, BLEU and chrF of translations of some of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rectiformer.config import Config
from rectiformer.errors import ConfigError
from rectiformer.measure.bleu import score
from rectiformer.model.transformer import Transformer
from rectiformer.text.batches import Batch, Symbols, collate
from rectiformer.text.prepared import Prepared
from rectiformer.train.health import SiteHealth, look
from rectiformer.train.loss import batch_losses
from rectiformer.translate.documents import translate_segments
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator

EXTRA_LENGTH = 20
"""Tokens a validation translation may have more than its source: a model that never ends costs no more than that."""


@dataclass(frozen=True)
class Validation:
    """Numbers of one validation."""

    loss: float
    """Cross-entropy in nats a target token, without smoothing."""
    bleu: float
    chrf: float
    seconds: float
    health: tuple[SiteHealth, ...] = ()
    """What each attention does with one batch."""

    def value(self, metric: str) -> float:
        """The number that decides, higher is better."""
        return -self.loss if metric == "loss" else float(getattr(self, metric))


class Validator:
    """Validates one model on the validation part of prepared data.

    Args:
        check: called between batches; what it raises ends the validation.
    """

    def __init__(
        self,
        model: Transformer,
        prepared: Prepared,
        config: Config,
        autocast: Callable[[], AbstractContextManager[object]],
        check: Callable[[], None],
    ) -> None:
        self.model, self.prepared, self.config = model, prepared, config
        self.autocast, self.check = autocast, check
        device = next(model.parameters()).device
        precision = config.training.precision
        self.translator = Translator(model, prepared.source, prepared.target, device=device, precision=precision)

    def validate(self) -> Validation:
        start = time.perf_counter()
        with self.translator.inference(), torch.compiler.set_stance("force_eager"):
            loss = self.loss()
            health = self.health()
            scores = score(*self.translate())
        return Validation(loss, scores["bleu"].value, scores["chrf"].value, time.perf_counter() - start, health)

    def translate(self) -> tuple[list[str], list[str]]:
        """Translations and references: of sentences, or of segments, each one line with spaces for separators."""
        most, beam = self.config.validation.sentences, self.config.validation.beam
        how: dict[str, Any] = {
            "options": SearchOptions(beam=beam, extra_length=EXTRA_LENGTH),
            "batch_tokens": max(1, self.config.training.batch_tokens // beam),
            "progress": lambda *_: self.check(),
        }
        if not self.prepared.segment:
            texts = self.prepared.valid_text[:most]
            found = self.translator.translate([source for source, _ in texts], warn=lambda _: None, **how)
            return [each.text for each in found], [target for _, target in texts]
        segments = self.prepared.valid_segments
        before = accumulate((len(sources) for sources, _ in segments), initial=0)
        segments = [segment for segment, sentences in zip(segments, before, strict=False) if sentences < most]
        parts = translate_segments(self.translator, [sources for sources, _ in segments], **how)
        return [" ".join(each) for each in parts], [" ".join(targets) for _, targets in segments]

    def loss(self) -> float:
        total, tokens = 0.0, 0
        for pairs in self.batches():
            self.check()
            batch = self.collate(pairs)
            with self.autocast():
                logits = self.model(batch.source, batch.source_lengths, batch.target_input)
            total += batch_losses(logits, batch.target, batch.target_lengths, self.config.training).plain.item()
            tokens += batch.tokens
        return total / max(1, tokens)

    def health(self) -> tuple[SiteHealth, ...]:
        """Of the batch in the middle, whose pairs are of middling length."""
        batches = self.batches()
        if not batches:
            return ()
        batch = self.collate(batches[len(batches) // 2])
        with self.autocast():
            return look(self.model, batch)

    def batches(self) -> list[np.ndarray]:
        """All validation pairs, short ones first."""
        valid = self.prepared.valid
        assert valid is not None
        longer = np.maximum(valid.source_lengths, valid.target_lengths) + 1
        return cut(np.argsort(longer, kind="stable"), longer, self.config.training.batch_tokens)

    def collate(self, pairs: np.ndarray) -> Batch:
        """Some of them on the device of the model."""
        assert self.prepared.valid is not None
        batch = collate(self.prepared.valid, pairs, symbols_of(self.prepared))
        device = next(self.model.parameters()).device
        tensors: dict[str, Any] = {
            name: part.to(device) for name, part in vars(batch).items() if isinstance(part, Tensor)
        }
        return replace(batch, **tensors)


def symbols_of(prepared: Prepared) -> Symbols:
    source, target = prepared.source, prepared.target
    return Symbols(source.pad, source.eos, target.pad, target.bos, target.eos)


def cut(order: np.ndarray, lengths: np.ndarray, tokens: int) -> list[np.ndarray]:
    """Runs of `order`, sorted by length, that stay under `tokens` when padded; a longer pair stands alone."""
    batches: list[np.ndarray] = []
    start = 0
    for stop in range(1, len(order) + 1):
        if stop == len(order) or (stop + 1 - start) * lengths[order[stop]] > tokens:
            batches.append(order[start:stop])
            start = stop
    return batches


def require_validation(config: Config, validates: bool) -> None:
    """ConfigError where the configuration asks for something that needs validation data, and there is none."""
    if not validates and config.validation.patience:
        raise ConfigError("validation.patience needs data.valid_source and data.valid_target")
