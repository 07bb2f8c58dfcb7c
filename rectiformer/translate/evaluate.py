"""Translate and score: for `rectiformer evaluate`, and for validation while training."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rectiformer.measure.bleu import Score, check_lines, score
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
) -> Evaluation:
    """Translate `sources` and score the result; a model that never ends stops at `options.extra_length`.

    Args:
        samples: bootstrap resamples for the 95 % interval of each score; 0 gives none.
        warn: told of each line that is too long to be translated as a whole.
    """
    check_lines("sources", sources, references)
    start = time.perf_counter()
    translations = translator.translate(sources, options, batch_tokens=batch_tokens, warn=warn)
    seconds = time.perf_counter() - start
    hypotheses = [translation.text for translation in translations]
    return Evaluation(
        scores=score(hypotheses, references, metrics, samples=samples),
        hypotheses=hypotheses,
        seconds=seconds,
        tokens=sum(len(translation.candidates[0].tokens) for translation in translations),
    )
