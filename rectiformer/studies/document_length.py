"""Whole documents: translation quality by segment length, for several variants."""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

from rectiformer.measure.bleu import Score, score
from rectiformer.studies import measures, recipes
from rectiformer.studies.corpora import CORPORA, ONE, THREE, held_out_documents
from rectiformer.studies.figures import collect_lines, draw_panels, lines_against
from rectiformer.studies.plan import Scale, Study, Task, Training, configure, seeded
from rectiformer.studies.results import Claim, Figure, Results, Table, claims_table, judge_rows
from rectiformer.translate.documents import translate_documents
from rectiformer.translate.options import SearchOptions

LENGTHS = (1024, 2048, 512, 256, 128)
"""The paper's segment lengths: first the one it gives a number for, then the longest."""
VARIANTS = ("softmax", "rela-g", "reluformer")
DRAWN = (*VARIANTS, "sparsemax")
"""What the figures show; the tables have all variants."""
STARTS = {"smoke": "grammar", "small": "europarl-en-de"}
"""The corpora of `translation-quality` whose first seeds are trained further on documents, every seed from the same.
From scratch, a thousand subwords at a time, none learns to follow the source in the few updates of these scales."""
PLAN: dict[str, tuple[tuple[int, tuple[int, ...], tuple[str, ...], tuple[int, ...]], ...]] = {
    "smoke": ((0, (32,), VARIANTS[:2], ONE),),
    "small": ((4, LENGTHS[:1], VARIANTS, THREE), (9, LENGTHS[1:3], VARIANTS, ONE)),
    "paper": ((0, LENGTHS, (*VARIANTS, recipes.THRESHOLD, "sparsemax", "entmax15"), THREE),),
}
"""Tier, lengths, rows and seeds, in the order they run."""
UPDATE_TOKENS = {"smoke": 512, "small": 16_384, "paper": 16_384}
MICRO_BATCH_TOKENS = {"smoke": 512, "small": 16_384, "paper": 4096}
"""A micro-batch holds at least one segment."""
LONGER_THAN_A_SPEECH = 512
"""From this length on the speeches of a debate are joined."""
SHAPED = 8
"""Batches of validation segments, the longest first, whose zeros are counted by shape."""


def trainings(scale: Scale) -> list[Training]:
    """Lengths and rows, seed by seed; none of a variant whose model of sentences waits for its learning rate."""
    starts = find_starts(scale)
    found: list[Training] = []
    for tier, lengths, variants, seeds in PLAN[scale.name]:
        for seed, length, variant in product(seeds, lengths, variants):
            if scale.name not in STARTS or variant in starts:
                start = [f"training.init_from={starts[variant]}"] if variant in starts else []
                settings = (*at_length(scale, length), *recipes.attention_settings(variant), *start)
                config = configure(recipes.DOCUMENTS[scale.name], scale, *settings)
                found += seeded(
                    f"{variant}-{length}", (seed,), config, tier=tier, measuring=60, variant=variant, length=length
                )
    return found


def find_starts(scale: Scale) -> dict[str, str]:
    """Study and key of the model of sentences that each variant starts from."""
    return {
        row.variant: f"translation-quality/{row.name(corpus.name)}-seed{ONE[0]}"
        for corpus in CORPORA[scale.name]
        for row in corpus.rows
        if corpus.name == STARTS.get(scale.name)
    }


