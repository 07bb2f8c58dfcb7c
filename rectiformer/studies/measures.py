"""What several studies measure of a trained model: translations and their significance, attention, memories, speed."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rectiformer.analyze.findings import Findings
from rectiformer.analyze.meters import HeadMeter
from rectiformer.analyze.survey import BATCH_TOKENS, observing, real_queries, weighing_sites
from rectiformer.model.attention import Observation
from rectiformer.runs.metrics import read_metrics
from rectiformer.studies.corpora import Pair, held_out
from rectiformer.studies.plan import Task
from rectiformer.studies.results import Results, Table
from rectiformer.text.batches import Batch, collate
from rectiformer.text.prepared import Prepared
from rectiformer.translate.evaluate import Evaluation, decode_forced, evaluate, symbols_of
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator, cut_batches

BEAM, PENALTY = 4, 0.6
"""Beam size and length penalty of ReLA's paper."""
TRANSLATED_TOKENS = 32_768
"""Padded source tokens that are translated together; enough for many whole documents at a time."""
SIGNATURE = "signature"
"""The measure that is not a number: how BLEU was counted."""
SITE_TITLES = {"encoder": "encoder self-attention", "decoder": "decoder self-attention", "cross": "cross-attention"}
HEADS = {"zeros": "sparsity", "null": "null_rate", "mass": "mass", "entropy": "entropy"}
"""What is measured of attention, and what it is called in analyze/meters.py."""
HEADS_SHOWN = {
    "zeros": "share of weights that are exactly 0",
    "null": "share of queries that attend to nothing",
    "mass": "mean sum of a row",
    "entropy": "entropy, nats",
}
"""And in tables."""
SHAPES = {
    "cells": (1, 1),
    "pages of 16": (1, 16),
    "pages of 64": (1, 64),
    "tiles of 16": (16, 16),
    "tiles of 64": (64, 64),
}
"""Queries and keys of a shape. A kernel can skip pages and tiles of zeros, but not single cells."""
SAMPLES, SAMPLING_SEED = 500, 12345
ORDERS = 4


def open_model(task: Task) -> Translator:
    """The checkpoint that was best on validation data, on the device and in the precision it was trained with."""
    training = task.training.config.training
    return Translator.from_run(task.run, device=training.device, precision=training.precision)


def valid_pairs(task: Task) -> list[Pair]:
    """The validation text that training looks at."""
    prepared = Prepared.open(task.data, verify=False)
    return prepared.valid_text[: task.training.config.validation.sentences]


def translate_pairs(translator: Translator, pairs: Sequence[Pair], length_penalty: float = PENALTY) -> Evaluation:
    """Translations of the sources by beam search, scored."""
    sources, references = [source for source, _ in pairs], [target for _, target in pairs]
    options = SearchOptions(beam=BEAM, length_penalty=length_penalty)
    return evaluate(translator, sources, references, options, batch_tokens=TRANSLATED_TOKENS, warn=lambda _: None)


def measure_translation(translator: Translator, pairs: Sequence[Pair], prefix: str = "") -> dict[str, Any]:
    """BLEU, chrF and speed of beam search."""
    return describe_translation(translate_pairs(translator, pairs), prefix)


def describe_translation(found: Evaluation, prefix: str = "") -> dict[str, Any]:
    """The same of translations that are there already."""
    return {
        f"{prefix}bleu": found.scores["bleu"].value,
        f"{prefix}chrf": found.scores["chrf"].value,
        f"{prefix}tokens_per_second": found.tokens / max(1e-9, found.seconds),
        SIGNATURE: f"beam {BEAM}, {found.scores['bleu'].signature}",
    }


def measure_quality(translator: Translator, task: Task) -> dict[str, Any]:
    """The same on validation and test data of single sentences."""
    valid = measure_translation(translator, valid_pairs(task), "valid_")
    return {**valid, **measure_translation(translator, held_out(task.scale))}


def measure_cost(task: Task) -> dict[str, float]:
    """Speed and device memory of a training."""
    return {"training_tokens_per_second": training_speed(task.run), "peak_bytes": task.read_cost()["peak_bytes"]}


