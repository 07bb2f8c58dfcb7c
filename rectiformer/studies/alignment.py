"""Word alignment by cross-attention: error by layer in four panels, and the lowest vs. a statistical aligner."""

from pathlib import Path

from rectiformer.studies.corpora import Gold, find_corpus
from rectiformer.studies.figures import collect_lines, draw_panels
from rectiformer.studies.plan import Study
from rectiformer.studies.results import Claim, Results, Table, claims_table, describe_all
from rectiformer.studies.sparsity import OURS
from rectiformer.studies.translation_quality import BASELINE, PANELS, TRANSLATION_QUALITY, corpora_of


def gold_sets(results: Results) -> list[tuple[str, Gold, Results]]:
    """Corpora with results, each of their gold sets, and the results."""
    found = corpora_of(results).items()
    return [(corpus, gold, own) for corpus, own in found for gold in find_corpus(results.scale, corpus).gold]


def alignment_tables(results: Results) -> list[Table]:
    found = []
    for corpus, gold, own in gold_sets(results):
        found += [best_table(own, corpus, gold), panels_table(own, corpus, gold)]
        claims = [Claim(f"{corpus}-{OURS}", f"{corpus}-{BASELINE}", "below", "-1.3, RWTH set [S, read off]")]
        found.append(claims_table(f"Lowest error, {gold.name}", claims, results, f"aer_{gold.name}", "AER in %"))
    return found


def best_table(results: Results, corpus: str, gold: Gold) -> Table:
    """The lowest error of each row, where it was, and how far one set of sentences decides it."""
    rows = []
    for entry in sorted(results.finished, key=lambda entry: results.names().index(entry.name)):
        best = entry.measures[f"alignment_{gold.name}"]["best"]
        low, high = best["interval"]
        head = best["head"] if isinstance(best["head"], str) else best["head"] + 1
        where = f"layer {best['layer'] + 1}, head {head}, {best['induction']}"
        error = f"{entry.measures[f'aer_{gold.name}']:.1f} ({low:.1f} to {high:.1f})"
        rows.append((entry.labels["variant"], str(entry.seed), error, where, gold.aligner))
    columns = ("variant", "seed", "lowest AER, %, and its 95 % interval over sentences", "where", "eflomal, %")
    note = "The best of all layers, heads and inductions on the set itself, as in the paper. Layers and heads from 1."
    return Table(f"Alignment, {gold.name} ({corpus})", columns, rows, (note,))


def panels_table(results: Results, corpus: str, gold: Gold) -> Table:
    """The four panels of the paper's figure, one column per layer."""
    rows, layers = [], 0
    for panel in PANELS:
        for name in results.names():
            seeds = [entry.measures[f"alignment_{gold.name}"]["panels"][panel] for entry in results.of(name)]
            cells = describe_all(zip(*seeds, strict=True), 1)
            layers = max(layers, len(cells))
            rows.append((panel, results.labels(name)["variant"], *cells))
    columns = ("panel", "variant", *(f"layer {layer + 1}" for layer in range(layers)))
    full = [(*row, *[""] * (len(columns) - len(row))) for row in rows]
    return Table(f"AER by layer, %, {gold.name} ({corpus})", columns, full)


def alignment_figures(results: Results, folder: Path) -> list[Path]:
    made = []
    for _, gold, own in gold_sets(results):
        panels = [
            collect_lines(
                (entry.labels["variant"], layer, error)
                for entry in own.finished
                for layer, error in enumerate(entry.measures[f"alignment_{gold.name}"]["panels"][panel], 1)
            )
            for panel in PANELS
        ]
        made += draw_panels(folder / f"{gold.name}.svg", PANELS, panels, "decoder layer", "AER, %")
    return made


ALIGNMENT = Study(
    name="alignment",
    title="Word alignment by cross-attention",
    question="Does rectified attention align words better than softmax, and in which layer?",
    paper="Zhang et al. 2021, 508 sentences of RWTH, which are not available here: best overall ReLA-g, shifted, "
    "layer 2, AER about 31; softmax 32.5; averaging heads ruins the baselines but not ReLA [S figure, read off].",
    shows=TRANSLATION_QUALITY,
    tables=alignment_tables,
    figures=alignment_figures,
)
