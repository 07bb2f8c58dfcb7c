"""Records of documents: all sentences in one sequence, as a model of documents reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from itertools import chain

import numpy as np

from rectiformer.analyze.capture import choose_sites, model_card, record_batch, split_side
from rectiformer.analyze.record import KINDS, AttentionRecord, Example, PieceSpan, Side
from rectiformer.errors import DataError
from rectiformer.text.batches import collate
from rectiformer.text.documents import join_ids
from rectiformer.text.vocabulary import Vocabulary
from rectiformer.translate.score import symbols_of
from rectiformer.translate.translator import Translator, piece_text

Document = Sequence[tuple[str, str]]
"""Sentences and their translations."""


class JoinedPairs:
    """The ids of documents, with the vocabulary's separator between sentences where it has one."""

    def __init__(self, translator: Translator, documents: Sequence[Document]) -> None:
        self.pairs = len(documents)
        self.sources = [join(translator.source, [source for source, _ in each]) for each in documents]
        self.targets = [join(translator.target, [target for _, target in each]) for each in documents]
        for number, lengths in enumerate(zip(map(len, self.sources), map(len, self.targets), strict=True), 1):
            if max(lengths) > translator.longest:
                raise DataError(
                    f"document {number}: {lengths[0]} source and {lengths[1]} target subwords, but at most "
                    f"{translator.longest} are read at once; cut it"
                )
        self.source_lengths = np.array([len(ids) for ids in self.sources], dtype=np.int64)
        self.target_lengths = np.array([len(ids) for ids in self.targets], dtype=np.int64)

    def source(self, index: int) -> np.ndarray:
        return np.array(self.sources[index], dtype=np.int64)

    def target(self, index: int) -> np.ndarray:
        return np.array(self.targets[index], dtype=np.int64)


def record_documents(
    translator: Translator,
    documents: Sequence[Document],
    kinds: Collection[str] = KINDS,
    layers: Collection[int] | None = None,
    *,
    name: str = "",
    tokenized: bool = False,
) -> AttentionRecord:
    """What the heads do while they write all targets of a document in one sequence; the report sums it by sentence.

    Args:
        kinds, layers, tokenized: as in `record_pairs`.
        name: what to call the model, in place of its variant.
    """
    sites, joined = choose_sites(translator.model, kinds, layers), JoinedPairs(translator, documents)
    examples = []
    for index, document in enumerate(documents):
        source, target = (
            join_sides(vocabulary, [pair[side] for pair in document], tokenized)
            for side, vocabulary in enumerate((translator.source, translator.target))
        )
        examples.append(Example(source, target, forced=True, translation=None, gold=None, sites=[]))
        batch = collate(joined, np.array([index]), symbols_of(translator))
        record_batch(translator, batch, sites, examples[-1:])
    return AttentionRecord(model_card(translator.model, name), examples)


def join(vocabulary: Vocabulary, sentences: Sequence[str]) -> list[int]:
    """The ids of a document."""
    ids = [vocabulary.encode(sentence) for sentence in sentences]
    return list(chain.from_iterable(ids)) if vocabulary.separator is None else join_ids(ids, vocabulary.separator)


def join_sides(vocabulary: Vocabulary, sentences: Sequence[str], tokenized: bool) -> Side:
    """A document with its pieces, those that separate sentences and the end included; spaces join the texts."""
    whole = Side("", [], [])
    for number, sentence in enumerate(sentences):
        side = split_side(vocabulary, sentence, tokenized)
        if number:
            at = len(whole.text)
            whole = dataclasses.replace(whole, text=whole.text + " ")
            if vocabulary.separator is not None:
                whole.pieces.append(PieceSpan(piece_text(vocabulary, vocabulary.separator), at, at))
        shift, first = len(whole.text), len(whole.pieces)
        whole.pieces.extend(PieceSpan(each.text, each.start + shift, each.stop + shift) for each in side.pieces[:-1])
        whole.words.extend((a + first, b + first, start + shift, stop + shift) for a, b, start, stop in side.words)
        whole.sentences.append((first, len(whole.pieces)))
        whole = dataclasses.replace(whole, text=whole.text + sentence)
    end = PieceSpan(piece_text(vocabulary, vocabulary.eos), len(whole.text), len(whole.text))
    return dataclasses.replace(whole, pieces=[*whole.pieces, end])
