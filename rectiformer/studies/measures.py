"""What several studies measure of a trained model: translations, attention, memories, speed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rectiformer.analyze.findings import Findings, analyze
from rectiformer.analyze.meters import HeadMeter
from rectiformer.analyze.survey import BATCH_TOKENS, observing, real_queries, weighing_sites
from rectiformer.model.attention import Observation
from rectiformer.runs.metrics import read_metrics
from rectiformer.studies.corpora import Pair
from rectiformer.studies.plan import Trained
from rectiformer.text.batches import Batch, collate
from rectiformer.text.prepared import Prepared
from rectiformer.translate.evaluate import Evaluation, evaluate
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.score import decode_forced, symbols_of
from rectiformer.translate.translator import Translator, cut_batches

BEAM, PENALTY = 4, 0.6
"""Hypotheses of a search and its length penalty: those of ReLA's paper."""
TRANSLATED_TOKENS = 32_768
"""Padded source tokens that are translated together: whole documents too are many at a time."""
SIGNATURE = "signature"
"""The measure that is no number: how BLEU was counted."""
SITES = ("encoder", "decoder", "cross")
HEADS = {"zeros": "sparsity", "null": "null_rate", "mass": "mass", "entropy": "entropy"}
"""What is measured of attention, and what it is called in analyze/sparsity.py."""
HEADS_NOTE = (
    "On validation data, all layers and heads of a kind of attention together: share of weights that are exactly 0 / "
    "share of queries that attend to nothing / mean row sum / entropy in nats."
)


def heads_of(kind: str) -> list[str]:
    """The names of the measures of one kind of attention."""
    return [f"{kind}_{short}" for short in HEADS]


def open_model(run: Trained) -> Translator:
    """The checkpoint that was best on validation data, on the device and in the precision it was trained with."""
    training = run.training.config.training
    return Translator.from_run(run.folder, device=training.device, precision=training.precision)


def valid_pairs(run: Trained) -> list[Pair]:
    """The validation text, as far as training looks at it."""
    prepared = Prepared.open(run.data, verify=False)
    return prepared.valid_text[: run.training.config.validation.sentences]


def translate_pairs(translator: Translator, pairs: Sequence[Pair], length_penalty: float = PENALTY) -> Evaluation:
    """The sources by beam search, scored."""
    sources, references = [source for source, _ in pairs], [target for _, target in pairs]
    options = SearchOptions(beam=BEAM, length_penalty=length_penalty)
    return evaluate(translator, sources, references, options, batch_tokens=TRANSLATED_TOKENS, warn=lambda _: None)


def measure_translation(translator: Translator, pairs: Sequence[Pair], prefix: str = "") -> dict[str, Any]:
    """BLEU and chrF by beam search, and the speed of it."""
    return describe_translation(translate_pairs(translator, pairs), prefix)


def describe_translation(found: Evaluation, prefix: str = "") -> dict[str, Any]:
    """The same of translations that are there."""
    return {
        f"{prefix}bleu": found.scores["bleu"].value,
        f"{prefix}chrf": found.scores["chrf"].value,
        f"{prefix}tokens_per_second": found.tokens / max(1e-9, found.seconds),
        SIGNATURE: f"beam {BEAM}, {found.scores['bleu'].signature}",
    }


def measure_attention(translator: Translator, run: Trained) -> dict[str, float]:
    """Zeros, rows of nothing, row mass and entropy of each kind of attention: all layers and heads together.

    On the validation pairs as the model trains, sentences or segments, under forced decoding.
    """
    meters: dict[str, HeadMeter] = {}
    for batch in valid_batches(translator, run):
        with translator.inference(), ExitStack() as stack:
            for site in weighing_sites(translator.model):
                meter = meters.setdefault(site.kind, HeadMeter(1))
                stack.enter_context(observing(site.attention, partial(add_heads, meter, site.kind, batch)))
            decode_forced(translator, batch)
    return {
        f"{kind}_{short}": getattr(meter.result(), measure)[0]
        for kind, meter in meters.items()
        for short, measure in HEADS.items()
    }


def describe_sites(found: Findings) -> dict[str, Any]:
    """What each attention did: means over heads, and for each kind of attention means over its layers."""
    sites: list[dict[str, Any]] = [
        {
            "site": site.kind,
            "layer": site.layer,
            **{short: rounded(fmean(getattr(site, measure))) for short, measure in HEADS.items()},
            "null_by_head": [rounded(rate) for rate in site.null_rate],
            "js": rounded(site.diversity.js),
            "js_zero": rounded(site.diversity.js_zero),
            "overlap": rounded(site.diversity.support_overlap),
        }
        for site in found.sites
    ]
    shares = (*HEADS, "js", "js_zero", "overlap")
    means = {
        f"{kind}_{share}": rounded(fmean(site[share] for site in sites if site["site"] == kind))
        for kind in dict.fromkeys(site["site"] for site in sites)
        for share in shares
    }
    return {"sites": sites, **means}


