"""How good translations are: metrics of a test set, and how probable given translations are under forced decoding."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rectiformer.errors import DataError
from rectiformer.measure.agreement import Agreement, count_agreement
from rectiformer.measure.bleu import Score, check_lines, score
from rectiformer.text.batches import Batch, Pairs, Symbols, collate
from rectiformer.text.encoding import concatenate
from rectiformer.text.grammar import draw_documents
from rectiformer.text.prepared import Prepared
from rectiformer.translate.documents import DocumentTranslation, translate_documents
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator, cut_batches, piece_text


@dataclass(frozen=True)
class Evaluation:
    """Scores of a test set, by the name of their metric, and what they are scores of."""

    scores: dict[str, Score]
    hypotheses: list[str]
    seconds: float
    """Time of the translation, without that of the scores."""
    tokens: int
    """Subwords of the hypotheses, ends included."""


def evaluate(
    translator: Translator,
    sources: Sequence[str],
    references: Sequence[str],
    options: SearchOptions,
    metrics: Sequence[str] = ("bleu", "chrf"),
    *,
    samples: int = 0,
    **how: Any,
) -> Evaluation:
    """Translate `sources` and score the result; a model that never ends stops at `options.extra_length`.

    Args:
        samples: bootstrap resamples for the 95 % interval of each score; 0 gives none.
        how: as in `Translator.translate`.
    """
    check_lines("sources", sources, references)
    start = time.perf_counter()
    translations = translator.translate(sources, options, **how)
    seconds = time.perf_counter() - start
    hypotheses = [translation.text for translation in translations]
    return Evaluation(
        scores=score(hypotheses, references, metrics, samples=samples),
        hypotheses=hypotheses,
        seconds=seconds,
        tokens=sum(len(translation.candidates[0].tokens) for translation in translations),
    )


def translate_counted(
    translator: Translator,
    sources: Sequence[Sequence[str]],
    options: SearchOptions,
    progress: Callable[[int, int], None] | None,
    **how: Any,
) -> list[DocumentTranslation]:
    """The translations of documents; `progress` is told how many of them are done, and of how many."""
    found = []
    for each in translate_documents(translator, sources, options, **how):
        found.append(each)
        if progress is not None:
            progress(len(found), len(sources))
    return found


@dataclass(frozen=True)
class AgreementEvaluation:
    """Agreement across the sentences of documents of the built-in grammar, by class of word and of "all"."""

    counts: dict[str, Agreement]
    documents: int
    sentences: int
    segments: int
    fallbacks: int
    """Segments that were translated in smaller ones, as in `DocumentTranslation`."""


def evaluate_agreement(
    translator: Translator,
    count: int,
    options: SearchOptions,
    *,
    seed: int = 1,
    progress: Callable[[int, int], None] | None = None,
    **how: Any,
) -> AgreementEvaluation:
    """Translate `count` test documents of the built-in grammar and count the words that earlier sentences decide.

    `how` as in `translate_documents`.
    """
    documents = list(draw_documents(count, seed, "test"))
    sources = [[pair.source for pair in document] for document in documents]
    found = translate_counted(translator, sources, options, progress, **how)
    hypotheses = [text for each in found for text in each.sentences]
    return AgreementEvaluation(
        counts=count_agreement(hypotheses, [pair.dependents for document in documents for pair in document]),
        documents=count,
        sentences=len(hypotheses),
        segments=sum(each.segments for each in found),
        fallbacks=sum(each.fallbacks for each in found),
    )


POSITIONS = 512  # whose logits are held at once; all of a batch over a large vocabulary would take gigabytes


@dataclass(frozen=True)
class PairScore:
    """Natural logarithms of probabilities; `tokens` are the target's subwords and the end symbol."""

    log_probability: float
    token_scores: list[float]
    tokens: list[str]


