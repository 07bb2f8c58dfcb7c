"""Figures for papers: small, readable in gray print, and the same bytes whenever they are drawn from the same data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rectiformer.config import SITES
from rectiformer.errors import ArgumentError, unknown_name
from rectiformer.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rectiformer.analyze.record import AttentionRecord, Example, Side, SiteRecord

Findings = dict[str, Any]
"""The JSON of one model's findings."""

NO_DATES: dict[str, dict[str, None]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {"Software": None}}
WIDTH = 6.75  # inches: both columns of a page
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "lines.linewidth": 1.1,
    "lines.markersize": 3.5,
    "hatch.linewidth": 0.5,
    "pdf.fonttype": 42,
    "svg.hashsalt": "rectiformer",
}
# Blue and vermilion of Okabe and Ito; without color, the dashes and the hollow marker tell the models apart.
LOOKS: tuple[dict[str, Any], ...] = (
    {"color": "#0072B2", "linestyle": "-", "marker": "o"},
    {"color": "#D55E00", "linestyle": "--", "marker": "s", "markerfacecolor": "white"},
)
# Tried in turn for the words of a map; those that are not installed are not asked for.
FONTS = ("DejaVu Sans", "Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Sans", "Droid Sans Fallback", "IPAGothic")
LABELED = 30
"""Most pieces of a side that are labeled."""
LARGEST = 256
"""Most pieces of a side that are drawn: more cells would be finer than print."""
CELL, MAP_WIDTH = 0.085, 5.25
"""Inches: size of a labeled cell, and width of all cells, which leaves 1.5 for labels and scale."""
# The lightest shade is still apart from white, so that no weight looks like a zero; negative ones are orange.
POSITIVE = ((0.0, "#cfe1f0"), (1.0, "#08306b"))
SIGNED = ((0.0, "#7f2704"), (0.5, "#fdd9b5"), (0.5, "#cfe1f0"), (1.0, "#08306b"))


