"""Figures of studies: panels one below the other, each line labeled where it ends, legible at 420 pixels."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rectiformer.analyze.plots import NO_DATES, draw_line, panels, printable, style
from rectiformer.files import replacing
from rectiformer.studies.results import Figure, Results, estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 4.375, 1.25  # inches: 420 pixels, and a panel
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # of Okabe and Ito
DASHES = ("-", "--", "-.", ":")
MARKERS = "osD^vPX*<>"
GRAY = "#555555"
KNOWN = {name: number for number, name in enumerate(("softmax", "rela-g", "reluformer", "entmax15"))}
"""Models that look the same in all figures of all studies; others take the next free styles."""
BEHIND = {"lw": 3.0, "alpha": 0.28, "solid_capstyle": "round"}
"""How a paper's lines are drawn."""
LINES_SHARE, LABEL_HEIGHT = 0.78, 0.135
"""The share of the width that is not for labels, and how far apart these are, in inches."""
MOST_LINES = 4
"""More lines in a panel than this are not told apart."""
MARKED = 8
"""Most points of a line that get a marker; more would run together."""
MOST_TICKS, ROUND = 5, (1, 2, 5, 10)
"""About how many numbers an axis has, as more would run together, and what they are multiples of."""
ENOUGH = 3
"""Fewer seeds than this are shown one by one, not as an interval: with two it is 13 times as wide as their distance."""

Line = Mapping[float, Sequence[float]]
"""Values of all seeds at each x."""
Lines = dict[str, dict[float, list[float]]]
"""The lines of a panel, by model."""
Bands = Mapping[str, tuple[float, float]]
"""Horizontal bands across a panel: a label, and from where to where."""


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


def choose_styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """A style for each model."""
    free = (number for number in range(1000) if number not in KNOWN.values())
    return {name: line_style(KNOWN[name] if name in KNOWN else next(free)) for name in names}


def draw_panels(
    path: Path,
    about: str,
    titles: Sequence[str],
    lines: Sequence[Mapping[str, Line]],
    xlabel: str,
    ylabel: str = "",
    log_x: bool = False,
    log_y: bool = False,
    behind: Sequence[Mapping[str, Line]] = (),
    bands: Bands | None = None,
) -> list[Figure]:
    """Draw a column of panels in which a model has the same style; nothing where no panel has a point.

    Args:
        about: the title of the figure, which is not in it.
        lines: the lines of each panel, at most `MOST_LINES`. A model without points is not drawn but keeps its style,
            so that the others look the same in every figure.
        ylabel: what all panels show on one scale; empty where each panel has a measure of its own.
        behind: a paper's lines in each panel, in the color of our line of the same name.
    """
    every = dict.fromkeys(name for panel in [*lines, *behind] for name in panel)
    styles = choose_styles(every)
    shown = [name for name in styles if any(panel.get(name) for panel in lines)]
    if not shown:
        return []
    assert all(sum(map(bool, panel.values())) <= MOST_LINES for panel in lines), f"{path.name} has too many lines"
    with style():
        share: Any = "all" if ylabel else "none"
        figure, axes = panels(len(lines), 1, width=2 * WIDTH, height=HEIGHT, share=share)
        figure.set_figwidth(WIDTH)
        for number, (axis, title, panel) in enumerate(zip(axes[:, 0], titles, lines, strict=True)):
            axis.set_title(title, loc="left")
            papers = behind[number] if behind else {}
            for name, line in papers.items():
                axis.plot(list(line), [np.mean(line[x]) for x in line], color=styles[name]["color"], **BEHIND)
            draw_axis(axis, {name: panel[name] for name in shown if panel.get(name)}, styles, log_x)
            axis.set_yscale("log" if log_y else "linear")
            for low, high in (bands or {}).values():
                axis.axhspan(low, high, color="#999999", alpha=0.35, lw=0)
        panels_shown = [[*lines, *behind]] * len(lines) if ylabel else [[panel] for panel in lines]
        for axis, together in zip(axes[:, 0], panels_shown, strict=True):
            limit_axis(axis, together, bands or {}, log_y)
            place_ticks(axis)
        axes[-1, 0].set_xlabel(xlabel)
        if ylabel:
            figure.supylabel(textwrap.fill(ylabel, 40), fontsize=8)
        figure.set_layout_engine("constrained", rect=(0, 0, LINES_SHARE, 1))
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # once is enough, and it takes most of the time
        for number, (axis, panel) in enumerate(zip(axes[:, 0], lines, strict=True)):
            label_lines(axis, panel, behind[0] if behind and not number else {}, bands or {}, styles)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            figure.savefig(file, format="svg", metadata=NO_DATES["svg"])
    return [Figure(path, about)]


