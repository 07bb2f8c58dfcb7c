"""Runs sentence pairs through a model under forced decoding and measures every attention and memory on the way.

Observations are summed up at once, so nothing of a batch is kept, however long its sentences are.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from rectiformer.analyze.meters import (
    BLOCK_CELLS,
    DistanceMeter,
    DiversityMeter,
    HeadMeter,
    LengthMeter,
    MemoryMeter,
    Meter,
)
from rectiformer.analyze.segments import JoinedPairs
from rectiformer.distributed.ranks import Ranks
from rectiformer.errors import DataError
from rectiformer.measure.alignment import Links, check_links
from rectiformer.measure.words import given_spans, word_spans
from rectiformer.model.attention import Observation, RectifiedAttention
from rectiformer.model.layers import DecoderLayer, EncoderLayer
from rectiformer.model.memory import MemoryObservation
from rectiformer.model.multihead import MultiheadAttention
from rectiformer.model.transformer import Site, Transformer
from rectiformer.ops.variants import find_variant
from rectiformer.ops.weights import weight_blocks
from rectiformer.text.batches import Batch, collate, shuffled
from rectiformer.translate.evaluate import EncodedPairs, decode_forced, symbols_of
from rectiformer.translate.translator import Translator, cut_batches

Pair = tuple[str, str]
Text = TypeVar("Text")
BATCH_TOKENS = 4096


class HeadObserver:
    """The heads of one attention site, and their meter."""

    def __init__(self, site: Site) -> None:
        self.site, self.heads = site, HeadMeter(site.attention.num_heads)
        self.meters: list[Meter] = [self.heads]

    def observe(self, batch: Batch) -> AbstractContextManager[None]:
        """While the model runs inside, this batch is added to the meters."""
        return observing(self.site.attention, partial(self.update, batch=batch))

    def update(self, seen: Observation, batch: Batch) -> None:
        self.heads.update(seen.stats(), real_queries(self.site.kind, batch).to(seen.q.device))


class SiteObserver(HeadObserver):
    """One attention site, and all its meters.

    Args:
        edges: where bins of source lengths begin, and where the last one ends.
        documents: what is read, to measure how far cross-attention reaches in it; None for sentences.
    """

    def __init__(self, site: Site, edges: Sequence[int], documents: JoinedPairs | None = None) -> None:
        super().__init__(site)
        self.documents = documents if site.kind == "cross" else None
        self.lengths, self.diversity = LengthMeter(edges, site.attention.num_heads), DiversityMeter()
        self.distances = DistanceMeter()
        self.meters += [self.lengths, self.diversity, self.distances]

    def update(self, seen: Observation, batch: Batch) -> None:
        device, stats = seen.q.device, seen.stats()
        real = real_queries(self.site.kind, batch).to(device)
        self.heads.update(stats, real)
        self.lengths.update(stats, real, batch.source_lengths.to(device))
        visible = torch.where(real[:, None], stats.visible, 0)
        if self.documents is not None:
            keys, queries = (
                torch.from_numpy(self.documents.sentence_ids(side, batch.pairs, ids.shape[1])).to(device)
                for side, ids in enumerate((batch.source, batch.target))
            )
        for rows, weights in weight_blocks(seen.q, seen.k, seen.variant, cells=BLOCK_CELLS, **seen.call):
            self.diversity.update(weights, visible[:, :, rows])
            if self.documents is not None:
                self.distances.update(weights, queries[:, rows], keys)


class MemoryObserver:
    """The memory of one layer, and its meter."""

    def __init__(self, side: str, index: int, layer: EncoderLayer | DecoderLayer) -> None:
        self.side, self.index, self.layer = side, index, layer
        self.memory = MemoryMeter(layer.memory.values)
        self.meters = (self.memory,)

    def observe(self, batch: Batch) -> AbstractContextManager[None]:
        """While the model runs inside, this batch is added to the meter."""
        return observing_memory(self.layer, partial(self.update, batch))

    def update(self, batch: Batch, seen: MemoryObservation, residual: Tensor) -> None:
        real = real_queries(self.side, batch).to(residual.device)
        self.memory.update(seen.weights()[real], seen.output[real], residual[real])


def run_survey(
    observers: Sequence[HeadObserver | MemoryObserver],
    translator: Translator,
    encoded: EncodedPairs,
    advance: Callable[[int], None],
) -> None:
    """Run the pairs through the model and add them to the meters; `advance` is told the size of each batch.

    Ranks share the batches, then merge their meters.
    """
    batches = translator.ranks.own_share(list(forced_order(encoded)))
    for indices in batches:
        batch = collate(encoded, np.array(indices), symbols_of(translator))
        with translator.inference(), ExitStack() as stack:
            for observer in observers:
                stack.enter_context(observer.observe(batch))
            decode_forced(translator, batch)
        advance(len(indices))
    advance(encoded.pairs - sum(map(len, batches)))
    add_over_ranks(translator.ranks, [meter for observer in observers for meter in observer.meters])


def add_over_ranks(ranks: Ranks, meters: Sequence[Meter]) -> None:
    """Merge the meters of all ranks."""
    found = ranks.all_gather_object(lambda: [meter.state() for meter in meters])
    for rank, states in enumerate(found):
        if rank != ranks.rank:
            for meter, state in zip(meters, states, strict=True):
                meter.merge(state)


def check_pairs(pairs: Sequence[Pair], gold: Sequence[Links] | None, tokenized: bool) -> None:
    """DataError unless there are pairs, and gold links, if given, that fit them."""
    if not pairs:
        raise DataError("0 sentence pairs; there is nothing to analyze")
    if gold is None:
        return
    if len(gold) != len(pairs):
        raise DataError(f"{len(pairs)} sentence pairs for {len(gold)} gold alignments; each pair needs one")
    spans = given_spans if tokenized else word_spans
    for number, (links, (source, target)) in enumerate(zip(gold, pairs, strict=True), 1):
        check_links(links, len(spans(source)), len(spans(target)), f"pair {number}")


def shuffle_sources(pairs: Sequence[tuple[Text, Text]], seed: int = 1) -> list[tuple[Text, Text]]:
    """Each target with the source of another pair; every source is used once. There must be two pairs or more."""
    order = shuffled(len(pairs), "sources", seed)
    given = np.empty_like(order)
    given[order] = np.roll(order, 1)  # one cycle through all pairs leaves none where it was
    return [(pairs[int(other)][0], target) for other, (_, target) in zip(given, pairs, strict=True)]


def forced_batches(translator: Translator, pairs: Sequence[Pair]) -> Iterator[Batch]:
    """The pairs in batches of similar length, longest first: if anything is too large, it shows at once."""
    encoded = EncodedPairs(translator, pairs)
    return (collate(encoded, np.array(indices), symbols_of(translator)) for indices in forced_order(encoded))


def forced_order(encoded: EncodedPairs) -> Iterator[list[int]]:
    """The indices of the pairs of each batch."""
    lengths = encoded.padded_lengths
    return cut_batches(sorted(range(encoded.pairs), key=lambda index: -lengths[index]), lengths, BATCH_TOKENS)


def real_queries(kind: str, batch: Batch) -> Tensor:
    """Which queries at this site, or tokens of this side's memories, are not padding: [B, M]."""
    ids, lengths = (batch.source, batch.source_lengths) if kind == "encoder" else (batch.target, batch.target_lengths)
    return torch.arange(ids.shape[1]) < lengths[:, None]


