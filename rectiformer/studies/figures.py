"""Figures of studies: lines against a number, a line a model, with all seeds as dashes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rectiformer.analyze.figure_style import draw_line, panels, printable, style
from rectiformer.analyze.plots import NO_DATES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # of Okabe and Ito
DASHES = ("-", "--", "-.", ":")
MARKERS = "osD^vPX*<>"
LEGEND_LINE = 0.14  # inches

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
        up: what all panels show, which then have one scale; none where each has a measure of its own.
        log: whether places lie across by their logarithm; `log_up`: whether values do upwards.
    """
    names = list(dict.fromkeys(name for panel in lines for name, line in panel.items() if line))
    if not names:
        return []
    columns = 2 * len(lines)
    with style():
        height = 1.9 + LEGEND_LINE * math.ceil(len(names) / columns)
        figure, axes = panels(1, len(lines), height=height, share="row" if up else "none")
        for axis, title, panel in zip(axes[0], titles, lines, strict=True):
            axis.set(title=title, xlabel=across)
            draw_axis(axis, {name: panel[name] for name in names if panel.get(name)}, names, log)
            axis.set_yscale("log" if log_up else "linear")
        axes[0, 0].set_ylabel(textwrap.fill(up, 24))
        add_legend(figure, names, columns)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata=NO_DATES["svg"])
    return [path]


def draw_axis(axis: Axes, panel: Mapping[str, Line], names: Sequence[str], log: bool) -> None:
    """The lines of one panel; where places are far apart, each is marked by its number."""
    for name, line in panel.items():
        places = sorted(line)
        draw_line(axis, look(names.index(name)), places, [line[place] for place in places])
    if log and panel:
        marks = sorted({place for line in panel.values() for place in line})
        axis.set_xscale("log")
        axis.set_xticks(marks, [f"{mark:g}" for mark in marks], rotation=60 if len(marks) > 5 else 0)
        axis.minorticks_off()
    else:
        from matplotlib.ticker import MaxNLocator

        axis.xaxis.set_major_locator(MaxNLocator("auto", integer=True))  # layers and updates


def add_legend(figure: Figure, names: Sequence[str], columns: int) -> None:
    """The models below all panels."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **look(number)) for number in range(len(names))]
    shown = [printable(name, 40) for name in names]
    figure.legend(handles, shown, loc="outside lower center", ncols=columns, fontsize=6)
