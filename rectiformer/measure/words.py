"""Subwords to words: where the words of a line are, which pieces they contain, and merging links and weights."""

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np

from rectiformer.errors import ShapeError

Span = tuple[int, int]
"""Characters from the first up to, but not including, the second."""

# Thai; ideographic marks, Hiragana, Katakana and its extensions; Han in all its blocks; half-width Katakana.
UNSPACED = (
    "\u0e00-\u0e7f\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff\uff66-\uff9f"
)
# Marks that change the character before them: general, Thai, voicing, variation selectors.
MARKS = "\u0300-\u036f\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u3099\u309a\ufe00-\ufe0f\U000e0100-\U000e01ef"
CHUNK = re.compile(f"[{UNSPACED}][{MARKS}]*|[^\\s{UNSPACED}]+")
BETWEEN_SPACES = re.compile("[^ ]+")


def word_spans(line: str) -> list[Span]:
    """The words of untokenized text, in order.

    Text is split at white space. In scripts without spaces (Thai, Hiragana, Katakana, Han) every character is a word,
    with its combining marks. Elsewhere punctuation and symbols at either end are split off, one word per character,
    but not inside: "(z.B." is "(", "z.B" and ".", and "don't" is one word.
    """
    spans: list[Span] = []
    for chunk in CHUNK.finditer(line):
        first, end = chunk.span()
        last = end
        while first < last and is_punctuation(line[first]):
            spans.append((first, first + 1))
            first += 1
        while first < last and is_punctuation(line[last - 1]):
            last -= 1
        if first < last:
            spans.append((first, last))
        spans.extend((index, index + 1) for index in range(last, end))
    return spans


def is_punctuation(character: str) -> bool:
    return unicodedata.category(character)[0] in "PS"


def given_spans(line: str) -> list[Span]:
    """The words of tokenized text: whatever is between spaces; other white space does not split."""
    return [match.span() for match in BETWEEN_SPACES.finditer(line)]


def pieces_to_words(offsets: Sequence[Span], spans: Sequence[Span]) -> list[list[int]]:
    """For each piece, the words it shares a character with: several, one, or none for white space.

    A piece without characters (the first bytes of a character spelled as bytes) belongs to the word it is in or
    directly before; at the end of the line, like the end-of-sentence piece, to none.

    Args:
        offsets: the characters of each piece.
        spans: the words, in order and without overlap.
    """
    starts = [start for start, _ in spans]
    ends = [end for _, end in spans]
    return [list(range(bisect_right(ends, start), bisect_right(starts, max(start, end - 1)))) for start, end in offsets]


def merge_links(
    links: Iterable[tuple[int, int]], source_words: Sequence[Sequence[int]], target_words: Sequence[Sequence[int]]
) -> set[tuple[int, int]]:
    """Word links out of (source, target) links of pieces, whose words are those of `pieces_to_words`.

    Two words are linked if any of their pieces are.
    """
    return {
        (source_word, target_word)
        for source, target in links
        for source_word in source_words[source]
        for target_word in target_words[target]
    }


def merge_weights(
    weights: np.ndarray,
    source_words: Sequence[Sequence[int]],
    target_words: Sequence[Sequence[int]],
    source_count: int,
    target_count: int,
) -> np.ndarray:
    """Weights of words [target_count, source_count] from those of pieces [M, N].

    Weights are summed over the pieces of a source word and averaged over those of a target word. A piece in several
    words counts in each; a word without pieces has zeros.

    Args:
        source_words: words of each of the N source pieces, by `pieces_to_words`.
        target_words: words of each of the M target pieces.
    """
    if weights.shape != (len(target_words), len(source_words)):
        raise ShapeError(
            f"weights are {list(weights.shape)}, but there are {len(target_words)} target and "
            f"{len(source_words)} source pieces"
        )
    columns = sum_rows(weights.T, source_words, source_count).T  # [M, source_count]
    sums = sum_rows(columns, target_words, target_count)
    pieces = sum_rows(np.ones((len(target_words), 1)), target_words, target_count)  # [target_count, 1]
    return sums / np.maximum(pieces, 1)


def sum_rows(rows: np.ndarray, words: Sequence[Sequence[int]], count: int) -> np.ndarray:
    """One row per word: the sum of its pieces' rows."""
    sums = np.zeros((count, rows.shape[1]))
    for row, indices in zip(rows, words, strict=True):
        sums[list(indices)] += row
    return sums
