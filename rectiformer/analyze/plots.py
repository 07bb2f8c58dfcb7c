"""Figures for papers: small, readable in gray print, and the same bytes whenever they are drawn from the same data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rectiformer.analyze.figure_style import LOOKS, WIDTH, by_layer, draw_line, name_models, panels, printable, style
from rectiformer.analyze.maps import draw_map
from rectiformer.errors import ArgumentError, unknown_name
from rectiformer.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rectiformer.analyze.record import AttentionRecord

Findings = dict[str, Any]
"""The JSON of one model's findings."""

NO_DATES: dict[str, dict[str, None]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {"Software": None}}
KINDS = ("encoder", "decoder", "cross")


def write_figures(
    findings: Sequence[Findings],
    records: Sequence[AttentionRecord],
    folder: str | Path,
    formats: Sequence[str] = ("svg", "pdf"),
) -> list[Path]:
    """Draw what one model did, or two in the same axes, and say which files were written.

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
    """Every figure for which there are data, with its name."""
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
    """The layer that aligns best in the findings of the record's model, if they say."""
    for each in findings:
        if (each["model"]["id"], each["model"]["name"]) == (record.model.id, record.model.name) and each["alignment"]:
            return int(min(each["alignment"], key=lambda row: row["aer"])["layer"])
    return None


def draw_sparsity(findings: Sequence[Findings]) -> Figure | None:
    """Share of exact zeros by layer: the mean of the heads, and each head as a dash."""
    return draw_by_layer(findings, {"share of zeros": lambda site: site["sparsity"]}, bounds=(0, 1))


def draw_diversity(findings: Sequence[Findings]) -> Figure | None:
    """Jensen-Shannon divergence of the heads, and how much of what they weigh they share."""
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
    """A row of panels a measure, a panel a kind; the measure has a number a head, or one in all."""
    kinds = present(findings, "sites", "kind")
    if not kinds:
        return None
    figure, axes = panels(len(measures), len(kinds))
    for row, (label, measure) in zip(axes, measures.items(), strict=True):
        row[0].set_ylabel(label)
        for axis, kind in zip(row, kinds, strict=True):
            for look, each in zip(LOOKS, findings, strict=False):
                layers = {site["layer"] + 1: measure(site) for site in each["sites"] if site["kind"] == kind}
                draw_line(axis, look, sorted(layers), [layers[layer] for layer in sorted(layers)])
            axis.set_ylim(*bounds)
            by_layer(axis)
    for axis, kind in zip(axes[0], kinds, strict=True):
        axis.set_title(kind)
    name_models(figure, [each["model"]["name"] for each in findings])
    return figure


def draw_null_rate(findings: Sequence[Findings]) -> Figure | None:
    """Share of queries that attend to nothing, a cell a head; heads that are never null are white."""
    kinds = present(findings, "sites", "kind")
    if not kinds:
        return None
    layers = max(site["layer"] + 1 for each in findings for site in each["sites"])
    figure, axes = panels(len(findings), len(kinds), height=0.55 + 0.22 * layers, share="none")
    for row, each in zip(axes, findings, strict=True):
        for axis, kind in zip(row, kinds, strict=True):
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
    """Share of exact zeros against the length of the source: a point a bin of lengths, the mean of the layers."""
    kinds = present(findings, "by_length", "kind")
    if not kinds:
        return None
    figure, axes = panels(1, len(kinds))
    for axis, kind in zip(axes[0], kinds, strict=True):
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
    """Of each memory: variance against the residual stream, anisotropy, slots used, how few slots hold the scores."""
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
    """The kinds of attention, or sides of the model, that a part of the findings is about."""
    return [kind for kind in KINDS if any(entry[key] == kind for each in findings for entry in each[part])]


FIGURES: dict[str, Callable[[Sequence[Findings]], Figure | None]] = {
    "sparsity": draw_sparsity,
    "null-rate": draw_null_rate,
    "diversity": draw_diversity,
    "aer": draw_aer,
    "sparsity-by-length": draw_lengths,
    "memories": draw_memories,
}
