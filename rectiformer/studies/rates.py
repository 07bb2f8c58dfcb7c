"""Learning rates: which one each kind of attention learns best at, by validation loss; the same are offered to all."""

from __future__ import annotations

from typing import Any

from rectiformer.studies.corpora import OPEN, THRESHOLD
from rectiformer.studies.measures import curve_of, rounded
from rectiformer.studies.plan import Scale, Study, Trained, Training, configure, seeded
from rectiformer.studies.quality_corpora import find_corpus, settings_of, within
from rectiformer.studies.results import Results
from rectiformer.studies.tables import Table

KINDS = ("softmax", "rela-g", THRESHOLD, OPEN)
TRIED: dict[str, tuple[tuple[str, tuple[str, ...], tuple[float, ...]], ...]] = {
    "smoke": (("grammar", ("rela-g",), (3e-3, 6e-3)),),
    "small": (("europarl-en-de", KINDS, (2e-3, 4e-3)), ("multi30k-de-en", KINDS, (1e-3, 2e-3))),
    "paper": (("iwslt14-de-en", KINDS, (5e-4, 1e-3)),),
}
"""Corpora of `translation-quality`, the attention and the rates tried on each."""


def trainings(scale: Scale) -> list[Training]:
    """Corpus by corpus, one seed: those of `translation-quality` with another rate."""
    found: list[Training] = []
    for name, kinds, rates in TRIED[scale.name]:
        corpus = find_corpus(scale, name)
        for variant in kinds:
            for rate in rates:
                settings = (*settings_of(corpus, variant), f"training.rate={rate}")
                config = configure(settings, within(scale, corpus))
                labels: dict[str, str | float] = {"corpus": name, "variant": variant, "rate": rate}
                found += seeded(f"{name}-{variant}-{rate:g}", (1,), config, form=corpus.form, **labels)
    return found


def measure(run: Trained) -> dict[str, Any]:
    """What validation found while it trained."""
    losses, scores = curve_of(run.folder, "valid_loss"), curve_of(run.folder, "valid_bleu")
    best = min(losses, key=lambda point: point[1])
    found = {"valid_loss": rounded(best[1]), "step": best[0], "valid_bleu": max(score for _, score in scores)}
    return {**found, "curve": losses}


def tables(results: Results) -> list[Table]:
    """Kinds and rates, a table a corpus."""
    corpora = dict.fromkeys(str(results.labels(name)["corpus"]) for name in results.names())
    columns = ("attention", "rate", "least validation loss", "after updates", "most validation BLEU")
    note = "One seed; BLEU of greedy search. The rate with the least loss is the one `translation-quality` uses."
    return [Table(corpus, columns, rows_of(results, corpus), (note,)) for corpus in corpora]


def rows_of(results: Results, corpus: str) -> list[tuple[str, ...]]:
    rows = []
    for name in results.names():
        labels = results.labels(name)
        if labels["corpus"] == corpus:
            cells = (
                results.cell(name, key, digits) for key, digits in (("valid_loss", 3), ("step", 0), ("valid_bleu", 1))
            )
            rows.append((str(labels["variant"]), f"{labels['rate']:g}", *cells))
    return rows


RATES = Study(
    name="rates",
    title="Learning rates",
    question="At which rate does each kind of attention learn best?",
    paper="Both papers use one recipe for all kinds of attention, made for softmax [R: recalled].",
    folders={"small": "data", "paper": "data"},
    trainings=trainings,
    measure=measure,
    tables=tables,
)
