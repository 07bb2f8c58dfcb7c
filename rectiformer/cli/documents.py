"""Documents on the command line: their options, files of them in and out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice, tee
from typing import TYPE_CHECKING, Annotated, Any

from rectiformer.cli.inputs import read_text, warn
from rectiformer.cli.options import option
from rectiformer.errors import ArgumentError

if TYPE_CHECKING:
    from rectiformer.text.documents import DocumentLines
    from rectiformer.translate.chunks import Chunk
    from rectiformer.translate.documents import DocumentChunk, DocumentTranslation
    from rectiformer.translate.options import SearchOptions
    from rectiformer.translate.translator import Translator

DOCUMENTS = "Documents"
Documents = Annotated[
    str,
    option(
        "Where one starts: after a blank line, at a line `<d>` (marker), or none.",
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
ShardSource = Annotated[
    bool,
    option(
        "All processes of torchrun hold a part of each source, for one that no device holds.",
        "--shard-source",
        panel=DOCUMENTS,
    ),
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


def joined_documents(found: list[list[str]], documents: str) -> Iterator[str]:
    """Lines from which `read_documents` reads these documents again."""
    from rectiformer.text.documents import DOCUMENT_MARKER

    for number, sentences in enumerate(found):
        if documents == "marker":
            yield DOCUMENT_MARKER
        elif number:
            yield ""
        yield from sentences


def document_chunks(
    translator: Translator,
    lines: Iterable[str | None],
    options: SearchOptions,
    documents: str,
    as_json: bool,
    buffer: int,
    **how: Any,
) -> Iterator[Chunk]:
    """The lines of documents, to be translated chunk by chunk; `how` as in `translate_documents`."""
    from rectiformer.text.documents import split_documents
    from rectiformer.translate.documents import check_request, cut_chunks, translate_chunk

    how["limit"] = check_request(translator, options, how["limit"], how["overlap"])
    unreadable: list[int] = []
    originals, ahead = tee(split_documents(note_unreadable(lines, unreadable), documents))

    def work(chunk: DocumentChunk, own: list[DocumentLines], line: int, bad: list[int]) -> Iterator[str]:
        for number in bad:
            warn(f"line {number}: not UTF-8, so its translation is empty")
        found = translate_chunk(translator, chunk, options, warn=warn, **how)
        yield from format_documents(zip(own, found, strict=True), line, as_json)

    line = 1
    for chunk in cut_chunks((each.sentences for each in ahead), buffer):
        own = list(islice(originals, len(chunk.documents)))
        yield partial(work, chunk, own, line, unreadable.copy())
        unreadable.clear()
        line += sum(len(each.borders) + len(each.sentences) for each in own)


def note_unreadable(lines: Iterable[str | None], numbers: list[int]) -> Iterator[str | None]:
    """The lines; the number of each that is not UTF-8 is added to `numbers`."""
    for number, line in enumerate(lines, 1):
        if line is None:
            numbers.append(number)
        yield line


def format_documents(
    found: Iterable[tuple[DocumentLines, DocumentTranslation]], line: int, as_json: bool
) -> Iterator[str]:
    """Lines as they came in, the first of this number, translated; as JSON, a record a document."""
    from rectiformer.cli.writing import to_json

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
