"""Forms of text that a gold alignment is in, for the text that a model trains on: small letters, words apart."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rectiformer.config import Config
from rectiformer.studies.plan import rename_files
from rectiformer.text.lines import read_lines

MARKER = "<d>"
NUMBER, TITLE = r"\d+(?:[.,]\d+)+", r"\b(?:mr|mrs|dr|st|hon|m)\."
JOINED = re.compile(rf"{NUMBER}|'s\b|\w+(?:-\w+)*|[^\w\s]")
APART = re.compile(rf"{NUMBER}|{TITLE}|'s\b|\w+|[^\w\s]")
FRENCH = re.compile(rf"{NUMBER}|{TITLE}|\w+'|\w+|[^\w\s]")
FORMS: Mapping[str, Mapping[str, re.Pattern[str]]] = {
    "words": {"en": JOINED, "de": JOINED},
    "words-apart": {"en": APART, "fr": FRENCH},
}
"""Languages of a form, and what a word is in each: "words" as in deen-bicici, "words-apart" as in enfr-hansards, which
splits at hyphens too, and in which French elisions and contractions are written out."""

ELIDED = {
    **{f"{first}'": f"{first}e" for first in "cdjlmnst"},
    **{f"{first}qu'": f"{first}que" for first in ("", "jus", "lors", "puis", "quoi", "quel")},
}
CONTRACTED = {"au": "à le", "aux": "à les", "du": "de le", "des": "de les"}
WRITTEN_OUT = {**ELIDED, **CONTRACTED}


def rewrite(line: str, form: str, language: str) -> str:
    """The words of a line in small letters, one space between them; in French, contractions written out."""
    if line == MARKER:
        return line
    words = FORMS[form][language].findall(line.lower().replace("\u2019", "'"))
    return " ".join(WRITTEN_OUT.get(word, word) if language == "fr" else word for word in words)


@contextmanager
def in_form(config: Config, form: str) -> Iterator[Config]:
    """The same configuration with files in `form`, which are there until the context ends; without one, as it is."""
    if not form:
        yield config
        return
    with tempfile.TemporaryDirectory() as folder:
        data = rename_files(config.data, lambda name: write_rewritten(name, form, Path(folder)))
        yield dataclasses.replace(config, data=data)


def write_rewritten(name: str, form: str, folder: Path) -> str:
    """A file of `folder` with the lines of another one in `form`."""
    path = folder / Path(name).name.removesuffix(".xz").removesuffix(".gz")
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{rewrite(line or '', form, path.suffix[1:])}\n" for line in read_lines(name))
    return str(path)