def write_figures(
    findings: Sequence[Findings],
    records: Sequence[AttentionRecord],
    folder: str | Path,
    formats: Sequence[str] = ("svg", "pdf"),
) -> list[Path]:
    """Draw the findings and records of one model, or of two in the same axes, and return the files.

    A figure whose data are missing, such as the alignment error without gold links, is left out.

    Args:
        findings: one or two, as JSON; either may be empty if only the other's figures are wanted.
        records: whose examples to draw as maps of attention; the first four of each.
        formats: any of svg, pdf and png.
    """
    for name in formats:
        if name not in NO_DATES:
            raise ArgumentError(unknown_name("figure format", name, NO_DATES))
    if max(len(findings), len(records)) > len(LOOKS):
        raise ArgumentError(
            f"{len(findings)} findings and {len(records)} records, but a figure shows at most {len(LOOKS)} models"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with style():
        written = []
        for name, figure in draw_all(findings, records):
            figure.draw_without_rendering()
            figure.set_layout_engine("none")  # once is enough, and it takes most of the time
            for suffix in formats:
                written.append(folder / f"{name}.{suffix}")
                with replacing(written[-1]) as file:
                    figure.savefig(file, format=suffix, metadata=NO_DATES[suffix], dpi=300)
    return written


def draw_all(findings: Sequence[Findings], records: Sequence[AttentionRecord]) -> Iterator[tuple[str, Figure]]:
    """Name and figure of everything there are data for."""
    for name, draw in FIGURES.items():
        figure = draw(findings) if findings else None
        if figure is not None:
            yield name, figure
    for model, record in enumerate(records, 1):
        layer = best_layer(findings, record)
        for number, example in enumerate(record.examples[:4], 1):
            figure = draw_map(example, layer)
            if figure is not None:
                yield f"attention-{model}-{number}", figure


def best_layer(findings: Sequence[Findings], record: AttentionRecord) -> int | None:
    """The layer that aligns best according to the findings of the record's model; None without alignments."""
    for each in findings:
        if (each["model"]["id"], each["model"]["name"]) == (record.model.id, record.model.name) and each["alignment"]:
            return int(min(each["alignment"], key=lambda row: row["aer"])["layer"])
    return None


def draw_sparsity(findings: Sequence[Findings]) -> Figure | None:
    """Share of exact zeros by layer: the mean of the heads, and each head as a dash."""
    return draw_by_layer(findings, {"share of zeros": lambda site: site["sparsity"]}, bounds=(0, 1))


def draw_diversity(findings: Sequence[Findings]) -> Figure | None:
    """JS divergence of the heads, and how far they attend to the same keys."""
    measures: dict[str, Callable[[dict[str, Any]], list[float]]] = {
        "JS divergence (nats)": lambda site: [site["diversity"]["js"]],
        "overlap of supports": lambda site: [site["diversity"]["support_overlap"]],
    }
    return draw_by_layer(findings, measures, bounds=(0, None))


def draw_by_layer(
    findings: Sequence[Findings],
    measures: dict[str, Callable[[dict[str, Any]], list[float]]],
    bounds: tuple[float, float | None],
) -> Figure | None:
    """One row of panels per measure, one panel per site; a measure has one value per head, or a single one."""
    sites = present(findings, "sites", "kind")
    if not sites:
        return None
    figure, axes = panels(len(measures), len(sites))
    for row, (label, measure) in zip(axes, measures.items(), strict=True):
        row[0].set_ylabel(label)
        for axis, kind in zip(row, sites, strict=True):
            for look, each in zip(LOOKS, findings, strict=False):
                layers = {site["layer"] + 1: measure(site) for site in each["sites"] if site["kind"] == kind}
                draw_line(axis, look, sorted(layers), [layers[layer] for layer in sorted(layers)])
            axis.set_ylim(*bounds)
            by_layer(axis)
    for axis, kind in zip(axes[0], sites, strict=True):
        axis.set_title(kind)
    name_models(figure, [each["model"]["name"] for each in findings])
    return figure


def draw_null_rate(findings: Sequence[Findings]) -> Figure | None:
    """Share of queries that attend to nothing, one cell per head; heads that are never null are white."""
    sites = present(findings, "sites", "kind")
    if not sites:
        return None
    layers = max(site["layer"] + 1 for each in findings for site in each["sites"])
    figure, axes = panels(len(findings), len(sites), height=0.55 + 0.22 * layers, share="none")
    for row, each in zip(axes, findings, strict=True):
        for axis, kind in zip(row, sites, strict=True):
            rates = [site["null_rate"] for site in each["sites"] if site["kind"] == kind]
            draw_cells(axis, np.array(rates).reshape(len(rates), -1))
            axis.set_title(kind if len(findings) == 1 else f"{printable(each['model']['name'])}, {kind}")
            axis.set_xlabel("head")
        row[0].set_ylabel("layer")
    return figure


def draw_cells(axis: Axes, rates: np.ndarray) -> None:
    """Shares [layers, heads] as shades from white to dark, with the number inside."""
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list("rates", ["white", "#08519c"])
    axis.pcolormesh(rates, cmap=colors, vmin=0, vmax=1, edgecolors="0.7", linewidth=0.4)
    for (layer, head), rate in np.ndenumerate(rates):
        text = f"{rate:.2f}".removeprefix("0") if 0 < rate < 1 else f"{rate:.0f}"
        color = "white" if rate > 0.5 else "black"
        axis.text(head + 0.5, layer + 0.5, text, ha="center", va="center", fontsize=6, color=color)
    axis.set_xticks(np.arange(rates.shape[1]) + 0.5, map(str, range(1, rates.shape[1] + 1)))
    axis.set_yticks(np.arange(rates.shape[0]) + 0.5, map(str, range(1, rates.shape[0] + 1)))
    axis.tick_params(length=0)
    axis.invert_yaxis()
    axis.spines[:].set_visible(False)


def draw_aer(findings: Sequence[Findings]) -> Figure | None:
    """Alignment error by layer: normal and shifted induction, the best head and the average of all."""
    if not any(each["alignment"] for each in findings):
        return None
    figure, axes = panels(2, 2, width=WIDTH / 2 + 0.6, height=1.35, share="all")
    for row, induction in zip(axes, ("normal", "shifted"), strict=True):
        for axis, what in zip(row, ("best head", "average of heads"), strict=True):
            for look, each in zip(LOOKS, findings, strict=False):
                errors: dict[int, list[float]] = {}
                for found in each["alignment"] or []:
                    if found["induction"] == induction and (found["head"] == "average") == (what != "best head"):
                        errors.setdefault(found["layer"] + 1, []).append(found["aer"])
                draw_line(axis, look, sorted(errors), [[min(errors[layer])] for layer in sorted(errors)])
            axis.set_title(f"{induction}, {what}")
            by_layer(axis)
        row[0].set_ylabel("AER")
    axes[0, 0].set_ylim(0, 1)
    name_models(figure, [each["model"]["name"] for each in findings])
    return figure


def draw_lengths(findings: Sequence[Findings]) -> Figure | None:
    """Share of exact zeros against the length of the source: one point per bin of lengths, the mean of the layers."""
    sites = present(findings, "by_length", "kind")
    if not sites:
        return None
    figure, axes = panels(1, len(sites))
    for axis, kind in zip(axes[0], sites, strict=True):
        for look, each in zip(LOOKS, findings, strict=False):
            parts = [part for part in each["by_length"] if part["kind"] == kind and sum(part["rows"])]
            if parts:
                edges, filled = np.array(parts[0]["lengths"]), np.array(parts[0]["rows"]) > 0
                means = np.mean([part["sparsity"] for part in parts], axis=0)[filled]
                draw_line(axis, look, ((edges[:-1] + edges[1:] - 1) / 2)[filled], means[:, None])
        axis.set_title(kind)
        axis.set_xlabel("source length (subwords)")
        axis.set_ylim(0, 1)
    axes[0, 0].set_ylabel("share of zeros")
    name_models(figure, [each["model"]["name"] for each in findings])
    return figure


def draw_memories(findings: Sequence[Findings]) -> Figure | None:
    """Per memory: variance vs. the residual stream, anisotropy, slots used, share of the scores in the top slots."""
    sides = present(findings, "memories", "side")
    if not sides:
        return None
    measures = {"variance_ratio": "variance ratio", "anisotropy": "anisotropy", "used_slots": "share of slots used"}
    figure, axes = panels(len(sides), 4, share="none")
    for row, side in zip(axes, sides, strict=True):
        for look, each in zip(LOOKS, findings, strict=False):
            parts = [part for part in each["memories"] if part["side"] == side]
            for axis, measure in zip(row, measures, strict=False):
                draw_line(axis, look, [part["layer"] + 1 for part in parts], [[part[measure]] for part in parts])
            shares = sorted({share for part in parts for share in part["top_score_ratio"]}, key=float)
            ratios = [[part["top_score_ratio"][share] for part in parts] for share in shares]
            draw_line(row[3], look, [float(share) for share in shares], ratios)
        for axis in row[:3]:
            by_layer(axis)
        row[0].set(ylabel=side, ylim=(0, None))
        row[2].set_ylim(0, 1)
        row[3].set(xscale="log", ylim=(0, 1), xlabel="in the top share of slots")
    for axis, label in zip(axes[0], (*measures.values(), "share of scores"), strict=True):
        axis.set_title(label)
    name_models(figure, [each["model"]["name"] for each in findings])
    return figure


def present(findings: Sequence[Findings], part: str, key: str) -> list[str]:
    """The attention sites, or sides of the model, that a part of the findings is about."""
    return [kind for kind in SITES if any(entry[key] == kind for each in findings for entry in each[part])]


def draw_map(example: Example, layer: int | None = None) -> Figure | None:
    """Every head of one layer, of cross-attention if there is a target; None if there is nothing to draw or too much.

    Args:
        layer: counted from 0; the last one if None or not in the example.
    """
    from matplotlib.figure import Figure

    site = choose_site(example, layer)
    if site is None or max(site.queries, site.keys) > LARGEST:
        return None
    queries, keys = names_of(example, site)
    columns = next((count for count in (4, 2) if count <= site.heads and CELL * count * site.keys <= MAP_WIDTH), 1)
    rows = -(-site.heads // columns)
    cell = min(CELL, MAP_WIDTH / columns / max(site.queries, site.keys))
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
    """The attention to draw: cross-attention, or what else there is."""
    for kind in ("cross", "decoder", "encoder"):
        sites = {site.layer: site for site in example.sites if site.kind == kind}
        if sites:
            return sites[layer if layer in sites else max(sites)]
    return None


def names_of(example: Example, site: SiteRecord) -> tuple[list[str], list[str]]:
    """Labels of rows and columns; none if there are too many."""
    source, target = pieces_of(example.source), pieces_of(example.target)
    queries = source if site.kind == "encoder" else target
    keys = {"encoder": source, "cross": source, "decoder": ["<s>", *target[:-1]]}[site.kind]
    return (queries, keys) if max(len(queries), len(keys)) <= LABELED else ([], [])


def pieces_of(side: Side | None) -> list[str]:
    return [] if side is None else [printable(piece.text) for piece in side.pieces]


def shades(site: SiteRecord) -> dict[str, Any]:
    """Color map and range of all heads: from 0, or symmetric if weights are negative."""
    from matplotlib.colors import LinearSegmentedColormap

    largest = float(np.abs(site.weights).max(initial=0)) or 1.0
    signed = bool((site.weights < 0).any())
    return {
        "cmap": LinearSegmentedColormap.from_list("weights", SIGNED if signed else POSITIVE),
        "clim": (-largest if signed else 0.0, largest),
    }


def draw_head(axis: Axes, site: SiteRecord, head: int, colors: dict[str, Any]) -> Any:
    """Draw the nonzero cells of a head and its null rows; return the cells, for the color scale."""
    from matplotlib.collections import PatchCollection, PolyCollection
    from matplotlib.patches import Rectangle

    rows = slice(head * site.queries, (head + 1) * site.queries)
    starts = site.row_starts[head * site.queries : (head + 1) * site.queries + 1].astype(int)
    y = np.repeat(np.arange(site.queries), np.diff(starts))
    x = site.columns[starts[0] : starts[-1]].astype(int)
    corners = np.array([(0, 0), (1, 0), (1, 1), (0, 1)])
    cells = PolyCollection(
        np.stack([x, y], -1)[:, None] + corners, array=site.weights[starts[0] : starts[-1]], edgecolors="face",
        linewidths=0.1, rasterized=len(x) > 10_000, gid=f"weights-{head}", **colors,
    )  # fmt: skip
    axis.add_collection(cells)
    nulls = [Rectangle((0, int(row)), site.keys, 1) for row in np.flatnonzero(site.null[rows])]
    axis.add_collection(
        PatchCollection(nulls, facecolor="white", edgecolor="0.6", linewidth=0, hatch="//////", gid=f"null-{head}")
    )
    axis.set(xlim=(0, site.keys), ylim=(site.queries, 0), aspect="equal")
    return cells


def name_axes(axis: Axes, queries: list[str], keys: list[str]) -> None:
    """Pieces to the left of the rows and under the columns."""
    axis.set_yticks(np.arange(len(queries)) + 0.5, queries, fontsize=5.5)
    axis.set_xticks(np.arange(len(keys)) + 0.5, keys, fontsize=5.5, rotation=90)
    axis.tick_params(length=0, pad=1)
    axis.spines[:].set(visible=True, linewidth=0.4, color="0.5")


@contextmanager
def style() -> Iterator[None]:
    """Inside, matplotlib is set up for papers; ArgumentError if it is not installed."""
    try:
        import matplotlib
        from matplotlib.font_manager import fontManager
    except ImportError as error:
        raise ArgumentError("figures need matplotlib, which is not installed; pip install matplotlib") from error
    installed = set(fontManager.get_font_names())
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**STYLE, "font.family": [name for name in FONTS if name in installed]})
        warnings.filterwarnings("ignore", "Glyph .* missing")  # drawn as a box, which says so itself
        yield


