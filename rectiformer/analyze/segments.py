"""Documents as a document model reads them: the sentences of a segment in one sequence."""

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

import numpy as np

from rectiformer.errors import DataError
from rectiformer.text.documents import build_segments, join_ids
from rectiformer.text.vocabulary import Vocabulary
from rectiformer.translate.evaluate import EncodedPairs
from rectiformer.translate.translator import Translator

Document = Sequence[tuple[str, str]]
"""Sentences and their translations."""


class JoinedPairs(EncodedPairs):
    """The ids of documents, with the vocabulary's separator, if it has one, between sentences.

    Args:
        documents: the sentences of each, and those of its translation.
    """

    def __init__(self, translator: Translator, documents: Sequence[tuple[Sequence[str], Sequence[str]]]) -> None:
        vocabularies = (translator.source, translator.target)
        encoded = [
            [vocabulary.encode_all(list(texts)) for vocabulary, texts in zip(vocabularies, each, strict=True)]
            for each in documents
        ]
        self.separated = [vocabulary.separator is not None for vocabulary in vocabularies]
        self.sentence_lengths = [[[len(ids) for ids in side] for side in each] for each in encoded]
        sources, targets = (
            [join(vocabulary, each[side]) for each in encoded] for side, vocabulary in enumerate(vocabularies)
        )
        self.pack(translator, sources, targets, "document", "cut it")

    def sentence_ids(self, side: int, documents: Sequence[int] | np.ndarray, width: int) -> np.ndarray:
        """Which sentence each of the first `width` ids of these documents belongs to, from 0; -1 for none.

        Args:
            side: 0 of the source, 1 of the target.
        """
        indices = np.full((len(documents), width), -1, dtype=np.int64)
        for row, document in zip(indices, documents, strict=True):
            first = 0
            for number, length in enumerate(self.sentence_lengths[document][side]):
                row[first : first + length] = number
                first += length + self.separated[side]
        return indices


def two_sides(documents: Sequence[Document]) -> list[tuple[list[str], list[str]]]:
    """The sentences of each document, and those of its translation."""
    return [([source for source, _ in each], [target for _, target in each]) for each in documents]


def cut_documents(translators: Sequence[Translator], documents: Sequence[Document]) -> list[tuple[int, int]]:
    """First and last (exclusive) sentence of segments that each of these models can read at once, as in training.

    Sentences count through all documents. The smallest `segment` decides; with 0, each sentence is read by itself. A
    DataError for a sentence that is longer than a model reads at all.
    """
    pairs = list(chain.from_iterable(documents))
    sides = [
        vocabulary.encode_all([pair[side] for pair in pairs])
        for each in translators
        for side, vocabulary in enumerate((each.source, each.target))
    ]
    lengths = np.array([[len(ids) for ids in side] for side in sides], dtype=np.int64).reshape(len(sides), len(pairs)).T
    longest = min(each.max_length for each in translators)
    starts = [0, *accumulate(map(len, documents))]
    for number, (first, last) in enumerate(pairwise(starts), 1):
        for index in range(first, last):
            if (most := int(lengths[index].max())) > longest:
                raise DataError(
                    f"document {number}, sentence {index - first + 1}: {most} subwords, but at most {longest} are read "
                    "at once; shorten or remove it"
                )
    return build_segments(lengths, starts[:-1], [min(longest, *(each.segment_length for each in translators))])


def join(vocabulary: Vocabulary, ids: Sequence[Sequence[int]]) -> list[int]:
    """The ids of a document from those of its sentences."""
    return list(chain.from_iterable(ids)) if vocabulary.separator is None else join_ids(ids, vocabulary.separator)


def take(documents: Sequence[Document], segments: Sequence[tuple[int, int]]) -> list[Document]:
    """The sentence pairs of each segment; segments count sentences through all documents."""
    pairs = list(chain.from_iterable(documents))
    return [pairs[first:last] for first, last in segments]


def matching_segments(chosen: Sequence[tuple[int, int]], segments: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """For each chosen segment, the one among `segments` (cut for another model) that holds its last sentence."""
    return [next(each for each in segments if each[0] < last <= each[1]) for _, last in chosen]