def at_length(scale: Scale, length: int) -> tuple[str, ...]:
    """Settings of a segment length: batches that hold a segment, updates of the same size, debates for long ones."""
    tokens = max(length, MICRO_BATCH_TOKENS[scale.name])
    update = recipes.training(batch_tokens=tokens, grad_accumulation=max(1, UPDATE_TOKENS[scale.name] // tokens))
    debates = recipes.EUROPARL_DEBATES if scale.name == "small" and length >= LONGER_THAN_A_SPEECH else ()
    return (*recipes.data(segment_length=length), *update, *debates)


def measure(task: Task) -> dict[str, Any]:
    """BLEU of documents and of their sentences on test data, attention on validation data, speed and memory."""
    translator, documents = measures.open_model(task), held_out_documents(task.scale)
    start = time.perf_counter()
    sources = [[source for source, _ in document] for document in documents]
    # All together: in parts, each would wait for its longest segment, and again for what falls back.
    batching: dict[str, Any] = {"buffer": sum(map(len, sources)), "batch_tokens": 2 * measures.TRANSLATED_TOKENS}
    options = SearchOptions(beam=measures.BEAM)
    found = list(translate_documents(translator, sources, options, **batching, warn=lambda _: None))
    seconds = time.perf_counter() - start
    references = [[target for _, target in document] for document in documents]
    whole = bleu([" ".join(each.sentences) for each in found], [" ".join(each) for each in references])
    single = bleu(list(chain(*(each.sentences for each in found))), list(chain(*references)))
    return {
        "d_bleu": whole.value,
        "s_bleu": single.value,
        measures.SIGNATURE: f"beam {measures.BEAM}, {whole.signature}",
        "fallbacks": sum(each.fallbacks for each in found) / max(1, sum(each.segments for each in found)),
        "tokens_per_second": sum(each.tokens for each in found) / max(1e-9, seconds),
        **measures.measure_cost(task),
        "curve": measures.curve_of(task.run, "nll"),
        "valid_loss": measures.measure_losses(task)["valid_loss"],
        **measures.measure_attention(translator, task),
        "shapes": measures.measure_shapes(translator, islice(measures.valid_batches(translator, task), SHAPED)),
    }


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    return score(hypotheses, references, ("bleu",))["bleu"]


def judge(results: Results) -> list[tuple[str, ...]]:
    """About equal at 128 and 256, ReLUFormer above softmax beyond."""
    found = []
    for length in sorted(set(lengths_of(results)) & set(LENGTHS)):
        own = at(results, length)
        for name in ("reluformer", recipes.THRESHOLD) if results.scale == "paper" else VARIANTS[2:]:
            paper = "+1.15 [T]" if length == 1024 else "above [T]"
            claim = Claim(name, "softmax", "above", paper, where=f"{length:,} subwords")
            equal = replace(claim, expected="equal", paper="about equal [T]")
            found += judge_rows([equal if length <= 256 else claim], own, "d_bleu", "d-BLEU")
    return found


def lengths_of(results: Results) -> list[int]:
    return sorted({results.labels(name)["length"] for name in results.names()})


def at(results: Results, length: int) -> Results:
    """The results of one length, named by variant."""
    return results.select(length=length).rename(lambda entry: str(entry.labels["variant"]))


def tables(results: Results) -> list[Table]:
    titles = {
        "d_bleu": "BLEU of documents (d-BLEU)",
        "s_bleu": "BLEU of their sentences (s-BLEU)",
        "valid_loss": "Final validation loss per subword",
    }
    return [
        claims_table(judge(results)),
        *(by_length(results, title, measure) for measure, title in titles.items()),
        *measures.heads_tables(results, by_variant(results), ("variant", "length")),
        cost_table(results),
    ]


def by_variant(results: Results) -> list[str]:
    """The rows of each variant together, from short to long."""
    order = list(dict.fromkeys(results.labels(name)["variant"] for name in results.names()))
    return sorted(
        results.names(), key=lambda name: (order.index(results.labels(name)["variant"]), results.labels(name)["length"])
    )


def by_length(results: Results, title: str, measure: str) -> Table:
    """A measure of each variant, one column per length."""
    lengths = lengths_of(results)
    rows = [
        (variant, *(at(results, length).cell(variant, measure) for length in lengths))
        for variant in dict.fromkeys(results.labels(row)["variant"] for row in results.names())
    ]
    columns = ("variant", *(f"{length:,} subwords" for length in lengths))
    return Table(f"{title} by segment length", columns, rows)


def cost_table(results: Results) -> Table:
    """Peak memory, and how many segments had to be translated in smaller ones."""
    rows = []
    for name in by_variant(results):
        peaks = results.values(name, "peak_bytes")
        peak = f"{max(peaks) / 2**30:.2f}" if peaks else ""
        labels = results.labels(name)
        rows.append((labels["variant"], f"{labels['length']:,}", peak, results.cell(name, "fallbacks", 3)))
    note = (
        "Fallbacks: share of segments whose translation did not have the sentences of its source, so that they were "
        "translated in smaller ones. Speed by length is in [efficiency](efficiency.md); these trainings share a GPU."
    )
    return Table("Memory and fallbacks", ("variant", "length", "peak device memory, GiB", "fallbacks"), rows, (note,))


def figures(results: Results, folder: Path) -> list[Figure]:
    """Quality by length, and losses while training."""
    measures = {"d_bleu": "d-BLEU", "s_bleu": "s-BLEU", "valid_loss": "validation loss per subword"}
    every = [lines_against(results, "variant", "length", measure) for measure in measures]
    lines = [{name: line for name, line in panel.items() if name in DRAWN} for panel in every]
    about, x = "Quality by segment length", "segment length in subwords"
    made = draw_panels(folder / "lengths.svg", about, list(measures.values()), lines, x, log_x=True)
    return made + draw_losses(results, folder / "losses.svg")


def draw_losses(results: Results, path: Path) -> list[Figure]:
    """Training loss against updates, one panel per length: whether training is stable there."""
    lengths = sorted({entry.labels["length"] for entry in results.finished})
    panels = [
        collect_lines(
            (entry.labels["variant"], step, loss)
            for entry in results.select(length=length).finished
            if entry.labels["variant"] in DRAWN
            for step, loss in entry.measures["curve"]
        )
        for length in lengths
    ]
    titles = [f"{length:,} subwords" for length in lengths]
    return draw_panels(path, "Loss while training", titles, panels, "updates", "training loss per subword")


DOCUMENT_LENGTH = Study(
    name="document-length",
    title="Whole documents by segment length",
    question="Does ReLU attention gain on softmax when a model reads more of a document at once?",
    paper="Shen et al. 2023, Europarl7 En-De: about equal at 128 and 256, ReLUFormer ahead from 512, by 1.15 BLEU at "
    "1,024; sparsemax fails to train at long lengths [T].",
    folders=recipes.DOCUMENT_FOLDERS,
    trainings=trainings,
    measure=measure,
    tables=tables,
    figures=figures,
)
