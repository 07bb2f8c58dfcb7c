"""Lines with inline markup, translated: tags are taken out before, and placed by word links after."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice

from rectiformer.measure.alignment import Link
from rectiformer.measure.words import word_spans
from rectiformer.translate.align import align_pairs
from rectiformer.translate.chunks import LineChunk, translate_line_chunk
from rectiformer.translate.evaluate import fits
from rectiformer.translate.markup import MarkedText, read_markup
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.placement import place_tags
from rectiformer.translate.translator import Translation, Translator

Aligner = tuple[int, int | str, str]
"""Layer and head, from 0, and induction, as in `align_pairs`."""


def translate_marked_chunk(
    translator: Translator,
    chunk: LineChunk,
    options: SearchOptions,
    aligner: Aligner,
    *,
    warn: Callable[[str], None],
    buffer: int = 64,
    **how: object,
) -> Iterator[Translation]:
    """A translation of each line of a chunk, the tags of the line in its best candidate.

    Args:
        buffer: translations that are aligned together; 1 answers each at once.
        how: as in `Translator.translate`.
    """
    marked = [read_markup(line or "") for line in chunk.lines]
    plain = [None if line is None else each.text for line, each in zip(chunk.lines, marked, strict=True)]
    found = translate_line_chunk(translator, replace(chunk, lines=plain), options, warn=warn, **how)
    rows = zip(chunk.lines, marked, found, strict=True)
    while part := list(islice(rows, buffer)):
        links = link_translations(translator, [(each, translation) for _, each, translation in part], aligner)
        for (line, each, translation), linked in zip(part, links, strict=True):
            notes = describe_losses(each, linked is not None)
            for note in notes:
                warn(f"line {translation.line}: {note}")
            text = place_tags(
                each, translation.text, by_position(each.text, translation.text) if linked is None else linked
            )
            best = replace(translation.candidates[0], text=text)
            yield replace(
                translation,
                source=line or "",
                candidates=[best, *translation.candidates[1:]],
                warnings=[*translation.warnings, *notes],
            )


def link_translations(
    translator: Translator, rows: Iterable[tuple[MarkedText, Translation]], aligner: Aligner
) -> list[set[Link] | None]:
    """The word links of each line and its translation: none without tags, None where a side is too long."""
    found: list[set[Link] | None] = []
    pairs: list[tuple[str, str]] = []
    wanted: list[int] = []
    for marked, translation in rows:
        pair = marked.text, translation.text
        found.append(set())
        if len(marked.elements) > 1 and all(side.strip() for side in pair):
            if fits(translator, pair):
                wanted.append(len(found) - 1)
                pairs.append(pair)
            else:
                found[-1] = None
    layer, head, induction = aligner
    links = align_pairs(translator, pairs, layer=layer, head=head, induction=induction) if pairs else []
    for index, each in zip(wanted, links, strict=True):
        found[index] = each
    return found


def by_position(source: str, target: str) -> set[Link]:
    """Links of words that stand equally far from the start."""
    N, M = len(word_spans(source)), len(word_spans(target))
    return {(i, i * M // N) for i in range(N) if M} | {(j * N // M, j) for j in range(M) if N}


def describe_losses(marked: MarkedText, linked: bool = True) -> list[str]:
    """What the reader of a translation should know of its tags."""
    notes = []
    if marked.unpaired:
        more = f" and {len(marked.unpaired) - 1} more have" if len(marked.unpaired) > 1 else " has"
        notes.append(f"{marked.unpaired[0][:40]}{more} no partner in this line, so it is kept as text")
    if not linked:
        notes.append("a side is too long to be aligned, so tags are placed by position")
    return notes
