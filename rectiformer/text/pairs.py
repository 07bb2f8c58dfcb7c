"""A finished sentence pair: words, links, text, and the split it belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from rectiformer.text.phrases import Word, Words

SPLITS = ("train", "valid", "test")
SHORTEST, LONGEST = 4, 16  # words a side, punctuation included
END = Word("", (-2,))


@dataclass(frozen=True)
class Dependent:
    """A target word that only an earlier sentence of the document decides."""

    target_index: int
    kind: str  # "pronoun" or "term"
    correct: str
    wrong: tuple[str, ...]
    antecedent: int  # index of the deciding sentence in the document


@dataclass(frozen=True)
class Pair:
    """A German sentence, its English translation and the links (source index, target index) between their words."""

    source_words: tuple[str, ...]
    target_words: tuple[str, ...]
    sure: frozenset[tuple[int, int]]
    possible: frozenset[tuple[int, int]]  # beside the sure ones
    dependents: tuple[Dependent, ...] = ()

    @property
    def source(self) -> str:
        """The German text."""
        return plain_text(self.source_words)

    @property
    def target(self) -> str:
        """The English text."""
        return plain_text(self.target_words)


def plain_text(words: Sequence[str]) -> str:
    """Words as one line of text, punctuation attached."""
    return "".join(word if word in ".,?!" else f" {word}" for word in words)[1:]


def split_of(source: str) -> str:
    """The split a German sentence belongs to, whatever the seed: 1 in 20 is valid, 1 in 20 test."""
    bucket = blake2b(source.encode(), digest_size=8).digest()[0] % 20
    return {0: "valid", 1: "test"}.get(bucket, "train")


def pair_words(german: Words, english: Words, mark: str = ".") -> Pair:
    """Finish a sentence: capitals, final mark, and links between words with a key in common."""
    end = END._replace(text=mark)
    german, english = [*capitalize(german), end], [*capitalize(english), end]
    sure = frozenset(links([word.keys for word in german], [word.keys for word in english]))
    every = links([word.keys + word.maybe for word in german], [word.keys + word.maybe for word in english])
    return Pair(
        tuple(word.text for word in german), tuple(word.text for word in english), sure, frozenset(every) - sure
    )


def links(source: Sequence[tuple[int, ...]], target: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, int]]:
    """Positions, one a side, that have a key in common."""
    places: dict[int, list[int]] = {}
    for t, keys in enumerate(target):
        for key in keys:
            places.setdefault(key, []).append(t)
    return ((s, t) for s, keys in enumerate(source) for key in keys for t in places.get(key, ()))


def capitalize(words: Words) -> Words:
    """The words with the first letter of the first as a capital."""
    first = words[0].text
    return [words[0]._replace(text=first[0].upper() + first[1:]), *words[1:]]


def fits(pair: Pair, split: str) -> bool:
    """Whether a pair has a usable length and belongs to the split."""
    lengths = len(pair.source_words), len(pair.target_words)
    return min(lengths) >= SHORTEST and max(lengths) <= LONGEST and split_of(pair.source) == split
