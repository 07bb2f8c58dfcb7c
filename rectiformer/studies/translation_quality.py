"""Translation quality: every variant on every corpus, and all that other studies show of these models."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rectiformer.analyze.findings import analyze
from rectiformer.measure.alignment import score_with_intervals
from rectiformer.studies import measures
from rectiformer.studies.corpora import CORPORA, Corpus, Pair, find_corpus, gold_pairs, held_out_pairs
from rectiformer.studies.plan import Scale, Study, Task, Training, configure, seeded
from rectiformer.studies.recipes import NORMS, THRESHOLD, attention_settings, choice_of
from rectiformer.studies.results import (
    Claim,
    Results,
    Table,
    claims_table,
    difference,
    judge_rows,
    row_of,
    signed,
)
from rectiformer.translate.align import AlignmentRow, align_direction
from rectiformer.translate.translator import Translator

ANALYZED = 1000
"""Most test pairs whose attention is analyzed."""
BASELINE = "softmax"
PENALTIES = (0.6, 0.8, 1.0, 1.2)
"""Length penalties to choose from on validation data."""
PANELS = ("normal, best head", "shifted, best head", "normal, average", "shifted, average")
PAPER_DIFFERENCES = {
    "rela-g": Claim("", "", "no worse", "-0.3 to +0.7 on four WMT tasks [S]", margin=0.3),
    **{name: Claim("", "", "above", "+0.34 on IWSLT14 [T]") for name in ("reluformer", THRESHOLD)},
    "sparsemax": Claim("", "", "equal", "-1.9 to +0.8 on four WMT tasks [S]"),
    "entmax15": Claim("", "", "equal", "-0.3 to +0.7 on four WMT tasks [S]"),
    "rela-i": Claim("", "", "equal", "within about 0.5 on WMT14 En-De [R-]"),
}

PAPER_BLEU = (
    ("ReLA's paper", "softmax", "sparsemax", "1.5-entmax", "ReLA-g"),
    ("---",) * 5,
    ("WMT14 En-Fr", "37.2", "37.3", "37.9", "37.9"),
    ("WMT18 En-Fi", "15.5", "15.1", "15.5", "15.4"),
    ("WMT18 Zh-En", "21.1", "19.2", "20.8", "20.8"),
    ("WMT16 Ro-En", "32.7", "33.5", "33.2", "32.9"),
)


def trainings(scale: Scale) -> list[Training]:
    """Corpus by corpus, the first seeds of each row before the second ones."""
    found: dict[str, Training] = {}
    for corpus in CORPORA[scale.name]:
        within = Scale(scale.name, scale.data and scale.data / corpus.folder)
        own: list[Training] = []
        for row in corpus.rows:
            settings = (*corpus.by_norm.get(row.norm, ()), *attention_settings(row.variant), *row.settings)
            config = configure(corpus.settings, within, *settings)
            labels: dict[str, Any] = {"corpus": corpus.name, **row.labels}
            how: dict[str, Any] = {"form": corpus.form, "tier": row.tier, "measuring": corpus.measuring}
            own += seeded(row.name(corpus.name), row.seeds, config, **how, **labels)
        for training in sorted(own, key=lambda each: (each.tier, each.seed)):
            found.setdefault(training.key, training)  # what was tried may be what was chosen
    return list(found.values())


def measure(task: Task) -> dict[str, Any]:
    """BLEU on test and validation data, what attention does on test data, alignment error where there is gold."""
    corpus, translator = find_corpus(task.scale.name, str(task.training.labels["corpus"])), measures.open_model(task)
    pairs = held_out_pairs(task.scale, corpus)
    valid = measures.measure_translation(translator, measures.valid_pairs(task), "valid_")
    found = measures.translate_pairs(translator, pairs)
    counts = measures.sentence_counts(found.hypotheses, [target for _, target in pairs])
    (task.folder / "hypotheses.txt").write_text("".join(f"{line}\n" for line in found.hypotheses), "utf-8")
    return {
        **valid,
        **measures.describe_translation(found),
        "length_ratio": measures.rounded(measures.length_ratio(counts)),
        "resampled": measures.resampled_bleu(counts),
        **measure_tuned(translator, measures.valid_pairs(task), pairs),
        **measures.measure_cost(task),
        **measures.measure_losses(task),
        **measure_heads(translator, pairs[:ANALYZED]),
        **measure_alignment(translator, task.scale, corpus),
    }


def measure_tuned(translator: Translator, valid: Sequence[Pair], pairs: Sequence[Pair]) -> dict[str, float]:
    """BLEU with the length penalty that is best on validation pairs: models generate more or less with the same one."""

    def bleu(pairs: Sequence[Pair], penalty: float) -> float:
        return measures.translate_pairs(translator, pairs, penalty).scores["bleu"].value

    best = max(PENALTIES, key=lambda penalty: bleu(valid, penalty))
    return {"length_penalty": best, "tuned_bleu": bleu(pairs, best)}


def measure_heads(translator: Translator, pairs: Sequence[Pair]) -> dict[str, Any]:
    """All measures of attention under forced decoding, by site and layer, and with the sources of other pairs."""
    found = analyze(translator, pairs, quality=False, warn=lambda _: None)
    return {**measures.describe_sites(found), **measures.describe_pairing(found)}


def measure_alignment(translator: Translator, scale: Scale, corpus: Corpus) -> dict[str, Any]:
    """For each gold set the AER in percent of every panel and layer, and the lowest with its interval."""
    found: dict[str, Any] = {}
    for gold in corpus.gold:
        pairs, links = gold_pairs(scale, gold)
        direction = align_direction(translator, pairs, links, tokenized=True)
        assert direction.best is not None
        low, high = score_with_intervals(direction.links, links).intervals["aer"]
        found[f"aer_{gold.name}"] = measures.rounded(100 * direction.best.score.aer)
        found[f"alignment_{gold.name}"] = {
            "best": {
                "layer": direction.best.layer,
                "head": direction.best.head,
                "induction": direction.best.induction,
                "interval": [measures.rounded(100 * low), measures.rounded(100 * high)],
            },
            "panels": {panel: panel_errors(direction.rows, panel) for panel in PANELS},
        }
    return found


def panel_errors(rows: Sequence[AlignmentRow], panel: str) -> list[float]:
    """The AER of each layer in one of `PANELS`: of its best head, or of the average of its heads."""
    induction, _, how = panel.partition(", ")
    layers: dict[int, list[float]] = {}
    for row in rows:
        if row.induction == induction and (row.head == "average") == (how == "average"):
            layers.setdefault(row.layer, []).append(row.score.aer)
    return [measures.rounded(100 * min(errors)) for _, errors in sorted(layers.items())]


def corpora_of(results: Results) -> dict[str, Results]:
    """The results of each column: a corpus in a norm placement, at the learning rates that were chosen.

    Rows are named by variant.
    """
    found: dict[str, Results] = {}
    for corpus in CORPORA[results.scale]:
        for norm in ("", *NORMS):
            entries = [
                entry
                for entry in results.entries
                if entry.labels.get("corpus") == corpus.name
                and entry.labels.get("norm", "") == norm
                and corpus.is_chosen(entry.labels)
            ]
            if entries:
                column = "-".join(filter(None, (corpus.name, norm)))
                found[column] = replace(results, entries=entries).rename(lambda entry: str(entry.labels["variant"]))
    return found


def column_of(results: Results, column: str) -> Results:
    """One of these columns, which may have no results yet."""
    return corpora_of(results).get(column, replace(results, entries=[]))


def corpus_of(results: Results) -> Corpus:
    """The corpus of a column."""
    return find_corpus(results.scale, results.entries[0].labels["corpus"])


def title_of(results: Results) -> str:
    """Corpus and norm placement of a column."""
    return corpus_of(results).title_in(results.entries[0].labels.get("norm", ""))


def tables(results: Results) -> list[Table]:
    columns = corpora_of(results).values()
    judged = [row for own in columns for row in judge_rows(claims(own), own, "bleu", "BLEU")]
    quality = [table for own in columns for table in (quality_table(own), length_table(own))]
    return [claims_table(judged), *quality, longer_table(results)]


def quality_table(results: Results) -> Table:
    """BLEU and chrF on one corpus, and how each row differs from softmax."""
    rows = []
    for name in results.names():
        cells = [results.cell(name, measure) for measure in ("bleu", "chrf", "valid_bleu")]
        rows.append((name, *cells, *versus_softmax(results, name)))
    columns = ("variant", "test BLEU", "test chrF", "validation BLEU", "Δ test BLEU vs. softmax", "p, each seed")
    note = "Beam 4. p: sacreBLEU's paired bootstrap over sentences, vs. softmax of the same seed."
    return Table(title_of(results), columns, rows, (note + describe_rates(results),))


def describe_rates(results: Results) -> str:
    """The learning rates of the rows of a column, where each has its own."""
    norm = results.entries[0].labels.get("norm", "")
    text = corpus_of(results).text
    rates = [f"{name} {choice_of(text, norm, name).chosen}" for name in results.names()] if text else []
    return f" Peak learning rates: {'; '.join(rates)}." if rates else ""


def length_table(results: Results) -> Table:
    """Length of translations vs. references, and BLEU with the length penalty chosen on validation data."""
    rows = []
    for name in results.names():
        if tuned := results.by_seed(name, "tuned_bleu"):
            length, penalty = results.cell(name, "length_ratio", 3), results.cell(name, "length_penalty", 1)
            delta = difference(tuned, results.by_seed(BASELINE, "tuned_bleu")) if name != BASELINE else None
            rows.append((name, length, penalty, results.cell(name, "tuned_bleu"), signed(delta)))
    columns = ("variant", "length ratio", "best length penalty", "test BLEU with it", "Δ test BLEU vs. softmax")
    note = (
        f"Length ratio: all translations over all references, with ReLA's length penalty of {measures.PENALTY}, as in "
        f"the table above. Best length penalty: of {', '.join(map(str, PENALTIES))}, on each model's validation data."
    )
    return Table(f"Length of translations: {title_of(results)}", columns, rows, (note,))


def longer_table(results: Results) -> Table:
    """The rows that are trained longer than the recipe says, next to the same seeds of the recipe."""
    rows = []
    for entry in results.finished:
        if "corpus" in entry.labels and "steps" in entry.labels:
            usual = results.by_seed(entry.name.removesuffix(f"-{entry.labels['steps']}"), "bleu").get(entry.seed)
            title = find_corpus(results.scale, entry.labels["corpus"]).title_in(entry.labels["norm"])
            shown = (f"{usual:.2f}" if usual is not None else "", f"{entry.measures['bleu']:.2f}")
            rows.append((title, entry.labels["variant"], f"{entry.seed}", *shown))
    columns = ("text", "variant", "seed", "test BLEU", "test BLEU, trained longer")
    return Table("Trained twice as long", columns, rows, ("Whether longer training would change the comparison.",))


def versus_softmax(results: Results, name: str) -> tuple[str, str]:
    """The difference in BLEU, and the p-value of each seed; nothing for softmax itself."""
    if name == BASELINE:
        return "", ""
    ours, theirs = (results.by_seed(row, "bleu") for row in (name, BASELINE))
    samples = [{entry.seed: entry.measures["resampled"] for entry in results.of(row)} for row in (name, BASELINE)]
    shared = sorted(ours.keys() & theirs.keys())
    values = [measures.paired_p(samples[0][seed], samples[1][seed], ours[seed] - theirs[seed]) for seed in shared]
    return signed(difference(ours, theirs)), ", ".join(f"{value:.3f}" for value in values)


def claims(results: Results) -> list[Claim]:
    """What the papers say of each variant vs. softmax, on one corpus."""
    return [
        replace(claim, first=variant, second=BASELINE, where=title_of(results))
        for variant, claim in PAPER_DIFFERENCES.items()
    ]


TRANSLATION_QUALITY = Study(
    name="translation-quality",
    title="Translation quality",
    question="Does rectified attention translate as well as softmax?",
    paper="Zhang et al. 2021 have the sacreBLEU below [S]; Shen et al. 2023 have 34.22 with softmax and 34.56 with "
    "ReLUFormer on IWSLT14 De-En [T].\n\n" + "\n".join(map(row_of, PAPER_BLEU)),
    folders={"small": ".", "paper": "."},
    trainings=trainings,
    measure=measure,
    tables=tables,
)
