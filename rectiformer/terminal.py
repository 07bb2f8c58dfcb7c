"""What people see: a live bar on a terminal, plain lines elsewhere, and tables that fit the width there is."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from rich.console import Console, JustifyMethod
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track
from rich.status import Status
from rich.table import Table
from rich.text import Text

from rectiformer.errors import ArgumentError, DataError
from rectiformer.text.lines import can_be_read_once_only, read_lines

if TYPE_CHECKING:
    from rectiformer.measure.bleu import Score
    from rectiformer.text.prepared import Prepared
    from rectiformer.train.state import State
    from rectiformer.translate.align import Row

Item = TypeVar("Item")

UNLIMITED = 1_000  # columns of a file or pipe, which need no wrapping
RECENT = 20  # reports of training from which the time left is estimated
METRIC_NAMES = {"bleu": "BLEU", "chrf": "chrF", "loss": "loss"}


def open_console(stderr: bool = False) -> Console:
    """Standard output or standard error. Lines are wrapped for a terminal or where COLUMNS is set, never for a pipe."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = UNLIMITED
    return console


def with_progress(items: Iterable[Item], what: str, total: int | None) -> Iterator[Item]:
    """The items, counted by a bar on standard error if that is a terminal; nothing is shown where `total` is None."""
    console = open_console(stderr=True)
    hidden = total is None or not console.is_terminal
    return iter(track(items, what, total=total, console=console, transient=True, disable=hidden))


def count_lines(file: str, out: Path | None) -> int | None:
    """Lines of `file`, for a bar; None where nobody would see it, or what is seen would be what is written."""
    watched = sys.stderr.isatty() and (out is not None or not sys.stdout.isatty())
    if not watched or can_be_read_once_only(file):
        return None
    return sum(1 for _ in read_lines(file, "skip"))


def write_all(texts: Iterable[str], path: Path | None = None, inputs: Iterable[str] = ()) -> None:
    """Lines to a file or standard output, each as soon as it is there; ArgumentError if the file is an input."""
    for name in inputs:
        if path is not None and path.exists() and os.path.exists(name) and path.samefile(name):
            raise ArgumentError(f"--out {path} is also read; it is untouched; name another file")
    if path is None and sys.stdout is None:
        raise ArgumentError("cannot use standard output: it is closed; write to a file or a pipe")
    with nullcontext(sys.stdout.buffer) if path is None else path.open("wb") as file:
        for text in texts:
            write_line(file, text)
            file.flush()


@contextmanager
def open_new(names: Sequence[str]) -> Iterator[list[BinaryIO]]:
    """New files, all or none of them: DataError where one exists, and none stays where writing fails."""
    for name in names:
        if os.path.lexists(name):
            raise DataError(f"{name} exists; nothing was written; name other files, or remove it")
    try:
        with ExitStack() as stack:
            yield [stack.enter_context(open(name, "xb")) for name in names]
    except BaseException:
        for name in names:
            Path(name).unlink(missing_ok=True)
        raise


def write_line(file: BinaryIO, text: str) -> None:
    """UTF-8 and LF, whatever the locale."""
    file.write(text.encode("utf-8") + b"\n")


