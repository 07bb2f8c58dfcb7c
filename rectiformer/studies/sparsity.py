"""Sparsity: zeros, queries that attend to nothing and head diversity by site and layer; zeros by shape and length."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from rectiformer.studies.document_length import DOCUMENT_LENGTH
from rectiformer.studies.figures import Lines, collect_lines, draw_panels
from rectiformer.studies.measures import HEADS_SHOWN, SHAPES, SITE_TITLES
from rectiformer.studies.plan import Study
from rectiformer.studies.results import (
    Claim,
    Figure,
    Results,
    Table,
    claims_table,
    describe_all,
    estimate,
    judge_rows,
    signed,
    verdict_rows,
)
from rectiformer.studies.translation_quality import BASELINE, TRANSLATION_QUALITY, corpora_of, title_of

SITE_MEASURES = {
    **{short: HEADS_SHOWN[short] for short in ("zeros", "null")},
    "js": "diversity of heads, JS divergence (nats)",
}
OURS = "rela-g"
DRAWN = (BASELINE, OURS, "reluformer", "entmax15")
"""What the figures show; the tables have all variants."""
DRAWN_SHAPES = ("cells", "pages of 16", "pages of 64", "tiles of 64")
SHAPES_NOTE = "Of the shapes that a query sees in part: the share that is zeros throughout, all layers and heads. "


def sparsity_tables(results: Results) -> list[Table]:
    columns = corpora_of(results).values()
    judged = [row for own in columns for row in (*pairing_claims(own), *diversity_claims(own))]
    return [claims_table(judged), *map(heads_table, columns), pairing_table(results)]


def heads_table(results: Results) -> Table:
    """Zeros, null rate and diversity at each site."""
    rows = [
        (title, name, *(results.cell(name, f"{site}_{short}", 3) for short in SITE_MEASURES))
        for site, title in SITE_TITLES.items()
        for name in results.names()
    ]
    note = (
        "Test pairs under forced decoding, all layers and heads of a site; diversity is of the heads that attend to "
        "something."
    )
    return Table(f"Heads: {title_of(results)}", ("site", "variant", *SITE_MEASURES.values()), rows, (note,))


def shape_shares(results: Results, name: str, site: str) -> list[list[float]]:
    """For each shape its share of zeros in every seed."""
    return [[entry.measures["shapes"][site][shape] for entry in results.of(name)] for shape in SHAPES]


def pairing_table(results: Results) -> Table:
    """Whether heads attend to nothing more often when given the source of another pair."""
    rows = []
    for own in corpora_of(results).values():
        for name in own.names():
            entries = [entry for entry in own.of(name) if any(entry.measures.get("null_shuffled", ()))]
            if rise := estimate([entry.measures["null_rise"] for entry in entries]):
                sides = [[fmean(entry.measures[side]) for entry in entries] for side in ("null_gold", "null_shuffled")]
                rows.append((title_of(own), name, *describe_all(sides, 3), signed(rise, 3)))
    columns = ("text", "variant", "its own source", "the source of another pair", "rise")
    note = "Cross-attention, all layers and heads: share of target positions that attend to nothing."
    return Table("Null rate with the right and with a wrong source", columns, rows, (note,))


def pairing_claims(results: Results) -> list[tuple[str, ...]]:
    """Whether the null rate of our cross-attention rises with a wrong source."""
    rise = results.estimate(OURS, "null_rise")
    claim = Claim(f"{OURS}'s null rate with a wrong source", "that with the right one", "above", "above [R-]")
    return verdict_rows([(replace(claim, where=title_of(results)), rise)] if rise else [], "of all queries", 3)


def diversity_claims(results: Results) -> list[tuple[str, ...]]:
    """Whether our heads of cross-attention differ more than those of other variants."""
    where = f"diversity of heads, {title_of(results)}"
    others = (BASELINE, "sparsemax", "entmax15")
    claims = [Claim(OURS, other, "above", "highest of all [S]", where=where) for other in others]
    return judge_rows(claims, results, "cross_js", "nats")


def sparsity_figures(results: Results, folder: Path) -> list[Figure]:
    """Each measure by layer, one panel per site; a variant is left out where the measure is 0 throughout."""
    made = []
    for corpus, own in corpora_of(results).items():
        for measure, about in SITE_MEASURES.items():
            panels = above_zero([by_layer(own, site, measure) for site in SITE_TITLES], DRAWN)
            path, title = folder / f"{corpus}-{measure}.svg", f"{about[0].upper()}{about[1:]}: {title_of(own)}"
            made += draw_panels(path, title, list(SITE_TITLES.values()), panels, "layer", about)
    return made


def above_zero(panels: Sequence[Lines], names: Iterable[str]) -> list[Lines]:
    """The panels with every name, so that it looks the same in all figures, but no points where it is 0 throughout."""

    def has_any(name: str) -> bool:
        return any(value for panel in panels for several in panel.get(name, {}).values() for value in several)

    return [{name: panel.get(name, {}) if has_any(name) else {} for name in names} for panel in panels]


def by_layer(results: Results, site: str, measure: str) -> Lines:
    """A measure of a site by layer, from 1."""
    return collect_lines(
        (entry.labels["variant"], found["layer"] + 1, found[measure])
        for entry in results.finished
        for found in entry.measures["sites"]
        if found["site"] == site
    )


def rows_with_zeros(results: Results) -> list[str]:
    """The rows of models of documents whose attention has zeros, by variant and length."""
    sparse = [name for name in results.names() if any(value > 0 for value in results.values(name, "cross_zeros"))]
    return sorted(sparse, key=lambda name: (results.labels(name)["variant"], results.labels(name)["length"]))


def skipping_tables(results: Results) -> list[Table]:
    rows = [
        (labels["variant"], f"{labels['length']:,}", title, *describe_all(shape_shares(results, name, site), 3))
        for name in rows_with_zeros(results)
        for labels in [results.labels(name)]
        for site, title in SITE_TITLES.items()
    ]
    note = (
        f"Validation segments under forced decoding. {SHAPES_NOTE}A page is 16 or 64 keys of one query, a tile as many "
        f"queries as keys."
    )
    return [Table("Zeros by shape and length", ("variant", "length", "site", *SHAPES), rows, (note,))]


def skipping_figures(results: Results, folder: Path) -> list[Figure]:
    """Zeros of each shape against the length: one figure per variant, one panel per site."""
    names, made = rows_with_zeros(results), []
    for variant in dict.fromkeys(results.labels(name)["variant"] for name in names):
        entries = [entry for entry in results.select(variant=variant).finished if entry.name in names]
        panels = [
            collect_lines(
                (shape, entry.labels["length"], entry.measures["shapes"][site][shape])
                for entry in entries
                for shape in DRAWN_SHAPES
            )
            for site in SITE_TITLES
        ]
        path, about = folder / f"shapes-{variant}.svg", f"Zeros by shape and length: {variant}"
        titles, x = list(SITE_TITLES.values()), "segment length in subwords"
        made += draw_panels(path, about, titles, panels, x, "share that is zeros", log_x=True)
    return made


SPARSITY = Study(
    name="sparsity",
    title="Zeros, null rate and diversity of heads",
    question="How sparse is trained attention, how often does a head attend to nothing, how much do heads differ?",
    paper="Zhang et al. 2021: ReLA is sparsest or near sparsemax, its heads are the most diverse, and some attend to "
    "nothing for many queries, more so where source and target do not belong together [S, details R+ and R-].",
    shows=TRANSLATION_QUALITY,
    tables=sparsity_tables,
    figures=sparsity_figures,
)
SKIPPING = Study(
    name="skipping",
    title="Zeros that could be skipped",
    question="How many zeros of trained models fill whole pages and tiles, which are all that a kernel can skip?",
    paper="Neither paper skips zeros. What skipping them gained is in docs/log.md.",
    shows=DOCUMENT_LENGTH,
    tables=skipping_tables,
    figures=skipping_figures,
)