def show_label(value: str | int | float) -> str:
    """`1,024`, or `0.05`."""
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else value


def heads_tables(results: Results, names: Sequence[str], labels: Sequence[str] = ()) -> list[Table]:
    """What `measure_attention` found at each site; the first cells of a row are its labels, or its name."""
    columns = (*(labels or ["row"]), *(HEADS_SHOWN[short] for short in HEADS))
    found = []
    for site, title in SITE_TITLES.items():
        rows = []
        for name in names:
            first = [show_label(results.labels(name)[label]) for label in labels] or [name]
            rows.append((*first, *(results.cell(name, f"{site}_{short}") for short in HEADS)))
        found.append(Table(f"Heads: {title}", columns, rows, ("Validation data, all layers and heads.",)))
    return found


def observe_sites(translator: Translator, batches: Iterable[Batch], add: Callable[..., None]) -> None:
    """Decode batches with their own targets, and give every call of attention to `add`.

    Args:
        add: given a site, `real` [B, M], which says which queries are not padding, and an observation.
    """
    for batch in batches:
        with translator.inference(), ExitStack() as stack:
            for site in weighing_sites(translator.model):
                real = real_queries(site.kind, batch)
                stack.enter_context(observing(site.attention, partial(add, site.kind, real)))
            decode_forced(translator, batch)


def measure_attention(translator: Translator, task: Task) -> dict[str, float]:
    """Zeros, null rate, row mass and entropy of each site, on the validation pairs as the model trains on them."""
    meters: dict[str, HeadMeter] = defaultdict(lambda: HeadMeter(1))

    def add(site: str, real: Tensor, seen: Observation) -> None:
        per_head = HeadMeter(seen.q.shape[1])
        per_head.update(seen.stats(), real.to(seen.q.device))
        meters[site].merge(per_head.pooled().state())

    observe_sites(translator, valid_batches(translator, task), add)
    return {
        f"{site}_{short}": getattr(meter.result(), measure)[0]
        for site, meter in meters.items()
        for short, measure in HEADS.items()
    }


def measure_shapes(translator: Translator, batches: Iterable[Batch]) -> dict[str, dict[str, float]]:
    """Shares of zeros by shape at each site, all layers and heads together."""
    meters: dict[str, ShapeMeter] = defaultdict(ShapeMeter)
    observe_sites(translator, batches, lambda site, real, seen: meters[site].update(seen, real))
    return {site: meter.shares() for site, meter in meters.items()}


class ShapeMeter:
    """Counts shapes that are visible in part, and those of them that are zeros throughout."""

    def __init__(self) -> None:
        self.visible, self.zeros = (dict.fromkeys(SHAPES, 0) for _ in range(2))

    def update(self, seen: Observation, real: Tensor) -> None:
        """Add a call; `real` [B, M] says which queries are not padding. Each query sees the first keys, up to some."""
        weights = seen.weights()
        keys = torch.arange(weights.shape[-1], device=weights.device)
        visible = (keys < seen.visible()[..., None]) & real.to(weights.device)[:, None, :, None]
        visible = visible.expand_as(weights)
        used = (weights != 0) & visible
        for name, shape in SHAPES.items():
            some = any_in_tile(visible, *shape)
            self.visible[name] += int(some.sum())
            self.zeros[name] += int((some & ~any_in_tile(used, *shape)).sum())

    def shares(self) -> dict[str, float]:
        """Of the visible shapes, the share that is zeros throughout."""
        return {name: rounded(self.zeros[name] / max(1, self.visible[name])) for name in SHAPES}


def any_in_tile(cells: Tensor, height: int, width: int) -> Tensor:
    """True for each `height` x `width` tile of [..., M, N] with a True cell."""
    M, N = cells.shape[-2:]
    padded = F.pad(cells, (0, -N % width, 0, -M % height))
    return padded.unflatten(-1, (-1, width)).any(-1).unflatten(-2, (-1, height)).any(-2)


def describe_sites(found: Findings) -> dict[str, Any]:
    """Every layer of each site, means over heads; and for each site the mean over its layers."""
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
    means = {
        f"{site}_{measure}": rounded(fmean(each[measure] for each in sites if each["site"] == site))
        for site in dict.fromkeys(each["site"] for each in sites)
        for measure in (*HEADS, "js", "js_zero", "overlap")
    }
    return {"sites": sites, **means}