def to_json(record: Mapping[str, Any]) -> str:
    """A record on one line."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


class Terminal:
    """Where commands speak to people; also the `Reporter` of training. Leaving it clears whatever moves."""

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
        """A table without lines; the columns named in `numbers` are aligned to the right."""
        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in columns:
            justify: JustifyMethod = "right" if column in numbers else "left"
            table.add_column(column, justify=justify, overflow="fold", no_wrap=column == columns[0])
        for row in rows:
            table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
        self.console.print(table)

    def preparing(self, stage: str, count: int) -> None:
        """Show how far data preparation is."""
        what = "choosing subwords" if stage == "vocabulary" else f"encoding {stage}"
        if not self.console.is_terminal:
            if stage != self._stage:
                self.note(what)
        elif self._status is None:
            self._status = self.console.status(what)
            self._status.start()
        else:
            self._status.update(f"{what}: {count:,} pairs" if count else what)
        self._stage = stage

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
        loss, rate, speed = record["loss"], record["rate"], record["tokens_per_second"]
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


def training_summary(state: State, metric: str, folder: Path) -> str:
    """One line: what was best, where the run is, how to translate with it."""
    found = "nothing was validated, so the latest weights are taken as best"
    if state.best is not None:
        found = f"best {METRIC_NAMES[metric]} {abs(state.best):.3f} at step {state.best_step:,}"
    return (
        f"trained {state.step:,} steps; {found}; the run is in {folder}; "
        f"translate with: rectiformer translate {shlex.quote(str(folder))} FILE"
    )


def print_variants(terminal: Terminal) -> None:
    """All attention variants, one a row."""
    from rectiformer.ops.variants import VARIANTS

    rows = [(each.name, each.formula, each.paper, ", ".join(each.implementations)) for each in VARIANTS.values()]
    terminal.table(("variant", "weight of a key", "paper", "runs as"), rows)
    terminal.note("\nx score, n keys the row sees, [.]+ ReLU. `rectiformer variants NAME` shows norm, options and use.")


def print_variant(terminal: Terminal, name: str) -> None:
    """Everything about one variant."""
    from rectiformer.ops.variants import find_variant

    variant = find_variant(name)
    rows = [("weight", variant.formula), ("row scale", variant.scale), ("output norm", variant.output_norm)]
    for key, option in variant.options.items():
        learned = ", learnable" if option.learn else ""
        rows.append(("option", f"{key} = {option.default:g}: {option.about} ({option.needs}{learned})"))
    rows += [("paper", variant.paper), ("use", variant.use), ("runs as", ", ".join(variant.implementations))]
    terminal.table(("variant", variant.name), rows)


def print_prepared(terminal: Terminal, prepared: Prepared) -> None:
    """What became of the text of each split, the sizes of the vocabularies, and the hash of it all."""
    from rectiformer.text.corpus import Counts

    for name, split in prepared.manifest["splits"].items():
        counts = Counts(**split["counts"]).describe()
        terminal.note(
            f"{name}: {counts}; {split['source_tokens']:,} source, {split['target_tokens']:,} target subwords"
        )
    sizes = f"{prepared.source.size:,}"
    if prepared.target is not prepared.source:
        sizes += f" and {prepared.target.size:,}"
    terminal.note(f"vocabulary {sizes}; data hash {prepared.hash[:12]}; written to {prepared.folder}")


def print_scores(
    terminal: Terminal, scores: Sequence[tuple[str, Score, float | None]], lines: int, as_json: bool
) -> None:
    """Scores of systems, each with its p-value against the first system if there are several."""
    if as_json:
        for system, score, p_value in scores:
            terminal.note(to_json({"system": system, **dataclasses.asdict(score), "p_value": p_value, "lines": lines}))
        return
    compared = len({system for system, _, _ in scores}) > 1
    measured = any(score.low is not None for _, score, _ in scores)
    columns = [*["system"] * compared, "metric", "score", *["95 % interval"] * measured, *["p"] * compared]
    rows = []
    for system, score, p_value in scores:
        interval = "" if score.low is None else f"{score.low:.2f} to {score.high:.2f}"
        chance = "" if p_value is None else f"{p_value:.4f}"
        row = [*[system] * compared, score.name, f"{score.value:.2f}", *[interval] * measured, *[chance] * compared]
        rows.append(row)
    terminal.table(columns, rows, numbers=("score", "p"))
    for name, signature in {score.name: score.signature for _, score, _ in scores}.items():
        terminal.note(f"{name} is {signature}")
    empty = max(score.empty for _, score, _ in scores)
    blank = f", at most {empty:,} of them empty" if empty else ""
    terminal.note(f"rectiformer {scores[0][1].version}; {lines:,} lines{blank}")


def print_alignments(terminal: Terminal, rows: Sequence[Row], chosen: Row) -> None:
    """Alignment error, precision and recall of every layer, head and induction; what was chosen is bold."""
    columns = ("layer", "head", "induction", "AER", "precision", "recall")
    lines = []
    for row in rows:
        score = row.score
        numbers = (f"{value:.4f}" for value in (score.aer, score.precision, score.recall))
        cells = (str(row.layer), str(row.head), row.induction, *numbers)
        lines.append([Text(cell, style="bold" if row is chosen else "") for cell in cells])
    terminal.table(columns, lines, numbers=columns[3:])
