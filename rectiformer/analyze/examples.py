"""Sentences of a test set to look at: which ones, and the record of a model that writes them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Collection, Sequence

from rectiformer.analyze.capture import record_pairs
from rectiformer.analyze.record import KINDS, AttentionRecord
from rectiformer.measure.alignment import Links
from rectiformer.text.batches import shuffled
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator


def sample(count: int, total: int, seed: int) -> list[int]:
    """`count` of the numbers below `total`, or all if there are fewer, in order; the same for the same seed."""
    return sorted(shuffled(total, "examples", seed)[:count].tolist())


def record_examples(
    translator: Translator,
    pairs: Sequence[tuple[str, str]],
    gold: Sequence[Links] | None = None,
    kinds: Collection[str] = KINDS,
    layers: Collection[int] | None = None,
    *,
    name: str = "",
    tokenized: bool = False,
    warn: Callable[[str], None] = warnings.warn,
) -> AttentionRecord:
    """The record of these pairs, as by `record_pairs`, with the model's own translations beside the given ones.

    Args:
        name: what to call the model, in place of its variant.
        warn: told of each line that is too long to be translated as a whole.
    """
    record = record_pairs(translator, pairs, gold, kinds, layers, tokenized=tokenized)
    own = translator.translate([source for source, _ in pairs], SearchOptions(), warn=warn)
    examples = [
        dataclasses.replace(example, translation=each.text) for example, each in zip(record.examples, own, strict=True)
    ]
    return AttentionRecord(dataclasses.replace(record.model, name=name or record.model.name), examples)
