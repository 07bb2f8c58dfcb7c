"""Translate and score: for `rectiformer evaluate`, and for validation while training."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rectiformer.measure.agreement import Agreement, count_agreement
from rectiformer.measure.bleu import Score, check_lines, score
from rectiformer.text.grammar import draw_documents
from rectiformer.translate.documents import DocumentTranslation, translate_documents
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator


@dataclass(frozen=True)
class Evaluation:
    """Scores of a test set, by the name of their metric, and what they are scores of."""

    scores: dict[str, Score]
    hypotheses: list[str]
    seconds: float
    """Time of the translation, without that of the scores."""
    tokens: int
    """Subwords of the hypotheses, ends included."""


def evaluate(
    translator: Translator,
    sources: Sequence[str],
    references: Sequence[str],
    options: SearchOptions,
    metrics: Sequence[str] = ("bleu", "chrf"),
    *,
    batch_tokens: int = 4096,
    samples: int = 0,
    warn: Callable[[str], None] = warnings.warn,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Translate `sources` and score the result; a model that never ends stops at `options.extra_length`.

    Args:
        samples: bootstrap resamples for the 95 % interval of each score; 0 gives none.
        warn: told of each line that is too long to be translated as a whole.
        progress: as in `Translator.translate`.
    """
    check_lines("sources", sources, references)
    start = time.perf_counter()
    translations = translator.translate(sources, options, batch_tokens=batch_tokens, warn=warn, progress=progress)
    seconds = time.perf_counter() - start
    hypotheses = [translation.text for translation in translations]
    return Evaluation(
        scores=score(hypotheses, references, metrics, samples=samples),
        hypotheses=hypotheses,
        seconds=seconds,
        tokens=sum(len(translation.candidates[0].tokens) for translation in translations),
    )


def translate_counted(
    translator: Translator,
    sources: Sequence[Sequence[str]],
    options: SearchOptions,
    progress: Callable[[int, int], None] | None,
    **how: Any,
) -> list[DocumentTranslation]:
    """The translations of documents; `progress` is told how many of them are done, and of how many."""
    found = []
    for each in translate_documents(translator, sources, options, **how):
        found.append(each)
        if progress is not None:
            progress(len(found), len(sources))
    return found


@dataclass(frozen=True)
class AgreementEvaluation:
    """Agreement across the sentences of documents of the built-in grammar, by kind of word and of "all"."""

    counts: dict[str, Agreement]
    documents: int
    sentences: int
    segments: int
    fallbacks: int
    """Segments that were translated in smaller ones, as in `DocumentTranslation`."""


def evaluate_agreement(
    translator: Translator,
    count: int,
    options: SearchOptions,
    *,
    seed: int = 1,
    limit: int | None = None,
    overlap: int = 2,
    batch_tokens: int = 4096,
    warn: Callable[[str], None] = warnings.warn,
    progress: Callable[[int, int], None] | None = None,
) -> AgreementEvaluation:
    """Translate `count` test documents of the built-in grammar and count the words that earlier sentences decide."""
    documents = list(draw_documents(count, seed, "test"))
    sources = [[pair.source for pair in document] for document in documents]
    found = translate_counted(
        translator, sources, options, progress, limit=limit, overlap=overlap, batch_tokens=batch_tokens, warn=warn
    )
    hypotheses = [text for each in found for text in each.sentences]
    return AgreementEvaluation(
        counts=count_agreement(hypotheses, [pair.dependents for document in documents for pair in document]),
        documents=count,
        sentences=len(hypotheses),
        segments=sum(each.segments for each in found),
        fallbacks=sum(each.fallbacks for each in found),
    )
