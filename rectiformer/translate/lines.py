"""Lines on their way in and out: those too long cut into parts, streams of any size, translations as JSON records."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from rectiformer.distributed.ranks import Ranks
from rectiformer.errors import DataError
from rectiformer.measure.alignment import Link, format_links
from rectiformer.text.vocabulary import Piece
from rectiformer.translate.options import SearchOptions

if TYPE_CHECKING:
    from rectiformer.translate.align import PairWeights
    from rectiformer.translate.translator import Translator

FINAL = tuple(".!?…؟।")
UNSPACED_FINAL = ("\u3002", "\uff01", "\uff1f", "\uff61")  # final marks of scripts that put no space after them
CLOSING = "\"'»”\u2019\u203a)]}\u300d\u300f\uff09"  # quotes and brackets that may stand behind the end of a sentence
BUFFER_CHARACTERS = 2**20  # a buffer also ends here, so that long lines take no more memory than many short ones


@dataclass(frozen=True)
class Candidate:
    """One of the n best translations of a line."""

    text: str
    tokens: list[str]
    """Its subwords, and the end symbol if it ended."""
    score: float
    """Log probability over length penalty; of a line in several parts, the sum of theirs."""
    log_probability: float
    token_scores: list[float]
    """Log probability of each of `tokens`."""
    ended: bool
    """False if the search met its length limit first."""


@dataclass(frozen=True)
class Translation:
    """What became of one line; `candidates` has at least one, best first."""

    line: int
    source: str
    candidates: list[Candidate]
    warnings: list[str]

    @property
    def text(self) -> str:
        """The best candidate."""
        return self.candidates[0].text

    @property
    def score(self) -> float:
        """The score of the best candidate."""
        return self.candidates[0].score


@dataclass(frozen=True)
class LineChunk:
    """Lines that are translated together; None stands for one that was not UTF-8."""

    first_line: int
    lines: list[str | None]
    prefixes: list[str] | None = None


def translate_stream(
    translator: Translator,
    lines: Iterable[str | None],
    options: SearchOptions,
    *,
    buffer: int = 1000,
    prefixes: Iterable[str] | None = None,
    batch_tokens: int = 4096,
    batch_sentences: int = 0,
    too_long: str = "split",
    warn: Callable[[str], None] = warnings.warn,
) -> Iterator[Translation]:
    """Translate lines as they come, one translation for each, in order.

    Args:
        lines: None stands for a line that was not UTF-8; its translation is empty.
        buffer: most lines read before they are sorted into batches and translated; 1 answers each at once.
        prefixes: how each translation has to begin; as many as lines.
    """
    how: dict[str, Any] = {
        "batch_tokens": batch_tokens,
        "batch_sentences": batch_sentences,
        "too_long": too_long,
        "warn": warn,
    }
    for chunk in cut_lines(lines, buffer, prefixes):
        yield from translate_chunk(translator, chunk, options, **how)


def cut_lines(
    lines: Iterable[str | None], buffer: int = 1000, prefixes: Iterable[str] | None = None
) -> Iterator[LineChunk]:
    """The lines in chunks of up to `buffer`; DataError where prefixes are fewer or more."""
    forced = None if prefixes is None else iter(prefixes)
    done = 0
    for chunk in take_chunks(lines, buffer):
        given = None if forced is None else list(islice(forced, len(chunk)))
        if given is not None and len(given) < len(chunk):
            raise DataError(
                f"only {done + len(given)} prefixes, but line {done + len(given) + 1} follows; give one each"
            )
        yield LineChunk(done + 1, chunk, given)
        done += len(chunk)
    if forced is not None and next(forced, None) is not None:
        raise DataError(f"more than {done} prefixes for {done} lines; all lines are translated, check the prefixes")


def translate_chunk(
    translator: Translator, chunk: LineChunk, options: SearchOptions, *, warn: Callable[[str], None], **how: Any
) -> Iterator[Translation]:
    """A translation of each line of a chunk; `how` as in `Translator.translate`."""
    translations = translator.translate(
        [line or "" for line in chunk.lines],
        options,
        prefixes=chunk.prefixes,
        first_line=chunk.first_line,
        warn=warn,
        **how,
    )
    for line, translation in zip(chunk.lines, translations, strict=True):
        yield translation if line is not None else mark_unreadable(translation, warn)


def mark_unreadable(translation: Translation, warn: Callable[[str], None]) -> Translation:
    note = "not UTF-8, so its translation is empty"
    warn(f"line {translation.line}: {note}")
    return dataclasses.replace(translation, warnings=[note])


def take_chunks(lines: Iterable[str | None], most: int) -> Iterator[list[str | None]]:
    """Lines in lists of up to `most`, and of up to `BUFFER_CHARACTERS` and one line."""
    chunk: list[str | None] = []
    characters = 0
    for line in lines:
        chunk.append(line)
        characters += len(line or "")
        if len(chunk) >= most or characters >= BUFFER_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def stream_lines(ranks: Ranks, lines: Iterable[str | None], buffer: int = 1000) -> Iterator[str | None]:
    """The lines that rank 0 reads, on every rank; all must take them to the same end."""
    if ranks.world_size == 1:
        yield from lines
        return
    chunks = take_chunks(lines, buffer)
    while chunk := ranks.on_rank0(lambda: next(chunks, [])):
        yield from chunk


def to_record(
    translation: Translation, links: AbstractSet[Link] | None = None, weights: PairWeights | None = None
) -> dict[str, Any]:
    """What JSON says of a translation; `alignment` and `heads` are there only if links and weights are given."""
    best = translation.candidates[0]
    record: dict[str, Any] = {
        "line": translation.line,
        "source": translation.source,
        "translation": best.text,
        "score": finite(best.score),
        "tokens": best.tokens,
        "token_scores": [finite(score) for score in best.token_scores],
        "nbest": [
            {
                "translation": candidate.text,
                "score": finite(candidate.score),
                "log_probability": finite(candidate.log_probability),
                "ended": candidate.ended,
            }
            for candidate in translation.candidates
        ],
        "warnings": translation.warnings,
    }
    if links is not None:
        record["alignment"] = format_links(links)
    if weights is not None:
        record["heads"] = {
            "source": [piece.text for piece in weights.source_pieces],
            "target": [piece.text for piece in weights.target_pieces],
            "weights": [layer.tolist() for layer in weights.weights],
        }
    return record


def finite(value: float) -> float | None:
    """JSON has no infinity: a forced prefix may be impossible."""
    return value if math.isfinite(value) else None


def split_pieces(line: str, pieces: Sequence[Piece], longest: int) -> list[list[int]]:
    """The ids of `line` in groups of at most `longest`.

    Cut behind the last sentence that fits, else at the last white space, else between characters.
    """
    groups = []
    start = 0
    while len(pieces) - start > longest:
        places = range(start + longest, start, -1)
        kinds = (ends_sentence, is_spaced, is_between_characters)
        fitting = (place for fits in kinds for place in places if fits(line, pieces[place - 1], pieces[place]))
        stop = next(fitting, places[0])  # a character spelled in more than `longest` bytes is cut too
        groups.append([piece.id for piece in pieces[start:stop]])
        start = stop
    groups.append([piece.id for piece in pieces[start:]])
    return groups


def is_between_characters(line: str, left: Piece, right: Piece) -> bool:
    """Whether no character is spelled partly in `left` and partly in `right`."""
    return left.end <= right.start


def is_spaced(line: str, left: Piece, right: Piece) -> bool:
    """Whether white space begins `right`, or ends `left` in a vocabulary that has it there."""
    ended = line[left.start : left.end]
    suffixed = ended[-1:].isspace() and not ended.isspace()
    return is_between_characters(line, left, right) and (line[right.start : right.start + 1].isspace() or suffixed)


def ends_sentence(line: str, left: Piece, right: Piece) -> bool:
    """Whether a final mark stands before the border, and white space at it if the script has any."""
    mark = line[max(0, right.start - 16) : right.start].rstrip().rstrip(CLOSING)[-1:]
    if mark in UNSPACED_FINAL:
        return is_between_characters(line, left, right)
    return mark in FINAL and is_spaced(line, left, right)