def panels(
    rows: int, columns: int, width: float = WIDTH, height: float = 1.45, share: Literal["all", "row", "none"] = "row"
) -> tuple[Figure, np.ndarray]:
    """A figure with panels [rows, columns], each `height` inches high."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width if columns > 1 else WIDTH / 2, height * rows + 0.25), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, sharey=share)


def draw_line(axis: Axes, look: dict[str, Any], positions: Sequence[float], values: Sequence[Sequence[float]]) -> None:
    """A line through the mean of the values at each position and, where there are several, a dash for each."""
    for position, several in zip(positions, values, strict=True):
        if len(several) > 1:
            axis.plot(
                [position] * len(several), several, color=look["color"], marker="_", ls="", ms=4, mew=0.6, alpha=0.6
            )
    if len(positions):
        axis.plot(positions, [np.mean(several) for several in values], clip_on=False, **look)


def by_layer(axis: Axes) -> None:
    """Label the x-axis with layers, from 1."""
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel("layer")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def name_models(figure: Figure, names: Sequence[str]) -> None:
    """A legend above all panels, if there are two models to tell apart."""
    from matplotlib.lines import Line2D

    if len(names) > 1:
        lines = [Line2D([], [], **look) for look in LOOKS]
        figure.legend(lines, [printable(name, 40) for name in names], loc="outside upper center", ncols=2)


def printable(text: str, longest: int = 14) -> str:
    """Text as a figure can show it: truncated, without control characters, dollar signs escaped."""
    shown = "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text[:longest]
    )
    return (shown + ("…" if len(text) > longest else "")).replace("$", r"\$")


FIGURES: dict[str, Callable[[Sequence[Findings]], Figure | None]] = {
    "sparsity": draw_sparsity,
    "null-rate": draw_null_rate,
    "diversity": draw_diversity,
    "aer": draw_aer,
    "sparsity-by-length": draw_lengths,
    "memories": draw_memories,
}