def draw_axis(axis: Axes, panel: Mapping[str, Line], styles: Mapping[str, dict[str, Any]], log_x: bool) -> None:
    """Draw the lines of one panel, with intervals; on a logarithmic axis every x has a tick."""
    for name, line in panel.items():
        xs = sorted(line)
        every = math.ceil(len(xs) / MARKED)
        first = list(styles).index(name) % every  # lines that lie on each other are marked in turn
        look = {**styles[name], "markevery": (first, every)}
        many = len(xs) <= MARKED and all(len(line[x]) >= ENOUGH for x in xs)
        draw_line(axis, look, xs, [[float(np.mean(line[x]))] if many else line[x] for x in xs])
        if many:
            halves = [found.half or 0.0 for x in xs if (found := estimate(line[x]))]
            axis.errorbar(xs, [np.mean(line[x]) for x in xs], halves, fmt="none", ecolor=look["color"], elinewidth=0.7)
    if log_x and panel:
        ticks = sorted({x for line in panel.values() for x in line})
        axis.set_xscale("log")
        named = ticks[:: math.ceil(len(ticks) / MOST_TICKS)]
        axis.set_xticks(ticks, [f"{tick:,.10g}" if tick in named else "" for tick in ticks])
        axis.minorticks_off()


def place_ticks(axis: Axes) -> None:
    """Round numbers along both axes, unless their scale has ticks of its own; 4,000 for 4000."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    if axis.get_yscale() == "linear":
        axis.yaxis.set_major_locator(MaxNLocator(MOST_TICKS, steps=ROUND))
    if axis.get_xscale() == "linear":
        axis.xaxis.set_major_locator(MaxNLocator(MOST_TICKS + 1, steps=ROUND, integer=True))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:,.0f}"))


def limit_axis(axis: Axes, panels: Sequence[Mapping[str, Line]], bands: Bands, log_y: bool) -> None:
    """Limit an axis to the values of these panels, which long intervals then leave."""
    values = [value for panel in panels for line in panel.values() for several in line.values() for value in several]
    values += [edge for band in bands.values() for edge in band]
    if values and not log_y:
        margin = 0.07 * (max(values) - min(values)) or 0.5
        axis.set_ylim(min(values) - margin, max(values) + margin)


def label_lines(
    axis: Axes,
    panel: Mapping[str, Line],
    papers: Mapping[str, Line],
    bands: Bands,
    styles: Mapping[str, dict[str, Any]],
) -> None:
    """Write the name of each line to the right of its end, one below the other where ends lie together.

    A paper's lines have one label together, as they have the colors of ours.
    """
    ends = [(line_end(line), name, styles[name]["color"]) for name, line in panel.items() if line]
    ends += [(middle(list(map(line_end, papers.values()))), "pale: the paper", GRAY)] if papers else []
    ends += [((low + high) / 2, name, GRAY) for name, (low, high) in bands.items()]
    to_axes = axis.transData + axis.transAxes.inverted()
    low, high = axis.get_ylim()
    height = LABEL_HEIGHT / axis.get_window_extent().transformed(axis.figure.dpi_scale_trans.inverted()).height
    wanted = sorted(
        (float(to_axes.transform((axis.get_xlim()[0], min(max(y, low), high)))[1]), name, color)
        for y, name, color in ends
    )
    for (_, name, color), y in zip(wanted, spread([each[0] for each in wanted], height), strict=True):
        text = axis.text(1.03, y, printable(name, 40), color=color, transform=axis.transAxes, va="center")
        text.set_in_layout(False)  # its space is reserved already


def line_end(line: Line) -> float:
    return float(np.mean(line[max(line)]))


def spread(positions: Sequence[float], apart: float) -> list[float]:
    """Sorted positions moved as little as it takes to lie `apart`, as a group that keeps its middle."""
    groups: list[list[float]] = []
    for position in positions:
        groups.append([position])
        while (
            len(groups) > 1
            and middle(groups[-1]) - middle(groups[-2]) < apart * (len(groups[-1]) + len(groups[-2])) / 2
        ):
            groups[-2:] = [groups[-2] + groups[-1]]
    return [middle(group) + apart * (number - (len(group) - 1) / 2) for group in groups for number in range(len(group))]


def middle(group: Sequence[float]) -> float:
    return sum(group) / len(group)
