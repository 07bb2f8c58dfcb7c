"""What heads of the trained translators do: zeros, rows of nothing, diversity, by kind of attention and by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean

from rectiformer.studies.figures import draw_panels
from rectiformer.studies.measures import KINDS, SHAPES
from rectiformer.studies.plan import Study
from rectiformer.studies.quality import BASELINE, TRANSLATION_QUALITY, corpora_of, rows_of
from rectiformer.studies.results import Result, Results, estimate
from rectiformer.studies.tables import CLAIM, Claim, Table, claims_table, signed, verdict

SITE_MEASURES = {
    "zeros": "share of weights that are exactly 0",
    "null": "share of queries that attend to nothing",
    "js": "head diversity, Jensen-Shannon in nats",
}
OURS = "rela-g"
SiteValue = Callable[[Result], Iterable[float]]
Lines = dict[str, dict[float, list[float]]]
"""Values of all seeds at each place, by attention."""


def variant_of(results: Results, name: str) -> str:
    return str(results.labels(name)["variant"])


def sparsity_tables(results: Results) -> list[Table]:
    found = []
    for corpus in corpora_of(results):
        found += [heads_table(results, corpus), shapes_table(results, corpus)]
    return [*found, pairing_table(results), pairing_claims(results), diversity_claims(results)]


def heads_table(results: Results, corpus: str) -> Table:
    """Zeros, nothing and diversity of each kind of attention."""
    columns = [(kind, short) for kind in KINDS for short in ("zeros", "null", "js")]
    rows = [
        (variant_of(results, name), *(results.cell(name, f"{kind}_{short}", 3) for kind, short in columns))
        for name in rows_of(results, corpus)
    ]
    note = (
        "Test pairs under forced decoding, means over layers and heads, 95 % interval over seeds. zeros: share of "
        "weights that are exactly 0; null: share of queries that attend to nothing; js: diversity of the heads that "
        "attend to something, in nats."
    )
    return Table(f"Heads, {corpus}", ("attention", *(f"{kind} {short}" for kind, short in columns)), rows, (note,))


def shapes_table(results: Results, corpus: str) -> Table:
    """Zeros by shape in attention to the source, where most zeros are."""
    rows = []
    for name in rows_of(results, corpus):
        for kind in KINDS:
            shares = [
                estimate([entry.measures["shapes"][kind][shape] for entry in results.of(name)]) for shape in SHAPES
            ]
            if shares[0] is not None and shares[0].mean > 0:
                cells = ("" if share is None else share.describe(3) for share in shares)
                rows.append((variant_of(results, name), kind, *cells))
    note = "Of the shapes that a query sees in part: how many are zeros throughout. Pages are of keys of one query."
    return Table(f"Zeros by shape, {corpus}", ("attention", "kind", *SHAPES), rows, (note,))


def pairing_table(results: Results) -> Table:
    """Whether heads attend to nothing more often beside the source of another pair."""
    rows = []
    for corpus in corpora_of(results):
        for name in rows_of(results, corpus):
            entries = [entry for entry in results.of(name) if any(entry.measures.get("null_shuffled", ()))]
            if not entries:
                continue
            sides = [
                estimate([fmean(entry.measures[side]) for entry in entries]) for side in ("null_gold", "null_shuffled")
            ]
            rise = estimate([entry.measures["null_rise"] for entry in entries])
            assert rise is not None
            shown = ("" if side is None else side.describe(3) for side in sides)
            rows.append((corpus, variant_of(results, name), *shown, signed(rise, 3)))
    columns = ("corpus", "attention", "gold pairs", "shuffled pairs", "rise")
    note = "Attention to the source, all layers and heads: share of target positions that attend to nothing."
    return Table("Null rate with the right source and with another one", columns, rows, (note,))


def pairing_claims(results: Results) -> Table:
    """Whether the null rate of our attention to the source rises, on every corpus."""
    rows = []
    for corpus in corpora_of(results):
        claim = Claim(f"{corpus}-{OURS}, shuffled pairs", "gold pairs", "above", "above [R-]")
        if (rise := results.estimate(f"{corpus}-{OURS}", "null_rise")) is not None:
            rows.append((claim.describe(), claim.paper, signed(rise, 3), verdict(rise, claim)))
    return Table("Null rate, claims", (CLAIM, "paper, null rate", "ours, null rate", "verdict"), rows)


def diversity_claims(results: Results) -> Table:
    claims = [
        Claim(f"{corpus}-{OURS}", f"{corpus}-{variant}", "above", "highest of all [S]")
        for corpus in corpora_of(results)
        for variant in (BASELINE, "sparsemax", "entmax15")
    ]
    return claims_table("Diversity of heads, attention to the source", claims, results, "cross_js", "nats")


def sparsity_figures(results: Results, folder: Path) -> list[Path]:
    """Each measure by layer, and zeros by the length of the source; a panel a kind of attention. Attention that has no
    zeros, or always attends to something, is not shown as a line along the floor."""
    made, variants = [], [variant_of(results, name) for name in results.names()]
    for corpus in corpora_of(results):
        for measure, about in SITE_MEASURES.items():
            panels = above_zero([by_layer(results, corpus, site_values(kind, measure)) for kind in KINDS], variants)
            made += draw_panels(folder / f"{corpus}-{measure}.svg", list(KINDS), panels, "layer", about)
        panels = above_zero([by_length(results, corpus, kind) for kind in KINDS], variants)
        made += draw_panels(
            folder / f"{corpus}-zeros-by-length.svg", list(KINDS), panels, "subwords of the source", "zeros"
        )
    return made


def above_zero(panels: Sequence[Lines], names: Iterable[str]) -> list[Lines]:
    """Panels of all these models, which so look the same in every figure, with points where one is not 0 everywhere."""

    def has_any(name: str) -> bool:
        return any(value for panel in panels for several in panel.get(name, {}).values() for value in several)

    return [{name: panel.get(name, {}) if has_any(name) else {} for name in names} for panel in panels]


def site_values(kind: str, measure: str) -> SiteValue:
    """What gives a measure of each layer of a kind of attention."""

    def values(entry: Result) -> list[float]:
        return [site[measure] for site in entry.measures["sites"] if site["kind"] == kind]

    return values


def by_layer(results: Results, corpus: str, values: SiteValue) -> Lines:
    """Lines of a figure: a value a layer, all seeds."""
    lines: Lines = {}
    for name in rows_of(results, corpus):
        for entry in results.of(name):
            for layer, value in enumerate(values(entry), 1):
                lines.setdefault(variant_of(results, name), {}).setdefault(layer, []).append(value)
    return lines


def by_length(results: Results, corpus: str, kind: str) -> Lines:
    """The same of zeros, a value a bin of lengths, which stands where the bin begins."""
    lines: Lines = {}
    for name in rows_of(results, corpus):
        for entry in results.of(name):
            found = entry.measures["zeros_by_length"][kind]
            for start, share in zip(found["from"], found["zeros"], strict=False):  # after the starts comes the end
                lines.setdefault(variant_of(results, name), {}).setdefault(start, []).append(share)
    return lines


SPARSITY = Study(
    name="sparsity",
    title="Zeros, null rate and diversity of heads",
    question="How sparse is trained attention, how often does a head attend to nothing, how much do heads differ?",
    paper="Zhang et al. 2021: ReLA is sparsest or near sparsemax, its heads are the most diverse, and some attend to "
    "nothing for many queries, more so where source and target do not belong together [S claim; R+, R- details].",
    folders=TRANSLATION_QUALITY.folders,
    shows=TRANSLATION_QUALITY,
    tables=sparsity_tables,
    figures=sparsity_figures,
)