def describe_pairing(found: Findings) -> dict[str, Any]:
    """How often heads attend to nothing in the source of a target, and in that of another pair: a number a layer."""
    if found.shuffled is None:
        return {}
    own, other = ([rounded(rate) for rate in side.null_rate] for side in (found.shuffled.gold, found.shuffled.shuffled))
    return {"null_gold": own, "null_shuffled": other, "null_rise": rounded(fmean(other) - fmean(own))}


def describe_lengths(found: Findings) -> dict[str, Any]:
    """Share of zeros against the length of the source, of each kind of attention, means over layers."""
    lengths: dict[str, Any] = {}
    for kind in dict.fromkeys(each.kind for each in found.by_length):
        layers = [each for each in found.by_length if each.kind == kind]
        zeros = [rounded(fmean(shares)) for shares in zip(*(each.sparsity for each in layers), strict=True)]
        lengths[kind] = {"from": layers[0].lengths, "zeros": zeros}
    return {"zeros_by_length": lengths}


def rounded(value: float) -> float:
    """Five digits are more than seeds agree on, and keep results small."""
    return round(value, 5)


def valid_batches(translator: Translator, run: Trained) -> Iterator[Batch]:
    """All validation pairs, in batches of similar length."""
    pairs = Prepared.open(run.data, verify=False).valid
    assert pairs is not None
    lengths = (np.maximum(pairs.source_lengths, pairs.target_lengths) + 1).tolist()
    order = sorted(range(pairs.pairs), key=lambda index: -lengths[index])
    for indices in cut_batches(order, lengths, BATCH_TOKENS):
        yield collate(pairs, np.array(indices), symbols_of(translator))


def add_heads(meter: HeadMeter, kind: str, batch: Batch, seen: Observation) -> None:
    """Add what all heads of one attention did with a batch to a meter of one head."""
    each = HeadMeter(seen.q.shape[1])
    each.update(seen.stats(), real_queries(kind, batch).to(seen.q.device))
    meter.merge(each.pooled().state())


def measure_memories(translator: Translator, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """All that is known of each memory, encoder first, from these pairs under forced decoding."""
    findings = analyze(translator, pairs, quality=False, warn=lambda _: None)
    return [asdict(memory) for memory in findings.memories]


def training_speed(folder: Path) -> float:
    """Target tokens a second: the median of what the run logged, which no validation or first step moves."""
    speeds = [record["tokens_per_second"] for record in read_metrics(folder / "metrics.jsonl") if "loss" in record]
    return median(speeds) if speeds else 0.0


def curve_of(folder: Path, measure: str) -> list[list[float]]:
    """Updates and a measure of each record of a run that has it: `valid_bleu` of validations, `nll` of training."""
    records = read_metrics(folder / "metrics.jsonl")
    return [[record["step"], rounded(record[measure])] for record in records if measure in record]


SHAPES = {
    "cells": (1, 1),
    "pages of 16": (1, 16),
    "pages of 64": (1, 64),
    "tiles of 16": (16, 16),
    "tiles of 64": (64, 64),
}
"""Queries and keys of a shape."""


class ShapeMeter:
    """Counts shapes that are visible in part, and those of them that are zeros throughout."""

    def __init__(self) -> None:
        self.visible, self.zeros = (dict.fromkeys(SHAPES, 0) for _ in range(2))

    def update(self, seen: Observation, real: Tensor) -> None:
        """Add a call; `real` [B, M] says which queries are no padding. Each query sees the first keys, up to some."""
        weights = seen.weights()
        keys = torch.arange(weights.shape[-1], device=weights.device)
        visible = (keys < seen.visible()[..., None]) & real.to(weights.device)[:, None, :, None]
        visible = visible.expand_as(weights)
        used = (weights != 0) & visible
        for name, shape in SHAPES.items():
            some = pool(visible, *shape)
            self.visible[name] += int(some.sum())
            self.zeros[name] += int((some & ~pool(used, *shape)).sum())

    def shares(self) -> dict[str, float]:
        """Of the visible shapes, how many are zeros throughout."""
        return {name: round(self.zeros[name] / max(1, self.visible[name]), 5) for name in SHAPES}


def pool(cells: Tensor, height: int, width: int) -> Tensor:
    """True for each `height` x `width` tile of [..., M, N] with a True cell."""
    M, N = cells.shape[-2:]
    padded = F.pad(cells, (0, -N % width, 0, -M % height))
    return padded.unflatten(-1, (-1, width)).any(-1).unflatten(-2, (-1, height)).any(-2)


def measure_shapes(translator: Translator, batches: Iterable[Batch]) -> dict[str, dict[str, float]]:
    """Shares of zeros by shape of each kind of attention, all layers and heads together, under forced decoding."""
    meters: dict[str, ShapeMeter] = {}

    def add(meter: ShapeMeter, real: Tensor, seen: Observation) -> None:
        meter.update(seen, real)

    for batch in batches:
        with translator.inference(), ExitStack() as stack:
            for site in weighing_sites(translator.model):
                meter = meters.setdefault(site.kind, ShapeMeter())
                stack.enter_context(observing(site.attention, partial(add, meter, real_queries(site.kind, batch))))
            decode_forced(translator, batch)
    return {kind: meter.shares() for kind, meter in meters.items()}


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
