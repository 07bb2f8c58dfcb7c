"""What heads do with whole documents: measured segment by segment, as a model of documents reads them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import chain

from rectiformer.analyze.distance import DistanceSurvey
from rectiformer.analyze.findings import Findings, Quality, survey_model
from rectiformer.analyze.record import KINDS, AttentionRecord
from rectiformer.analyze.segments import Document, JoinedPairs, cut_documents, record_documents, two_sides
from rectiformer.analyze.survey import shuffle_sources
from rectiformer.errors import DataError
from rectiformer.measure.bleu import score
from rectiformer.translate.documents import translate_documents, translate_segments
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator


def analyze_documents(
    translator: Translator,
    documents: Sequence[Document],
    segments: Sequence[tuple[int, int]] | None = None,
    *,
    name: str = "",
    quality: bool = True,
    progress: Callable[[int, int], None] | None = None,
    model_name: str = "",
    warn: Callable[[str], None] = warnings.warn,
) -> Findings:
    """Measure what `analyze` does while the model reads segments of documents, and how far attention reaches in them.

    Args:
        segments: first and last, exclusive, of the sentences that are read at once, as `cut_documents` gives them; as
            the model was trained unless given.
        name, progress, model_name, warn: as in `analyze`; progress counts segments.
        quality: whether to translate the documents too, and score that sentence by sentence.
    """
    if not any(documents):
        raise DataError("0 sentence pairs; there is nothing to analyze")
    parts = two_sides(take(documents, cut_documents([translator], documents) if segments is None else segments))
    joined = JoinedPairs(translator, parts)
    others = JoinedPairs(translator, shuffle_sources(parts)) if len(parts) > 1 else None
    distances = DistanceSurvey(translator.model, joined)
    found = survey_model(translator, joined, others, [distances], progress=progress, model_name=model_name, warn=warn)
    sentences = sum(map(len, documents))
    return replace(
        found,
        data=replace(found.data, name=name, sentences=sentences, documents=len(documents), segments=len(parts)),
        quality=translate_and_score(translator, documents, warn) if quality else None,
        distances=distances.results(),
    )


def take(documents: Sequence[Document], segments: Sequence[tuple[int, int]]) -> list[Document]:
    """The sentences of each segment, which count through all documents."""
    pairs = list(chain.from_iterable(documents))
    return [pairs[first:last] for first, last in segments]


def translate_and_score(translator: Translator, documents: Sequence[Document], warn: Callable[[str], None]) -> Quality:
    """BLEU over the sentences of documents that were translated as a whole; `warn` is told once of all fallbacks."""
    sources, targets = zip(*two_sides(documents), strict=True)
    found = list(translate_documents(translator, sources, SearchOptions(), warn=lambda _: None))
    if fallbacks := sum(each.fallbacks for each in found):
        segments = sum(each.segments for each in found)
        warn(
            f"for BLEU, {fallbacks:,} of {segments:,} segments did not come back sentence by sentence, and were "
            "translated in smaller ones"
        )
    lines = [text for each in found for text in each.sentences]
    bleu = score(lines, list(chain.from_iterable(targets)), ("bleu",))["bleu"]
    return Quality(bleu.value, bleu.signature)


def record_segments(
    translator: Translator,
    segments: Sequence[Document],
    kinds: Collection[str] = KINDS,
    layers: Collection[int] | None = None,
    *,
    name: str = "",
    tokenized: bool = False,
) -> AttentionRecord:
    """The record of these segments, as by `record_documents`, with the model's own translations of them."""
    record = record_documents(translator, segments, kinds, layers, name=name, tokenized=tokenized)
    own = translate_segments(translator, [sources for sources, _ in two_sides(segments)], SearchOptions())
    examples = [
        replace(example, translation=" ".join(parts)) for example, parts in zip(record.examples, own, strict=True)
    ]
    return AttentionRecord(record.model, examples)


def matching_segments(chosen: Sequence[tuple[int, int]], segments: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """For each chosen segment the one of another cut of the same documents that holds its last sentence."""
    return [next(each for each in segments if each[0] < last <= each[1]) for _, last in chosen]