class EncodedPairs(Pairs):
    """The ids of sentence pairs, without special symbols; DataError if a side has more than `translator.max_length`."""

    def __init__(self, translator: Translator, pairs: Sequence[tuple[str, str]]) -> None:
        sources = translator.source.encode_all([source for source, _ in pairs])
        targets = translator.target.encode_all([target for _, target in pairs])
        self.pack(translator, sources, targets, "pair", "shorten or remove it")

    def pack(
        self, translator: Translator, sources: list[list[int]], targets: list[list[int]], name: str, advice: str
    ) -> None:
        """Keep these ids; messages say which pair, by its `name`, is too long, and the `advice`."""
        sides = [concatenate(sources), concatenate(targets)]
        super().__init__([side.ids for side in sides], [side.lengths for side in sides])
        for number, lengths in enumerate(zip(self.source_lengths, self.target_lengths, strict=True), 1):
            if max(lengths) > translator.max_length:
                raise DataError(
                    f"{name} {number}: {lengths[0]} source and {lengths[1]} target subwords, but at most "
                    f"{translator.max_length} are read at once; {advice}"
                )

    @property
    def padded_lengths(self) -> list[int]:
        """The longer side of each pair, its end included."""
        return (np.maximum(self.source_lengths, self.target_lengths) + 1).tolist()


def fits(translator: Translator, pair: tuple[str, str]) -> bool:
    """Whether both sides go through the model as a whole."""
    source, target = pair
    return max(len(translator.source.encode(source)), len(translator.target.encode(target))) <= translator.max_length


def symbols_of(holder: Translator | Prepared) -> Symbols:
    """The special ids that batches for these vocabularies need."""
    source, target = holder.source, holder.target
    return Symbols(source.pad, source.eos, target.pad, target.bos, target.eos)


def score_pairs(translator: Translator, pairs: Sequence[tuple[str, str]], batch_tokens: int = 4096) -> list[PairScore]:
    """Score each (source, target) pair; an empty target scores its end alone, an empty source is one.

    Args:
        batch_tokens: padded tokens of the longer side in a batch.
    """
    encoded, symbols = EncodedPairs(translator, pairs), symbols_of(translator)
    lengths = encoded.padded_lengths
    end = piece_text(translator.target, translator.target.eos)
    results: dict[int, PairScore] = {}
    for indices in cut_batches(sorted(range(len(pairs)), key=lambda index: -lengths[index]), lengths, batch_tokens):
        rows = score_batch(translator, collate(encoded, np.array(indices), symbols))
        for index, scores in zip(indices, rows, strict=True):
            tokens = [piece.text for piece in translator.target.pieces(pairs[index][1])]
            results[index] = PairScore(math.fsum(scores), scores, [*tokens, end])
    return [results[index] for index in range(len(pairs))]


def score_batch(translator: Translator, batch: Batch) -> list[list[float]]:
    """Log probability of every target token of every row, its end included."""
    real = torch.arange(batch.target.shape[1]) < batch.target_lengths[:, None]  # [B, M]
    with translator.inference():
        states = decode_forced(translator, batch)[real.to(translator.device)]  # [T, E]
        ids = batch.target[real].to(translator.device)  # [T]
        parts = zip(states.split(POSITIONS), ids.split(POSITIONS), strict=True)
        scores = torch.cat([target_scores(translator.model.logits(part), named) for part, named in parts])
    return [row.tolist() for row in scores.cpu().split(batch.target_lengths.tolist())]


def decode_forced(translator: Translator, batch: Batch) -> Tensor:
    """The decoder's states [B, M, E] for the targets of a batch."""
    model, device, dtype = translator.model, translator.device, translator.precision
    with torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None):
        lengths = batch.source_lengths.to(device)
        return model.decode(batch.target_input.to(device), model.encode(batch.source.to(device), lengths))


def target_scores(logits: Tensor, ids: Tensor) -> Tensor:
    """Log probabilities [T] of ids [T] under logits [T, V]."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.log_softmax(-1).gather(1, ids[:, None]).squeeze(1)
