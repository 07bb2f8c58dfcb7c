"""What commands give out: lines and files, tables for people, and how far they are."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

from rich.text import Text

from rectiformer.errors import ArgumentError, DataError
from rectiformer.files import replacing
from rectiformer.measure.bleu import Score
from rectiformer.ops.variants import VARIANTS, find_variant
from rectiformer.terminal import Terminal
from rectiformer.text.corpus import Counts
from rectiformer.text.prepared import Prepared
from rectiformer.train.saving import State
from rectiformer.translate.align import AlignmentRow, ordinal


def write_all(texts: Iterable[str], path: Path | None = None, inputs: Iterable[str] = ()) -> None:
    """Lines to standard output, each as soon as it is there, or to a file, which is replaced when all are there.

    ArgumentError if the file is an input.
    """
    for name in inputs:
        if path is not None and path.exists() and os.path.exists(name) and path.samefile(name):
            raise ArgumentError(f"--out {path} is also read; it is untouched; name another file")
    if path is None and sys.stdout is None:
        raise ArgumentError("cannot use standard output: it is closed; write to a file or a pipe")
    with nullcontext(sys.stdout.buffer) if path is None else replacing(path, ArgumentError) as file:
        for text in texts:
            write_line(file, text)
            file.flush()


@contextmanager
def open_new(names: Sequence[str]) -> Iterator[list[BinaryIO]]:
    """New files, which appear at the end, all or none of them: DataError where one exists."""
    for name in names:
        if os.path.lexists(name):
            raise DataError(f"{name} exists; nothing was written; name other files, or remove it")
    with ExitStack() as stack:
        files = [stack.enter_context(replacing(Path(name))) for name in names]
        yield files
        for file in files:  # a full disk shows before the first of them appears
            file.flush()
            os.fsync(file.fileno())


def check_outputs(files: list[Path | None], inputs: list[str]) -> None:
    """ArgumentError, before any work, where a file cannot be written or would take the place of another."""
    taken = {Path(name).resolve() for name in inputs if name}
    for path in files:
        if path is None:
            continue
        if not path.parent.is_dir() or path.is_dir():
            reason = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise ArgumentError(f"cannot write {path}: {reason}; name another file")
        if path.resolve() in taken:
            raise ArgumentError(f"{path} is named twice, or is also read; it is untouched; name another file")
        taken.add(path.resolve())


def write_line(file: BinaryIO, text: str) -> None:
    """UTF-8 and LF, whatever the locale; what is not UTF-8, as some file names are, becomes question marks."""
    file.write(text.encode("utf-8", "replace") + b"\n")


def to_json(record: Mapping[str, Any]) -> str:
    """A record on one line."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


METRIC_NAMES = {"bleu": "BLEU", "chrf": "chrF", "loss": "loss"}


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
    rows = [(each.name, each.formula, each.paper, ", ".join(each.implementations)) for each in VARIANTS.values()]
    terminal.table(("variant", "weight of a key", "paper", "runs as"), rows)
    terminal.note("\nx score, n keys the row sees, [.]+ ReLU. `rectiformer variants NAME` shows norm, options and use.")


def print_variant(terminal: Terminal, name: str) -> None:
    """Everything about one variant."""
    variant = find_variant(name)
    rows = [("weight", variant.formula), ("row scale", variant.scale), ("output norm", variant.output_norm)]
    for key, option in variant.options.items():
        learned = ", learnable" if option.learn else ""
        rows.append(("option", f"{key} = {option.default:g}: {option.about} ({option.needs}{learned})"))
    rows += [("paper", variant.paper), ("use", variant.use), ("runs as", ", ".join(variant.implementations))]
    terminal.table(("variant", variant.name), rows)


def print_prepared(terminal: Terminal, prepared: Prepared) -> None:
    """What became of the text of each split, the sizes of the vocabularies, and the hash of it all."""
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
        write_all(
            to_json({"system": system, **dataclasses.asdict(score), "p_value": p_value, "lines": lines})
            for system, score, p_value in scores
        )
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


def print_alignments(terminal: Terminal, rows: Sequence[AlignmentRow], chosen: AlignmentRow) -> None:
    """Alignment error, precision and recall of every layer, head and induction; what was chosen is bold."""
    columns = ("layer", "head", "induction", "AER", "precision", "recall")
    lines = []
    for row in rows:
        score = row.score
        numbers = (f"{value:.4f}" for value in (score.aer, score.precision, score.recall))
        cells = (ordinal(row.layer), ordinal(row.head), row.induction, *numbers)
        lines.append([Text(cell, style="bold" if row is chosen else "") for cell in cells])
    terminal.table(columns, lines, numbers=columns[3:])


SECONDS = 10.0
"""Between two lines, where standard error is no terminal; what takes less says nothing."""


@contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """A function that is told how many are done, and of how many; `what` begins a line."""
    with Terminal(stderr=True) as terminal:
        begun, said = False, time.monotonic()

        def tell(done: int, total: int) -> None:
            nonlocal begun, said
            if not begun:
                terminal.begin(0, total)
                begun = True
            terminal.advance(done)
            if not terminal.console.is_terminal and time.monotonic() - said >= SECONDS:
                terminal.note(f"{what}: {done:,} of {total:,}")
                said = time.monotonic()

        yield tell
