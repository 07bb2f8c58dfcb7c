"""Paired bootstrap over processes: every model keeps its BLEU on the same resampled test sets.

sacreBLEU's test needs all hypotheses at once, which models that are trained one after another on machines that come
and go do not have. Resamples are drawn by a seed, so that two models with the same test set have the same ones, and
their differences give sacreBLEU's own p-value.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SAMPLES, SEED = 500, 12345
ORDERS = 4


def resampled_bleu(counts: np.ndarray, samples: int = SAMPLES) -> list[float]:
    """BLEU of each resample: sentences drawn with replacement, as many as there are, by the counts of each."""
    drawn = np.random.default_rng(SEED).choice(len(counts), size=(samples, len(counts)), replace=True)
    return [round(corpus_bleu(counts[sample].sum(0)), 3) for sample in drawn]


def sentence_counts(hypotheses: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """For each sentence its matching and its own n-grams of each order, and both lengths: what BLEU is made of."""
    from sacrebleu.metrics import BLEU

    metric = BLEU(effective_order=True)  # which shapes sentence scores only, not the counts
    scores = [metric.sentence_score(line, [right]) for line, right in zip(hypotheses, references, strict=True)]
    return np.array([[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores])


def length_ratio(counts: np.ndarray) -> float:
    """How long all hypotheses are beside all references: what is under 1 costs BLEU its brevity penalty."""
    length, right_length = counts[:, -2:].sum(0)
    return float(length / right_length)


def corpus_bleu(totals: np.ndarray) -> float:
    """BLEU of summed counts, smoothed as sacreBLEU does by default."""
    from sacrebleu.metrics import BLEU

    *counts, length, right_length = (int(total) for total in totals)
    return float(BLEU.compute_bleu(counts[:ORDERS], counts[ORDERS:], length, right_length, smooth_method="exp").score)


def paired_p(first: Sequence[float], second: Sequence[float], difference: float) -> float:
    """How probable so large a `difference` of two systems is by chance, given both on the same resamples."""
    found = np.abs(np.asarray(first) - np.asarray(second))
    if not found.any():
        return 1.0  # where sacreBLEU would call two that score alike in every resample different
    larger = int((found - found.mean() > abs(difference)).sum())
    return (larger + 1) / (len(found) + 1)
