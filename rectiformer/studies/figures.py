"""Figures of studies: one line per model through the mean of its seeds, all seeds as dashes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rectiformer.analyze.plots import NO_DATES, draw_line, panels, printable, style
from rectiformer.files import replacing
from rectiformer.studies.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # of Okabe and Ito
DASHES = ("-", "--", "-.", ":")
MARKERS = "osD^vPX*<>"
LEGEND_LINE = 0.14  # inches
MARKED = 8
"""Most points of a line that get a marker; more would run together."""

Line = Mapping[float, Sequence[float]]
"""Values of all seeds at each x."""
Lines = dict[str, dict[float, list[float]]]
"""The lines of a panel, by model."""


def collect_lines(points: Iterable[tuple[str, float, float]]) -> Lines:
    """Lines from points: the model, x, and the value of a seed there."""
    lines: Lines = {}
    for name, x, value in points:
        lines.setdefault(name, {}).setdefault(x, []).append(value)
    return lines


def lines_against(results: Results, label: str, x: str, measure: str) -> Lines:
    """A measure against the label `x`, one line per value of another label."""
    return collect_lines(
        (entry.labels[label], entry.labels[x], entry.measures[measure])
        for entry in results.finished
        if measure in entry.measures
    )


def line_style(number: int) -> dict[str, Any]:
    """How line `number` is drawn: the first forty differ even without color."""
    marker = MARKERS[number % len(MARKERS)]
    dashes = DASHES[(number // len(MARKERS) + number) % len(DASHES)]
    return {"color": COLORS[number % len(COLORS)], "linestyle": dashes, "marker": marker, "markerfacecolor": "white"}


def draw_panels(
    path: Path,
    titles: Sequence[str],
    lines: Sequence[Mapping[str, Line]],
    xlabel: str,
    ylabel: str = "",
    log_x: bool = False,
    log_y: bool = False,
) -> list[Path]:
    """Draw a row of panels in which a model has the same style; nothing where no panel has a point.

    Args:
        lines: the lines of each panel. A model without points is not drawn but keeps its style, so that the others
            look the same in every figure.
        ylabel: what all panels show on one scale; empty where each panel has a measure of its own.
    """
    from matplotlib.lines import Line2D

    every = dict.fromkeys(name for panel in lines for name in panel)
    styles = {name: line_style(number) for number, name in enumerate(every)}
    shown = {name: styles[name] for name in styles if any(panel.get(name) for panel in lines)}
    if not shown:
        return []
    columns = 2 * len(lines)
    with style():
        height = 1.9 + LEGEND_LINE * math.ceil(len(shown) / columns)
        figure, axes = panels(1, len(lines), height=height, share="row" if ylabel else "none")
        for axis, title, panel in zip(axes[0], titles, lines, strict=True):
            axis.set(title=title, xlabel=xlabel)
            draw_axis(axis, {name: panel[name] for name in shown if panel.get(name)}, shown, log_x)
            axis.set_yscale("log" if log_y else "linear")
        axes[0, 0].set_ylabel(textwrap.fill(ylabel, 24))
        handles = [Line2D([], [], **each) for each in shown.values()]
        names = [printable(name, 40) for name in shown]
        figure.legend(handles, names, loc="outside lower center", ncols=columns, fontsize=6)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            figure.savefig(file, format="svg", metadata=NO_DATES["svg"])
    return [path]


def draw_axis(axis: Axes, panel: Mapping[str, Line], styles: Mapping[str, dict[str, Any]], log_x: bool) -> None:
    """Draw the lines of one panel; on a logarithmic axis every x has a tick."""
    for name, line in panel.items():
        xs = sorted(line)
        every = math.ceil(len(xs) / MARKED)
        first = list(styles).index(name) % every  # lines that lie on each other are marked in turn
        draw_line(axis, {**styles[name], "markevery": (first, every)}, xs, [line[x] for x in xs])
    if log_x and panel:
        ticks = sorted({x for line in panel.values() for x in line})
        axis.set_xscale("log")
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], rotation=60 if len(ticks) > 5 else 0)
        axis.minorticks_off()
    else:
        from matplotlib.ticker import MaxNLocator

        axis.xaxis.set_major_locator(MaxNLocator("auto", integer=True))  # layers and updates
