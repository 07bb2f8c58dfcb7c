"""Whole documents: as many sentences come out as go in, each translated together with its neighbors.

A document goes through the model in segments, sentences with separators between them, and what comes back is split at
separators. Where that does not give a translation for each sentence, the segment is halved, down to single sentences.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rectiformer.errors import ArgumentError
from rectiformer.text.documents import Window, build_windows, join_ids, split_ids
from rectiformer.translate.chunks import BUFFER_CHARACTERS
from rectiformer.translate.options import Hypothesis, SearchOptions
from rectiformer.translate.translator import Part, Translator


@dataclass(frozen=True)
class DocumentTranslation:
    """What became of one document."""

    number: int
    """Counted from 1."""
    sources: list[str]
    sentences: list[str]
    """A translation for each of `sources`; empty for a blank one."""
    segments: int
    """How many segments the document was cut into."""
    fallbacks: int
    """How many of those did not come back sentence by sentence, and were translated in smaller ones."""
    tokens: int
    """Subwords generated for what was kept, ends and separators included."""
    warnings: list[str]


@dataclass(frozen=True)
class DocumentChunk:
    """Documents that are translated together."""

    number: int
    """Of its first document."""
    line: int
    """Of its first sentence, over all documents."""
    documents: list[Sequence[str]]


@dataclass(frozen=True)
class Segment:
    """Sentences that go through the model together; `key` decides their samples."""

    sentences: Sequence[str]
    ids: Sequence[list[int]]
    key: int


@dataclass(frozen=True)
class Found:
    """What the model generated for a segment, split at separators."""

    parts: list[str]
    tokens: int
    ended: bool
    """False where the length limit came first."""
    notes: list[str]


def translate_documents(
    translator: Translator,
    documents: Iterable[Sequence[str]],
    options: SearchOptions,
    *,
    limit: int | None = None,
    overlap: int = 2,
    buffer: int = 1000,
    warn: Callable[[str], None] = warnings.warn,
    **batching: Any,
) -> Iterator[DocumentTranslation]:
    """Translate documents as they come, in order; each has as many translations as sentences.

    Args:
        limit: most source subwords of a segment, counting one separator per sentence; default: that of training, or
            `translator.max_length` where that is less. A model trained on sentences translates each by itself.
        overlap: sentences before a segment that are put in front of it as context, their translations dropped.
        buffer: most sentences read before they are translated together, except that a document is read whole.
        warn: told of each document of which a segment did not come back sentence by sentence.
        batching: `batch_tokens` and `batch_sentences` as in `Translator.translate`, a segment being a sentence there.
    """
    limit = check_request(translator, options, limit, overlap)
    for chunk in chunk_documents(documents, buffer):
        yield from translate_document_chunk(
            translator, chunk, options, limit=limit, overlap=overlap, warn=warn, **batching
        )


def translate_document_chunk(
    translator: Translator,
    chunk: DocumentChunk,
    options: SearchOptions,
    *,
    limit: int,
    overlap: int,
    warn: Callable[[str], None],
    **batching: Any,
) -> Iterator[DocumentTranslation]:
    """Translate some documents together; `limit` as `check_request` gives it."""
    drafts = []
    number, line = chunk.number, chunk.line
    for sources in chunk.documents:
        drafts.append(Draft(number, line, list(sources), translator.source.encode_all(list(sources))))
        number, line = number + 1, line + len(sources)
    waiting = [(draft, window) for draft in drafts for window in draft.cut(limit, overlap)]
    while waiting:
        segments = [draft.segment(window) for draft, window in waiting]
        found = search_segments(translator, segments, options, **batching)
        waiting = [
            (draft, smaller)
            for (draft, window), each in zip(waiting, found, strict=True)
            for smaller in draft.take(window, each)
        ]
    for draft in drafts:
        yield draft.finish(warn)


def check_request(translator: Translator, options: SearchOptions, limit: int | None, overlap: int) -> int:
    """Refuse what makes no sense for documents; the length of segments."""
    if options.nbest > 1:
        raise ArgumentError(f"nbest = {options.nbest}, but a document has one translation; leave it at 1")
    if overlap < 0 or (limit is not None and limit < 1):
        raise ArgumentError(f"overlap = {overlap} and limit = {limit}; they must be at least 0 and 1")
    wanted = min(translator.segment_length, translator.max_length) if limit is None else limit
    if wanted and not translator.segment_length:
        raise ArgumentError(
            f"segments of {wanted} subwords, but this model knows single sentences only: it was trained with "
            "data.segment_length = 0; leave the limit out"
        )
    return wanted


def chunk_documents(documents: Iterable[Sequence[str]], most: int = 1000) -> Iterator[DocumentChunk]:
    """Documents in chunks of up to `most` sentences or `BUFFER_CHARACTERS`, and one document more."""
    chunk = DocumentChunk(1, 1, [])
    sentences = characters = 0
    for document in documents:
        chunk.documents.append(document)
        sentences += max(1, len(document))
        characters += sum(map(len, document))
        if sentences >= most or characters >= BUFFER_CHARACTERS:
            yield chunk
            line = chunk.line + sum(map(len, chunk.documents))
            chunk = DocumentChunk(chunk.number + len(chunk.documents), line, [])
            sentences = characters = 0
    if chunk.documents:
        yield chunk


@dataclass
class Draft:
    """A document that is being translated; windows count the sentences that are not blank."""

    number: int
    line: int
    """Of its first sentence, over all documents."""
    sources: list[str]
    ids: list[list[int]]
    segments: int = 0
    fallbacks: int = 0
    tokens: int = 0
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.non_blank = [index for index, ids in enumerate(self.ids) if ids and self.sources[index].strip()]
        self.sentences = [""] * len(self.sources)
        self.tried: set[Window] = set()

    def cut(self, limit: int, overlap: int) -> list[Window]:
        """The windows to begin with."""
        windows = build_windows([len(self.ids[index]) for index in self.non_blank], limit, overlap)
        self.segments, self.tried = len(windows), set(windows)
        return windows

    def segment(self, window: Window) -> Segment:
        """The sentences of a window, context included."""
        indices = self.non_blank[window.context : window.last]
        return Segment(
            [self.sources[index] for index in indices], [self.ids[index] for index in indices], self.line + indices[0]
        )

    def take(self, window: Window, found: Found) -> list[Window]:
        """Keep what was found for a window; where it is not one part per sentence, give smaller windows to try."""
        size = window.last - window.context
        if size > 1 and not (found.ended and len(found.parts) == size):
            self.fallbacks += window in self.tried
            return halve(window)
        parts = found.parts if size > 1 else [" ".join(filter(None, found.parts))]
        indices = self.non_blank[window.first : window.last]
        for index, text in zip(indices, parts[window.first - window.context :], strict=True):
            self.sentences[index] = text
        notes = found.notes if found.ended else [*found.notes, "the translation met its length limit before it ended"]
        self.notes += [f"sentence {indices[0] + 1}: {note}" for note in notes]  # which only single sentences have
        self.tokens += found.tokens
        return []

    def finish(self, warn: Callable[[str], None]) -> DocumentTranslation:
        """What became of the document; `warn` is told of all that is to be said of it."""
        notes = list(self.notes)
        if self.fallbacks:
            notes.append(
                f"{self.fallbacks} of {self.segments} segments did not come back sentence by sentence, and were "
                "translated in smaller ones"
            )
        for note in notes:
            warn(f"document {self.number}: {note}")
        return DocumentTranslation(
            self.number, self.sources, self.sentences, self.segments, self.fallbacks, self.tokens, notes
        )


def halve(window: Window) -> list[Window]:
    """Two windows without context, or one where there is one sentence to translate."""
    if window.last - window.first == 1:
        return [Window(window.first, window.first, window.last)]
    middle = (window.first + window.last) // 2
    return [Window(window.first, window.first, middle), Window(middle, middle, window.last)]


def translate_segments(
    translator: Translator, segments: Sequence[Sequence[str]], options: SearchOptions, **how: Any
) -> list[list[str]]:
    """What the model generates for each segment, split at separators: not always a part for each sentence.

    `how` as in `Translator.search_all`.
    """
    encoded = [
        Segment(sentences, translator.source.encode_all(list(sentences)), key)
        for key, sentences in enumerate(segments, 1)
    ]
    return [found.parts for found in search_segments(translator, encoded, options, **how)]


def search_segments(
    translator: Translator, segments: Sequence[Segment], options: SearchOptions, **how: Any
) -> list[Found]:
    """Each segment through the model by itself; a single sentence that is too long for it in parts.

    A translation may be longer than its source by `options.extra_length` for each of its sentences, whose number is
    rounded up to a power of two, so that few shapes of batches arise. `how` as in `Translator.search_all`; `is_wanted`
    is asked by the index of a segment, and one that is not wanted any more has no text and has not ended.
    """
    notes: list[list[str]] = [[] for _ in segments]
    parts: dict[int, list[Part]] = {}  # by extra length
    for index, segment in enumerate(segments):
        extra = options.extra_length << (len(segment.ids) - 1).bit_length()
        for number, ids in enumerate(fit_segment(translator, segment, notes[index])):
            parts.setdefault(extra, []).append(Part(index, ids, [], segment.key + (number << 32)))
    hypotheses: list[list[Hypothesis]] = [[] for _ in segments]
    for extra, group in parts.items():
        longer = replace(options, extra_length=extra)
        found = translator.search_all(group, longer, **how)
        for part, best in zip(group, found, strict=True):
            hypotheses[part.line].append(best[0])
    return [read_parts(translator, each, note) for each, note in zip(hypotheses, notes, strict=True)]


def fit_segment(translator: Translator, segment: Segment, notes: list[str]) -> list[list[int]]:
    """The ids of a segment; of a single sentence, in groups if it is too long."""
    if len(segment.ids) == 1:
        return translator.fit(segment.sentences[0], segment.ids[0], segment.key, "split", notes)
    assert translator.source.separator is not None
    return [join_ids(segment.ids, translator.source.separator)]


def read_parts(translator: Translator, hypotheses: Sequence[Hypothesis], notes: list[str]) -> Found:
    """The text of one segment's hypotheses, several where a single sentence went through the model in parts."""
    separator = translator.target.separator
    ids = [
        part for each in hypotheses for part in ([each.ids] if separator is None else split_ids(each.ids, separator))
    ]
    return Found(
        [translator.target.decode(part) for part in ids],
        sum(len(each.ids) + each.ended for each in hypotheses),
        all(each.ended for each in hypotheses),
        notes,
    )
