"""What several studies measure of a trained model: translations, attention, memories, speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from rectiformer.analyze.findings import analyze
from rectiformer.analyze.sparsity import HeadMeter
from rectiformer.analyze.survey import BATCH_TOKENS, observing, real_queries, weighing_sites
from rectiformer.model.attention import Observation
from rectiformer.runs.metrics import read_metrics
from rectiformer.studies.corpora import Pair
from rectiformer.studies.plan import Trained
from rectiformer.text.batches import Batch, collate
from rectiformer.text.prepared import Prepared
from rectiformer.translate.evaluate import evaluate
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.score import decode_forced, symbols_of
from rectiformer.translate.translator import Translator, cut_batches

BEAM = 4
SIGNATURE = "signature"
"""The measure that is no number: how BLEU was counted."""
KINDS = ("encoder", "decoder", "cross")
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


def measure_translation(translator: Translator, pairs: Sequence[Pair], prefix: str = "") -> dict[str, Any]:
    """BLEU and chrF by beam search, and the speed of it."""
    sources, references = [source for source, _ in pairs], [target for _, target in pairs]
    found = evaluate(translator, sources, references, SearchOptions(beam=BEAM), warn=lambda _: None)
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
                stack.enter_context(observing(site, partial(add_heads, meter, site.kind, batch)))
            decode_forced(translator, batch)
    return {
        f"{kind}_{short}": getattr(meter.result(), measure)[0]
        for kind, meter in meters.items()
        for short, measure in HEADS.items()
    }


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
    meter.merge(each.pooled())


def measure_memories(translator: Translator, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """All that is known of each memory, encoder first, from these pairs under forced decoding."""
    findings = analyze(translator, pairs, quality=False, warn=lambda _: None)
    return [asdict(memory) for memory in findings.memories]


def training_speed(folder: Path) -> float:
    """Target tokens a second: the median of what the run logged, which no validation or first step moves."""
    speeds = [record["tokens_per_second"] for record in read_metrics(folder / "metrics.jsonl") if "loss" in record]
    return median(speeds) if speeds else 0.0


def validation_curve(folder: Path) -> list[list[float]]:
    """Step and BLEU of each validation while training."""
    records = read_metrics(folder / "metrics.jsonl")
    return [[record["step"], record["valid_bleu"]] for record in records if "valid_bleu" in record]
