"""Maps of attention for print: an exact zero is white, a weight has a shade, a row of nothing is hatched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rectiformer.analyze.figure_style import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rectiformer.analyze.record import Example, Side, SiteRecord

LABELED = 30
"""Most pieces of a side that are named."""
LARGEST = 256
"""Most pieces of a side that are drawn: the cells of more would be finer than print."""
CELL, WIDTH = 0.085, 5.25
"""Inches: side of a cell whose piece is named, and all columns of cells, which leaves 1.5 to names and scale."""

# The lightest shade is still apart from white, so that no weight looks like a zero; negative ones are orange.
POSITIVE = ((0.0, "#cfe1f0"), (1.0, "#08306b"))
SIGNED = ((0.0, "#7f2704"), (0.5, "#fdd9b5"), (0.5, "#cfe1f0"), (1.0, "#08306b"))


def draw_map(example: Example, layer: int | None = None) -> Figure | None:
    """Every head of one layer, to the source if there is a target; None if there is nothing to draw or too much.

    Args:
        layer: counted from 0; the last one if None or not in the example.
    """
    from matplotlib.figure import Figure

    site = choose_site(example, layer)
    if site is None or max(site.queries, site.keys) > LARGEST:
        return None
    queries, keys = names_of(example, site)
    columns = next((count for count in (4, 2) if count <= site.heads and CELL * count * site.keys <= WIDTH), 1)
    rows = -(-site.heads // columns)
    cell = min(CELL, WIDTH / columns / max(site.queries, site.keys))
    size = (cell * columns * site.keys + 1.5, rows * (cell * site.queries + 0.25) + (0.6 if keys else 0.1))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    colors = shades(site)
    for head, axis in enumerate(axes.flat):
        if head >= site.heads:
            axis.set_visible(False)
            continue
        cells = draw_head(axis, site, head, colors)
        axis.set_title(f"head {head + 1}")
        name_axes(axis, queries if head % columns == 0 else [], keys if head + columns >= site.heads else [])
    bar = figure.colorbar(cells, ax=axes, shrink=0.5, aspect=25, pad=0.01)
    bar.set_label(f"weight ({site.kind}, layer {site.layer + 1})")
    bar.outline.set_linewidth(0.4)
    return figure


def choose_site(example: Example, layer: int | None) -> SiteRecord | None:
    """The attention to draw: to the source, or what else there is."""
    kinds = {site.kind for site in example.sites}
    kind = next((kind for kind in ("cross", "decoder", "encoder") if kind in kinds), None)
    sites = sorted((site for site in example.sites if site.kind == kind), key=lambda site: site.layer)
    return next((site for site in sites if site.layer == layer), sites[-1] if sites else None)


def names_of(example: Example, site: SiteRecord) -> tuple[list[str], list[str]]:
    """What stands beside rows and under columns; nothing if there are too many."""
    source, target = pieces_of(example.source), pieces_of(example.target)
    queries = source if site.kind == "encoder" else target
    keys = {"encoder": source, "cross": source, "decoder": ["<s>", *target[:-1]]}[site.kind]
    return (queries, keys) if max(len(queries), len(keys)) <= LABELED else ([], [])


def pieces_of(side: Side | None) -> list[str]:
    return [] if side is None else [printable(piece.text) for piece in side.pieces]


def shades(site: SiteRecord) -> dict[str, Any]:
    """Color map and range of all heads: from 0, or as far below it as above where weights are negative."""
    from matplotlib.colors import LinearSegmentedColormap

    largest = float(np.abs(site.weights).max(initial=0)) or 1.0
    signed = bool((site.weights < 0).any())
    return {
        "cmap": LinearSegmentedColormap.from_list("weights", SIGNED if signed else POSITIVE),
        "clim": (-largest if signed else 0.0, largest),
    }


def draw_head(axis: Axes, site: SiteRecord, head: int, colors: dict[str, Any]) -> Any:
    """The cells of a head that are not 0, and its null rows; the cells, for their scale of color."""
    from matplotlib.collections import PatchCollection, PolyCollection
    from matplotlib.patches import Rectangle

    rows = slice(head * site.queries, (head + 1) * site.queries)
    starts = site.row_starts[head * site.queries : (head + 1) * site.queries + 1].astype(int)
    y = np.repeat(np.arange(site.queries), np.diff(starts))
    x = site.columns[starts[0] : starts[-1]].astype(int)
    corners = np.array([(0, 0), (1, 0), (1, 1), (0, 1)])
    cells = PolyCollection(
        np.stack([x, y], -1)[:, None] + corners,
        array=site.weights[starts[0] : starts[-1]],
        edgecolors="face",
        linewidths=0.1,
        rasterized=len(x) > 10_000,
        gid=f"weights-{head}",
        **colors,
    )
    axis.add_collection(cells)
    nulls = [Rectangle((0, int(row)), site.keys, 1) for row in np.flatnonzero(site.null[rows])]
    axis.add_collection(
        PatchCollection(nulls, facecolor="white", edgecolor="0.6", linewidth=0, hatch="//////", gid=f"null-{head}")
    )
    axis.set(xlim=(0, site.keys), ylim=(site.queries, 0), aspect="equal")
    return cells


def name_axes(axis: Axes, queries: list[str], keys: list[str]) -> None:
    """Pieces beside the rows and under the columns."""
    axis.set_yticks(np.arange(len(queries)) + 0.5, queries, fontsize=5.5)
    axis.set_xticks(np.arange(len(keys)) + 0.5, keys, fontsize=5.5, rotation=90)
    axis.tick_params(length=0, pad=1)
    axis.spines[:].set(visible=True, linewidth=0.4, color="0.5")
