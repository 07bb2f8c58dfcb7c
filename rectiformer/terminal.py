"""What people see: a live bar on a terminal, plain lines elsewhere, and tables that fit the width there is."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console, JustifyMethod
from rich.measure import Measurement, measure_renderables
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track
from rich.status import Status
from rich.table import Table
from rich.text import Text

from rectiformer.text.lines import is_stream, read_lines
from rectiformer.train.reporting import Reporter

Item = TypeVar("Item")

UNLIMITED = 1_000  # columns of a file or pipe, which need no wrapping
STAGES = {"vocabulary": "choosing subwords", "spool": "copying what can be read only once"}  # others encode a split
RECENT = 20  # reports of training from which the time left is estimated


def open_console(stderr: bool = False) -> Console:
    """Standard output or standard error. Lines are wrapped for a terminal or where COLUMNS is set, never for a pipe."""
    # Jupyter sets FORCE_COLOR for the commands in its cells, and rich then takes their pipes for terminals.
    watched = (sys.stderr if stderr else sys.stdout).isatty() or "TTY_COMPATIBLE" in os.environ
    console = Console(stderr=stderr, highlight=False, force_terminal=None if watched else False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = UNLIMITED
    return console


def with_progress(items: Iterable[Item], what: str, total: int | None) -> Iterator[Item]:
    """The items, counted by a bar on standard error if that is a terminal; nothing is shown where `total` is None."""
    console = open_console(stderr=True)
    hidden = total is None or not console.is_terminal
    return iter(track(items, what, total=total, console=console, transient=True, disable=hidden))


@contextmanager
def counting_bar(what: str, total: int | None) -> Iterator[Callable[[float], None]]:
    """A function that is told how many are done, for a bar as that of `with_progress`, under the same conditions."""
    console = open_console(stderr=True)
    hidden = total is None or not console.is_terminal
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


def count_lines(file: str, out: Path | None) -> int | None:
    """Lines of `file`, for a bar; None where nobody would see it, or what is seen would be what is written."""
    watched = sys.stderr.isatty() and (out is not None or not sys.stdout.isatty())
    if not watched or is_stream(file):
        return None
    return sum(1 for _ in read_lines(file, "skip"))


class Terminal(Reporter):
    """Where commands speak to people. Leaving it clears whatever moves."""

    def __init__(self, stderr: bool = False) -> None:
        self.console = open_console(stderr)
        self._status: Status | None = None
        self._bar: Progress | None = None
        self._stage = ""
        self._steps = 0
        self._marks: deque[tuple[int, float]] = deque(maxlen=RECENT)
        self._numbers: dict[str, str] = {}

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def note(self, text: str) -> None:
        """One line, as it is, above what moves."""
        self.console.print(Text(text), soft_wrap=True)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str | Text]], numbers: Sequence[str] = ()) -> None:
        """A table without lines; the columns named in `numbers` are aligned to the right.

        Cells are wrapped between words only, and those of numbers and of the first column not at all. Where that does
        not fit, the first column becomes headings over the rows that share it, or each row a list under its first cell.
        """
        cells = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
        widths = fit_columns(self.console, columns, cells, numbers)
        if widths or len(columns) < 3:
            return self._grid(columns, cells, numbers, widths)
        groups = [list(group) for _, group in groupby(cells, key=lambda row: row[0].plain)]
        if len(groups) < len(cells):
            widths = fit_columns(self.console, columns[1:], [row[1:] for row in cells], numbers)
        for number, group in enumerate(groups if widths else [[row] for row in cells]):
            self.note("\n" * (number > 0) + group[0][0].plain)
            if widths:
                self._grid(columns[1:], [row[1:] for row in group], numbers, widths)
            else:
                self._list(columns[1:], group[0][1:])

    def _grid(
        self, columns: Sequence[str], rows: Sequence[Sequence[Text]], numbers: Sequence[str], widths: Sequence[int]
    ) -> None:
        """Rows under a header; where no `widths` fit, words are cut."""
        table = Table(box=None, header_style="bold", pad_edge=False)
        for index, column in enumerate(columns):
            justify: JustifyMethod = "right" if column in numbers else "left"
            width = widths[index] if widths else None
            table.add_column(column, justify=justify, overflow="fold", no_wrap=index == 0, width=width)
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def _list(self, names: Sequence[str], cells: Sequence[Text]) -> None:
        """The cells of a row that are not empty, one per line."""
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, cell in zip(names, cells, strict=True):
            if cell.plain:
                table.add_row(Text(f"  {name}"), cell)
        self.console.print(table)

    def preparing(self, stage: str, count: int) -> None:
        """Show how far data preparation is."""
        what = STAGES.get(stage, f"encoding {stage}")
        if self.console.is_terminal:
            self.wait(f"{what}: {count:,} pairs" if count else what)
        elif stage != self._stage:
            self.note(what)
        self._stage = stage

    def wait(self, what: str) -> None:
        """Say on a terminal what is being done, until that changes or ends."""
        if self._status is not None:
            self._status.update(what)
        elif self.console.is_terminal:
            self._status = self.console.status(what)
            self._status.start()

    def begin(self, step: int, steps: int) -> None:
        """Start the bar at `step` of `steps`."""
        self.end()
        self._steps = steps
        self._marks.clear()
        if self.console.is_terminal:
            columns = (
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[numbers]}", style="cyan"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self.console, expand=True, transient=True, refresh_per_second=4)
            self._bar.add_task("", total=steps, completed=step, numbers="")
            self._bar.start()

    def advance(self, step: int) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step)

    def logged(self, record: Mapping[str, Any]) -> None:
        """Show loss, learning rate and speed: in the bar, or on a line of their own."""
        loss, rate, speed = record["loss"], record["learning_rate"], record["tokens_per_second"]
        if self._bar is None:
            self._marks.append((record["step"], time.monotonic()))
            self.note(
                f"step {record['step']:,} of {self._steps:,}: loss {loss:.3f}, rate {rate:.1e}, "
                f"{speed:,.0f} target tokens/s{time_left(self._marks, self._steps)}"
            )
        self._show(loss=f"loss {loss:.3f}", rate=f"lr {rate:.1e}", speed=f"{short_number(speed)} tok/s")

    def validated(self, record: Mapping[str, Any]) -> None:
        """Say what a validation found; the line stays."""
        weights = f" ({record['weights']})" if "weights" in record else ""
        self.note(
            f"step {record['step']:,}{weights}: validation loss {record['valid_loss']:.3f}, "
            f"BLEU {record['valid_bleu']:.2f}, chrF {record['valid_chrf']:.2f}, took {record['valid_seconds']:.1f} s"
        )
        if "valid_heads" in record:
            self.note(
                f"  attention: {record['valid_null_rate']:.1%} of rows null, {record['valid_dead_heads']} of "
                f"{record['valid_heads']} heads dead, row mass {record['valid_mass']:.3g}, entropy "
                f"{record['valid_entropy']:.2f}, zeros {record['valid_zeros']:.1%}"
            )
        self._show(bleu=f"BLEU {record['valid_bleu']:.1f}")

    def end(self) -> None:
        """Clear whatever moves."""
        for live in (self._status, self._bar):
            if live is not None:
                live.stop()
        self._status = self._bar = None

    def _show(self, **numbers: str) -> None:
        self._numbers |= numbers
        if self._bar is not None:
            order = ("loss", "bleu", "rate", "speed")
            shown = "  ".join(self._numbers[name] for name in order if name in self._numbers)
            self._bar.update(self._bar.task_ids[0], numbers=shown)


def fit_columns(
    console: Console, columns: Sequence[str], rows: Sequence[Sequence[Text]], numbers: Sequence[str]
) -> list[int]:
    """Widths at which all columns fit and no word is cut, the widest column narrowed first; empty if there are none."""
    widths, least = [], []
    for index, column in enumerate(columns):
        header = Measurement.get(console, console.options, Text(column))
        cells = measure_renderables(console, console.options, [row[index] for row in rows])
        whole = index == 0 or column in numbers
        widths.append(max(header.maximum, cells.maximum))
        least.append(max(header.minimum, cells.maximum if whole else cells.minimum))
    available = console.width - 2 * len(columns)  # rich adds two spaces after the last column too
    while sum(widths) > available:
        widest = max(
            (each for each in range(len(widths)) if widths[each] > least[each]), key=widths.__getitem__, default=None
        )
        if widest is None:
            return []
        widths[widest] -= 1
    return widths


def time_left(marks: Sequence[tuple[int, float]], steps: int) -> str:
    """Hours, minutes and seconds, if it goes on as between the first and the last mark, of a step and its time each.
    Nothing for one mark: before it there was the start, which may have taken longer than all the rest will."""
    (first, since), (step, now) = marks[0], marks[-1]
    if step == first:
        return ""
    return f", {timedelta(seconds=round((now - since) * (steps - step) / (step - first)))} left"


def short_number(value: float) -> str:
    """Three or four characters: 950, 8.1k, 120k."""
    if value < 1_000:
        return f"{value:.0f}"
    return f"{value / 1_000:.1f}k" if value < 99_950 else f"{value / 1_000:.0f}k"
