"""Figures of studies: lines against a number, a line a model, with all seeds as dashes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rectiformer.analyze.plots import NO_DATES, draw_line, panels, printable, style
from rectiformer.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # of Okabe and Ito
DASHES = ("-", "--", "-.", ":")
MARKERS = "osD^vPX*<>"
LEGEND_LINE = 0.14  # inches
MARKED = 8
"""Most places of a line that are marked; more run together."""

Line = Mapping[float, Sequence[float]]
"""Values of all seeds at each place."""


def look(number: int) -> dict[str, Any]:
    """How line `number` is drawn: no two of the first forty look the same, even without color."""
    marker = MARKERS[number % len(MARKERS)]
    dashes = DASHES[(number // len(MARKERS) + number) % len(DASHES)]
    return {"color": COLORS[number % len(COLORS)], "linestyle": dashes, "marker": marker, "markerfacecolor": "white"}


def draw_panels(
    path: Path,
    titles: Sequence[str],
    lines: Sequence[Mapping[str, Line]],
    across: str,
    up: str = "",
    log: bool = False,
    log_up: bool = False,
) -> list[Path]:
    """A row of panels with the same models in the same looks; nothing where no panel has a point.

    Args:
        lines: those of each panel. A model without points is not shown, but keeps its look from others, so that they
            look the same in another figure that shows it.
        up: what all panels show, which then have one scale; none where each has a measure of its own.
        log: whether places lie across by their logarithm; `log_up`: whether values do upwards.
    """
    looks = {name: look(number) for number, name in enumerate(dict.fromkeys(name for panel in lines for name in panel))}
    shown = {name: looks[name] for name in looks if any(panel.get(name) for panel in lines)}
    if not shown:
        return []
    columns = 2 * len(lines)
    with style():
        height = 1.9 + LEGEND_LINE * math.ceil(len(shown) / columns)
        figure, axes = panels(1, len(lines), height=height, share="row" if up else "none")
        for axis, title, panel in zip(axes[0], titles, lines, strict=True):
            axis.set(title=title, xlabel=across)
            draw_axis(axis, {name: panel[name] for name in shown if panel.get(name)}, shown, log)
            axis.set_yscale("log" if log_up else "linear")
        axes[0, 0].set_ylabel(textwrap.fill(up, 24))
        add_legend(figure, shown, columns)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            figure.savefig(file, format="svg", metadata=NO_DATES["svg"])
    return [path]


def draw_axis(axis: Axes, panel: Mapping[str, Line], looks: Mapping[str, dict[str, Any]], log: bool) -> None:
    """The lines of one panel; where places are far apart, each is marked by its number."""
    for name, line in panel.items():
        places = sorted(line)
        every = math.ceil(len(places) / MARKED)
        first = list(looks).index(name) % every  # lines that lie on each other are marked in turn
        draw_line(axis, {**looks[name], "markevery": (first, every)}, places, [line[place] for place in places])
    if log and panel:
        marks = sorted({place for line in panel.values() for place in line})
        axis.set_xscale("log")
        axis.set_xticks(marks, [f"{mark:g}" for mark in marks], rotation=60 if len(marks) > 5 else 0)
        axis.minorticks_off()
    else:
        from matplotlib.ticker import MaxNLocator

        axis.xaxis.set_major_locator(MaxNLocator("auto", integer=True))  # layers and updates


def add_legend(figure: Figure, looks: Mapping[str, dict[str, Any]], columns: int) -> None:
    """The models below all panels."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **each) for each in looks.values()]
    names = [printable(name, 40) for name in looks]
    figure.legend(handles, names, loc="outside lower center", ncols=columns, fontsize=6)