def describe_pairing(found: Findings) -> dict[str, Any]:
    """Null rates of cross-attention, by layer, with the right source and with that of another pair."""
    if found.shuffled is None:
        return {}
    own, other = ([rounded(rate) for rate in side.null_rate] for side in (found.shuffled.gold, found.shuffled.shuffled))
    return {"null_gold": own, "null_shuffled": other, "null_rise": rounded(fmean(other) - fmean(own))}


def rounded(value: float) -> float:
    """Five digits are more than seeds agree on, and keep results small."""
    return round(value, 5)


def valid_batches(translator: Translator, task: Task) -> Iterator[Batch]:
    """All validation pairs, in batches of similar length, the longest first."""
    pairs = Prepared.open(task.data, verify=False).valid
    assert pairs is not None
    lengths = (np.maximum(pairs.source_lengths, pairs.target_lengths) + 1).tolist()
    order = sorted(range(pairs.pairs), key=lambda index: -lengths[index])
    for indices in cut_batches(order, lengths, BATCH_TOKENS):
        yield collate(pairs, np.array(indices), symbols_of(translator))


def training_speed(folder: Path) -> float:
    """Target tokens per second: the median of what the run logged, which no validation or first step moves."""
    speeds = [record["tokens_per_second"] for record in read_metrics(folder / "metrics.jsonl") if "loss" in record]
    return median(speeds) if speeds else 0.0


def curve_of(folder: Path, measure: str) -> list[list[float]]:
    """Step and value of each record of a run that has the measure: `valid_bleu` of validations, `nll` of training."""
    records = read_metrics(folder / "metrics.jsonl")
    return [[record["step"], rounded(record[measure])] for record in records if measure in record]


def measure_losses(task: Task) -> dict[str, Any]:
    """Loss on validation text at the end of training, and at every validation until then."""
    curve = curve_of(task.run, "valid_loss")
    return {"valid_loss": curve[-1][1], "curve": curve}


def sentence_counts(hypotheses: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """For each sentence its matching n-grams and its n-grams of each order, and both lengths: what BLEU is made of."""
    from sacrebleu.metrics import BLEU

    metric = BLEU(effective_order=True)  # which shapes sentence scores only, not the counts
    scores = [metric.sentence_score(line, [right]) for line, right in zip(hypotheses, references, strict=True)]
    return np.array([[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores])


def length_ratio(counts: np.ndarray) -> float:
    """Length of all hypotheses over that of all references; below 1, BLEU has a brevity penalty."""
    length, right_length = counts[:, -2:].sum(0)
    return float(length / right_length)


def resampled_bleu(counts: np.ndarray, samples: int = SAMPLES) -> list[float]:
    """BLEU of resampled test sets: as many sentences, drawn with replacement.

    sacreBLEU's paired bootstrap needs all hypotheses at once, but these models are trained in processes that never
    meet. The seed gives two models with the same test set the same samples, so that `paired_p` gives its p-value.
    """
    drawn = np.random.default_rng(SAMPLING_SEED).choice(len(counts), size=(samples, len(counts)), replace=True)
    return [round(corpus_bleu(counts[sample].sum(0)), 3) for sample in drawn]


def corpus_bleu(totals: np.ndarray) -> float:
    """BLEU of summed counts, smoothed as sacreBLEU does by default."""
    from sacrebleu.metrics import BLEU

    *counts, length, right_length = (int(total) for total in totals)
    return float(BLEU.compute_bleu(counts[:ORDERS], counts[ORDERS:], length, right_length, smooth_method="exp").score)


def paired_p(first: Sequence[float], second: Sequence[float], difference: float) -> float:
    """How probable so large a `difference` of two systems is by chance, given both on the same resamples."""
    found = np.abs(np.asarray(first) - np.asarray(second))
    if not found.any():
        return 1.0  # sacreBLEU would call two that score alike in every resample different
    larger = int((found - found.mean() > abs(difference)).sum())
    return (larger + 1) / (len(found) + 1)
