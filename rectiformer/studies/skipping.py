"""Sparsity worth having: how the zeros of models of documents lie, by length."""

from __future__ import annotations

from pathlib import Path

from rectiformer.studies.documents import DOCUMENT_LENGTH
from rectiformer.studies.figures import draw_panels
from rectiformer.studies.measures import KINDS, SHAPES
from rectiformer.studies.plan import Study
from rectiformer.studies.results import Results, estimate
from rectiformer.studies.tables import Table


def rows_by_length(results: Results) -> list[str]:
    """The rows whose attention has zeros, by attention and length."""
    sparse = [name for name in results.names() if any(value > 0 for value in results.values(name, "cross_zeros"))]
    return sorted(sparse, key=lambda name: (results.labels(name)["variant"], results.labels(name)["length"]))


def tables(results: Results) -> list[Table]:
    return [shapes_table(results)]


def shapes_table(results: Results) -> Table:
    rows = []
    for name in rows_by_length(results):
        labels = results.labels(name)
        for kind in KINDS:
            shares = [
                estimate([entry.measures["shapes"][kind][shape] for entry in results.of(name)]) for shape in SHAPES
            ]
            cells = ("" if share is None else share.describe(3) for share in shares)
            rows.append((labels["variant"], str(labels["length"]), kind, *cells))
    note = (
        "Validation segments under forced decoding. Of the shapes that a query sees in part: how many are zeros "
        "throughout, all layers and heads. Pages are of keys of one query, tiles of as many queries as keys."
    )
    return Table("Zeros by shape and length", ("attention", "length", "kind", *SHAPES), rows, (note,))


def figures(results: Results, folder: Path) -> list[Path]:
    """Zeros of each shape against the length: a figure a kind of attention, a panel a place."""
    found: dict[str, list[dict[str, dict[float, list[float]]]]] = {}
    for name in rows_by_length(results):
        labels = results.labels(name)
        panels = found.setdefault(labels["variant"], [{} for _ in KINDS])
        for panel, kind in zip(panels, KINDS, strict=True):
            for shape in SHAPES:
                values = [entry.measures["shapes"][kind][shape] for entry in results.of(name)]
                panel.setdefault(shape, {})[labels["length"]] = values
    return [
        path
        for variant, panels in found.items()
        for path in draw_panels(
            folder / f"shapes-{variant}.svg",
            [f"{variant}, {kind}" for kind in KINDS],
            panels,
            "subwords of a segment",
            "share that is zeros",
            log=True,
        )
    ]


SKIPPING = Study(
    name="skipping",
    title="Sparsity worth having",
    question="How many zeros of trained models lie in whole pages and tiles, which alone can be left out?",
    paper="Neither paper skips zeros. What skipping them gained is in docs/log.md.",
    folders=DOCUMENT_LENGTH.folders,
    shows=DOCUMENT_LENGTH,
    tables=tables,
    figures=figures,
)
