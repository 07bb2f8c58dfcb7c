"""Word links by a model of either direction: where it is asked to look or, with gold links, where it looks best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rectiformer.measure.alignment import Link, Links, flip
from rectiformer.translate.align import AVERAGE, Row, align_pairs, alignment_table, choose
from rectiformer.translate.translator import Translator


@dataclass(frozen=True)
class Direction:
    """What one model links, as (source word, target word) of the pairs it was given."""

    links: list[set[Link]]
    rows: list[Row]
    """The errors of every layer, head and induction; none without gold links."""
    best: Row | None
    """The one of them that made the links."""


def align_direction(
    translator: Translator,
    pairs: Sequence[tuple[str, str]],
    gold: Sequence[Links] | None = None,
    *,
    layer: int | str = "",
    head: int | str = "",
    induction: str = "",
    tokenized: bool = False,
    batch_tokens: int = 4096,
) -> Direction:
    """Links of each (source, target) pair.

    Args:
        gold: with it, what is left empty or "best" is where the alignment error is least; without it, what is left
            empty is the last layer, the average of its heads, and normal induction.
        layer, head, induction: as in `align_pairs`.
    """
    rows: list[Row] = []
    best: Row | None = None
    if gold is not None:
        rows = alignment_table(translator, pairs, gold, tokenized=tokenized, batch_tokens=batch_tokens)
        best = choose(rows, layer=or_else(layer, "best"), head=or_else(head, "best"), induction=induction or "best")
        layer, head, induction = best.layer, best.head, best.induction
    place: dict[str, Any] = {
        "layer": or_else(layer, translator.model.config.decoder_layers - 1),
        "head": or_else(head, AVERAGE),
        "induction": induction or "normal",
    }
    links = align_pairs(translator, pairs, **place, tokenized=tokenized, batch_tokens=batch_tokens)
    return Direction(links, rows, best)


def align_backward(
    translator: Translator, pairs: Sequence[tuple[str, str]], gold: Sequence[Links] | None = None, **options: Any
) -> Direction:
    """`align_direction` by a model from target to source; pairs, gold and the links found are source to target."""
    turned = [(target, source) for source, target in pairs]
    if gold is not None:
        gold = [Links(frozenset(flip(each.sure)), frozenset(flip(each.possible))) for each in gold]
    found = align_direction(translator, turned, gold, **options)
    return Direction([flip(links) for links in found.links], found.rows, found.best)


def or_else(asked: int | str, default: int | str) -> int | str:
    return default if asked == "" else asked