def weighing_sites(model: Transformer) -> list[Site]:
    """The sites whose variants have weights, encoder first."""
    return [site for site in model.sites() if find_variant(site.attention.variant).has_weights]


def memory_layers(model: Transformer) -> Iterator[tuple[str, int, EncoderLayer | DecoderLayer]]:
    """Side, number and layer of every memory, encoder first."""
    for side, layers in (("encoder", model.encoder), ("decoder", model.decoder)):
        for index, layer in enumerate(layers):
            assert isinstance(layer, EncoderLayer | DecoderLayer)
            yield side, index, layer


@contextmanager
def observing(attention: RectifiedAttention | MultiheadAttention, see: Callable[[Observation], None]) -> Iterator[None]:
    """While the model runs inside, `see` gets each call of this attention."""
    before = attention.observer
    attention.observer = see
    try:
        yield
    finally:
        attention.observer = before


@contextmanager
def observing_memory(
    layer: EncoderLayer | DecoderLayer, see: Callable[[MemoryObservation, Tensor], None]
) -> Iterator[None]:
    """While the model runs inside, `see` gets each observation of the layer's memory and the residual stream [B, M, E]
    that its output is added to."""
    entering: list[Tensor] = []
    hook = layer.around_memory.register_forward_pre_hook(lambda _, inputs: entering.append(inputs[0]))
    before = layer.memory.observer
    layer.memory.observer = lambda seen: see(seen, entering.pop())
    try:
        yield
    finally:
        hook.remove()
        layer.memory.observer = before
