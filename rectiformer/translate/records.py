"""Translations as JSON records, with alignments and the weights of all heads if asked for."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from itertools import compress, islice
from typing import Any

from rectiformer.measure.alignment import Link, format_links
from rectiformer.translate.align import PairAttention, WordLinker, check_head, cross_attention
from rectiformer.translate.evaluate import fits
from rectiformer.translate.translator import Translation, Translator


def to_records(
    translator: Translator,
    translations: Iterable[Translation],
    *,
    align: tuple[int, int | str, str] | None = None,
    heads: bool = False,
    buffer: int = 64,
) -> Iterator[dict[str, Any]]:
    """Records of translations, with alignments and weights of forced decoding if asked for.

    A line too long to go through the model as a whole has neither, and its record a warning that says so.

    Args:
        align: layer, head and induction to align by, as in `align_pairs`.
        heads: whether to add the weights of all heads.
        buffer: translations that go through the model together; 1 answers each at once.
    """
    if align is None and not heads:
        yield from map(to_record, translations)
        return
    if align is not None:
        check_head(translator.model, *align[:2])
    stream = iter(translations)
    while chunk := list(islice(stream, buffer)):
        pairs = [(translation.source, translation.text) for translation in chunk]
        fitting = [fits(translator, pair) for pair in pairs]
        found = cross_attention(translator, list(compress(pairs, fitting)), weights=heads)
        for translation, whole in zip(chunk, fitting, strict=True):
            if not whole:
                note = f"no alignment: a side has more than {translator.max_length} subwords"
                yield to_record(dataclasses.replace(translation, warnings=[*translation.warnings, note]))
                continue
            pair = next(found)
            links = None if align is None else WordLinker(pair).links(*align)
            yield to_record(translation, links, pair if heads else None)


def to_record(
    translation: Translation, links: AbstractSet[Link] | None = None, weights: PairAttention | None = None
) -> dict[str, Any]:
    """What JSON says of a translation; `alignment` and `heads` are there only if links and weights are given."""
    best = translation.candidates[0]
    record: dict[str, Any] = {
        "line": translation.line,
        "source": translation.source,
        "translation": best.text,
        "score": finite(best.score),
        "tokens": best.tokens,
        "token_scores": [finite(score) for score in best.token_scores],
        "nbest": [
            {
                "translation": candidate.text,
                "score": finite(candidate.score),
                "log_probability": finite(candidate.log_probability),
                "ended": candidate.ended,
            }
            for candidate in translation.candidates
        ],
        "warnings": translation.warnings,
    }
    if links is not None:
        record["alignment"] = format_links(links)
    if weights is not None:
        record["heads"] = {
            "source": [piece.text for piece in weights.source_pieces],
            "target": [piece.text for piece in weights.target_pieces],
            "weights": [layer.tolist() for layer in weights.weights],
        }
    return record


def finite(value: float) -> float | None:
    """JSON has no infinity: a forced prefix may be impossible."""
    return value if math.isfinite(value) else None
