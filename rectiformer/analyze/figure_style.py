"""How figures look: small type, thin lines, two models that differ without color, text that is only text."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rectiformer.errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


@contextmanager
def style() -> Iterator[None]:
    """Matplotlib set up for papers, inside only; ArgumentError where it is not installed."""
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


def draw_line(axis: Axes, look: dict[str, Any], places: Sequence[float], values: Sequence[Sequence[float]]) -> None:
    """A line through the mean of the values at each place and, where there are several, a dash for each."""
    for place, several in zip(places, values, strict=True):
        if len(several) > 1:
            axis.plot([place] * len(several), several, color=look["color"], marker="_", ls="", ms=4, mew=0.6, alpha=0.6)
    if len(places):
        axis.plot(places, [np.mean(several) for several in values], clip_on=False, **look)


def by_layer(axis: Axes) -> None:
    """Layers on the axis across, whole numbers from 1."""
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
    """Text as a figure can show it: cut, no control characters, and no dollar sign that would begin a formula."""
    shown = "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text[:longest]
    )
    return (shown + ("…" if len(text) > longest else "")).replace("$", r"\$")
