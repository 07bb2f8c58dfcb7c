"""Looking at held-out text: loss over all of it, BLEU and chrF of translations of some of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from rectiformer.config import Config
from rectiformer.measure.bleu import score
from rectiformer.model.transformer import Transformer
from rectiformer.text.batches import Symbols, collate
from rectiformer.text.prepared import Prepared
from rectiformer.train.loss import batch_losses
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
            texts = self.prepared.valid_text[: self.config.validation.sentences]
            options = SearchOptions(beam=self.config.validation.beam, extra_length=EXTRA_LENGTH)
            translations = self.translator.translate(
                [source for source, _ in texts],
                options,
                batch_tokens=max(1, self.config.training.tokens // self.config.validation.beam),
                warn=lambda _: None,
                progress=lambda *_: self.check(),
            )
            scores = score([found.text for found in translations], [target for _, target in texts])
        return Validation(loss, scores["bleu"].value, scores["chrf"].value, time.perf_counter() - start)

    def loss(self) -> float:
        valid = self.prepared.valid
        assert valid is not None
        device = next(self.model.parameters()).device
        longer = np.maximum(valid.source_lengths, valid.target_lengths) + 1
        order = np.argsort(longer, kind="stable")
        total, tokens = 0.0, 0
        for pairs in cut(order, longer, self.config.training.tokens):
            self.check()
            batch = collate(valid, pairs, symbols_of(self.prepared))
            lengths = batch.source_lengths.to(device)
            with self.autocast():
                logits = self.model(batch.source.to(device), lengths, batch.target_input.to(device))
            target, target_lengths = batch.target.to(device), batch.target_lengths.to(device)
            total += batch_losses(logits, target, target_lengths, self.config.training).plain.item()
            tokens += batch.tokens
        return total / max(1, tokens)


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
