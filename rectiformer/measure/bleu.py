"""Translation scores by sacreBLEU, each with the signature that says how it was counted."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rectiformer import __version__
from rectiformer.errors import ArgumentError, DataError, unknown_name

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric
    from sacrebleu.significance import Result

METRICS = {"bleu": "BLEU", "chrf": "CHRF", "ter": "TER"}
"""Our name of a metric, and its class in sacrebleu.metrics, used with its defaults."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """One metric over one set of lines."""

    name: str
    """As sacreBLEU writes it: BLEU, chrF2 or TER; of documents, s-BLEU or d-BLEU."""
    value: float
    """0 to 100; for TER less is better, and it may exceed 100."""
    signature: str
    """sacreBLEU's own, unchanged."""
    version: str
    """Of rectiformer."""
    empty: int
    """Blank hypotheses. They are scored like any other."""
    low: float | None = None
    """Lower end of the 95 % bootstrap interval, if requested."""
    high: float | None = None
    """Its upper end."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One system of a paired bootstrap test."""

    system: str
    score: Score
    mean: float
    """Mean score of the resamples; the interval lies around it."""
    p_value: float | None
    """How probable so large a difference from the baseline is by chance; None for the baseline itself."""


def score(
    hypotheses: Sequence[str],
    references: Sequence[str],
    metrics: Sequence[str] = ("bleu", "chrf"),
    *,
    samples: int = 0,
    seed: int = 12345,
) -> dict[str, Score]:
    """Score detokenized hypotheses, line by line against one reference each, by every name in `metrics`.

    `samples` bootstrap resamples give the 95 % interval; 0 gives none.
    """
    if samples:
        system = {"hypotheses": hypotheses}
        return {name: compare(system, references, name, samples=samples, seed=seed)[0].score for name in metrics}
    check_lines("hypotheses", hypotheses, references)
    scores = {}
    for name in metrics:
        metric = build_metric(name)
        with quiet_sacrebleu():
            result = metric.corpus_score(hypotheses, [references])
        scores[name] = build_score(result.name, result.score, metric.get_signature(), hypotheses)
    return scores


def build_score(name: str, value: float, signature: object, hypotheses: Sequence[str], **interval: float) -> Score:
    empty = sum(not line.strip() for line in hypotheses)
    return Score(name=name, value=float(value), signature=str(signature), version=__version__, empty=empty, **interval)


def by_level(documents: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    """The lines to score documents by: "s-", every sentence, and "d-", every document, its sentences joined by spaces.

    Empty documents are left out. The key is the prefix of the metric's name, as in d-BLEU.
    """
    return {
        "s-": [sentence for document in documents for sentence in document],
        "d-": [" ".join(document) for document in documents if document],
    }


def compare(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[str],
    metric: str = "bleu",
    samples: int = 1000,
    seed: int = 12345,
) -> list[Comparison]:
    """Test every system against the first by sacreBLEU's paired bootstrap; the same seed gives the same result.

    Where sacreBLEU calls a system that scores like the baseline in every resample different (its p-value is then
    1 / (samples + 1)), the p-value here is 1.
    """
    from sacrebleu.significance import PairedTest

    if not systems:
        raise DataError("no systems to compare; give at least one")
    for name, hypotheses in systems.items():
        check_lines(f"{name!r}", hypotheses, references)
    if samples < 2:
        raise ArgumentError(f"samples = {samples}, but an interval needs at least 2; 1000 is usual")
    if seed < 1:
        raise ArgumentError(f"seed = {seed}, but it must be at least 1: sacreBLEU draws at random for 0")
    with quiet_sacrebleu(), sacrebleu_seed(seed):
        test = PairedTest(list(systems.items()), {metric: build_metric(metric)}, [references], "bs", samples)
        signatures, columns = test()
    [(name, signature)] = signatures.items()
    results: list[Any] = columns[name]
    comparisons = []
    for (system, hypotheses), result in zip(systems.items(), results, strict=True):
        interval = {"low": float(result.mean - result.ci), "high": float(result.mean + result.ci)}
        score = build_score(name, result.score, signature, hypotheses, **interval)
        p = p_value(result, results[0])
        comparisons.append(Comparison(system=system, score=score, mean=float(result.mean), p_value=p))
    return comparisons


def p_value(result: Result, baseline: Result) -> float | None:
    """The p-value of sacreBLEU, but None for the baseline and 1 for a system equal to it."""
    if result is baseline:
        return None
    same = (result.score, result.mean, result.ci) == (baseline.score, baseline.mean, baseline.ci)
    return 1.0 if same else result.p_value


def build_metric(name: str) -> Metric:
    """A new sacreBLEU metric by a name of METRICS."""
    from sacrebleu import metrics

    if name not in METRICS:
        raise ArgumentError(unknown_name("metric", name, METRICS))
    return getattr(metrics, METRICS[name])()


def check_lines(what: str, hypotheses: Sequence[str], references: Sequence[str]) -> None:
    """Refuse what sacreBLEU accepts: it scores as many lines as the shorter side has."""
    if len(hypotheses) != len(references):
        raise DataError(
            f"{what}: {len(hypotheses)} lines for {len(references)} references; nothing is scored, "
            "because each reference needs exactly one line, if only an empty one"
        )
    if not references:
        raise DataError(f"{what}: 0 lines for 0 references; there is nothing to score")


def check_documents(what: str, hypotheses: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> None:
    """Refuse documents that do not have as many sentences as their references."""
    if len(hypotheses) != len(references):
        raise DataError(f"{what}: {len(hypotheses)} documents for {len(references)} references; nothing is scored")
    for number, (ours, right) in enumerate(zip(hypotheses, references, strict=True), 1):
        if len(ours) != len(right):
            raise DataError(
                f"{what}: document {number} has {len(ours)} sentences for {len(right)} references; nothing is scored, "
                "because each reference needs exactly one line, if only an empty one"
            )


@contextmanager
def quiet_sacrebleu() -> Iterator[None]:
    """Keep what sacreBLEU logs off the user's terminal."""
    logger = logging.getLogger("sacrebleu")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


@contextmanager
def sacrebleu_seed(seed: int) -> Iterator[None]:
    """Set the seed where sacreBLEU reads it: in the environment, so never from two threads at once."""
    before = os.environ.get("SACREBLEU_SEED")
    os.environ["SACREBLEU_SEED"] = str(seed)
    try:
        yield
    finally:
        if before is None:
            del os.environ["SACREBLEU_SEED"]
        else:
            os.environ["SACREBLEU_SEED"] = before
