"""What commands read: lines, pairs of lines, runs, and places in a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rectiformer.errors import ArgumentError

if TYPE_CHECKING:
    from rectiformer.translate.translator import Translator


def open_translator(run: Path, checkpoint: str, device: str, precision: str) -> Translator:
    from rectiformer.translate.translator import Translator

    return Translator.from_run(run, checkpoint, device, precision, notice=warn)


def read_text(file: str) -> list[str]:
    """All lines of a file; DataError where one is not UTF-8."""
    from rectiformer.text.lines import read_lines

    return [line or "" for line in read_lines(file)]


def read_pairs(source: str, target: str) -> list[tuple[str, str]]:
    """Lines of two files, side by side; DataError where one has more."""
    from rectiformer.config import DataConfig
    from rectiformer.text.corpus import read_two_files

    return [(left or "", right or "") for left, right, _ in read_two_files(source, target, DataConfig())]


def number(text: str) -> int | str:
    """A layer or head: its number, or a word such as "best"."""
    return int(text) if text.isascii() and text.isdigit() else text


def parse_place(text: str) -> tuple[Any, Any, str]:
    """LAYER:HEAD:INDUCTION; whether they exist is for the model to say."""
    parts = text.split(":")
    if len(parts) != 3:
        raise ArgumentError(f"--alignments {text!r} is not of the form LAYER:HEAD:INDUCTION, such as 1:average:normal")
    return number(parts[0]), number(parts[1]), parts[2]


def warn(text: str) -> None:
    print(f"rectiformer: warning: {text}", file=sys.stderr)
