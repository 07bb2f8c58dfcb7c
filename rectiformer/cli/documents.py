"""Documents on the command line: their options, files of them in and out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import tee
from typing import TYPE_CHECKING, Annotated, Any

from rectiformer.cli.inputs import read_text, warn
from rectiformer.cli.options import option
from rectiformer.errors import ArgumentError

if TYPE_CHECKING:
    from rectiformer.text.documents import DocumentLines
    from rectiformer.translate.documents import DocumentTranslation
    from rectiformer.translate.options import SearchOptions
    from rectiformer.translate.translator import Translator

DOCUMENTS = "Documents"
Documents = Annotated[
    str,
    option(
        "Where one starts: after a blank line, at a line <d> (marker), or none.",
        "--documents",
        panel=DOCUMENTS,
        one_of=("none", "blank", "marker"),
    ),
]
SegmentLength = Annotated[
    int | None, option("Most source subwords at once; as the run was trained, unless given.", panel=DOCUMENTS, min=1)
]
Overlap = Annotated[
    int, option("Sentences before a segment that it is given as context, once more.", panel=DOCUMENTS, min=0)
]


def refuse_line_options(**given: Any) -> None:
    """ArgumentError where an option was given that is about single lines."""
    for name, value in given.items():
        if value:
            raise ArgumentError(f"--{name.replace('_', '-')} is about single lines; leave it or --documents out")


def read_documents(file: str, documents: str) -> list[list[str]]:
    """The sentences of every document of a file that has any; without documents, all lines as one."""
    from rectiformer.text.documents import split_documents

    if documents == "none":
        return [read_text(file)]
    return [found.sentences for found in split_documents(read_text(file), documents) if found.sentences]


def translate_lines(
    translator: Translator,
    lines: Iterable[str | None],
    options: SearchOptions,
    documents: str,
    as_json: bool,
    **how: Any,
) -> Iterator[str]:
    """The lines of documents, translated; as JSON, a record a document. `how` as in `translate_documents`."""
    from rectiformer.text.documents import split_documents
    from rectiformer.translate.documents import translate_documents

    originals, ahead = tee(split_documents(tell_unreadable(lines), documents))
    found = translate_documents(translator, (each.sentences for each in ahead), options, **how)
    return format_documents(zip(originals, found, strict=True), as_json)


def tell_unreadable(lines: Iterable[str | None]) -> Iterator[str | None]:
    """The lines, with a warning for each that is not UTF-8."""
    for number, line in enumerate(lines, 1):
        if line is None:
            warn(f"line {number}: not UTF-8, so its translation is empty")
        yield line


def format_documents(found: Iterable[tuple[DocumentLines, DocumentTranslation]], as_json: bool) -> Iterator[str]:
    """Lines as they came in, translated; as JSON, a record a document."""
    from rectiformer.terminal import to_json

    line = 1
    for original, translation in found:
        line += len(original.borders)
        if as_json:
            record = {
                "document": translation.number,
                "line": line,
                "sources": translation.sources,
                "translations": translation.sentences,
                "segments": translation.segments,
                "fallbacks": translation.fallbacks,
                "warnings": translation.warnings,
            }
            yield to_json(record)
        else:
            yield from original.borders
            yield from translation.sentences
        line += len(original.sentences)
