"""Runs sentence pairs through a model under forced decoding and measures every attention and memory on the way.

Observations are summed up at once, so nothing of a batch is kept, however long its sentences are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Protocol, TypeVar

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


class Survey(Protocol):
    """Meters, and how a batch is added to them while the model runs."""

    def observers(self, batch: Batch) -> Iterator[AbstractContextManager[None]]:
        """The contexts in which the model adds this batch to the meters."""
        ...

    def all_meters(self) -> list[Meter]:
        """Every meter, in the same order on every rank."""
        ...


class SiteMeter:
    """The meters of one attention site."""

    def __init__(self, site: Site, edges: Sequence[int]) -> None:
        self.site = site
        self.heads = HeadMeter(site.attention.num_heads)
        self.lengths = LengthMeter(edges, site.attention.num_heads)
        self.diversity = DiversityMeter()

    def update(self, seen: Observation, batch: Batch) -> None:
        real = real_queries(self.site.kind, batch).to(seen.q.device)
        stats = seen.stats()
        self.heads.update(stats, real)
        self.lengths.update(stats, real, batch.source_lengths.to(real.device))
        visible = torch.where(real[:, None], stats.visible, 0)
        for rows, weights in weight_blocks(seen.q, seen.k, seen.variant, cells=BLOCK_CELLS, **seen.call):
            self.diversity.update(weights, visible[:, :, rows])


class LayerMemory:
    """The meter of one layer's memory."""

    def __init__(self, side: str, index: int, layer: EncoderLayer | DecoderLayer) -> None:
        self.side, self.index, self.layer = side, index, layer
        self.meter = MemoryMeter(layer.memory.values)

    def update(self, batch: Batch, seen: MemoryObservation, residual: Tensor) -> None:
        real = real_queries(self.side, batch).to(residual.device)
        self.meter.update(seen.weights()[real], seen.output[real], residual[real])


class ModelSurvey:
    """Meters of every attention with weights and of every memory."""

    def __init__(self, model: Transformer, edges: Sequence[int]) -> None:
        self.sites = [SiteMeter(site, edges) for site in weighing_sites(model)]
        self.memories = [LayerMemory(*each) for each in memory_layers(model)]

    def observers(self, batch: Batch) -> Iterator[AbstractContextManager[None]]:
        for meter in self.sites:
            yield observing(meter.site.attention, partial(meter.update, batch=batch))
        for memory in self.memories:
            yield observing_memory(memory.layer, partial(memory.update, batch))

    def all_meters(self) -> list[Meter]:
        of_sites = [meter for each in self.sites for meter in (each.heads, each.lengths, each.diversity)]
        return [*of_sites, *(each.meter for each in self.memories)]


class CrossSurvey:
    """Meters of the heads of every cross-attention, and of nothing else."""

    def __init__(self, model: Transformer) -> None:
        self.sites = [site for site in weighing_sites(model) if site.kind == "cross"]
        self.meters = [HeadMeter(site.attention.num_heads) for site in self.sites]

    def observers(self, batch: Batch) -> Iterator[AbstractContextManager[None]]:

        def add(seen: Observation, meter: HeadMeter) -> None:
            meter.update(seen.stats(), real_queries("cross", batch).to(seen.q.device))

        for site, meter in zip(self.sites, self.meters, strict=True):
            yield observing(site.attention, partial(add, meter=meter))

    def all_meters(self) -> list[Meter]:
        return list(self.meters)


class DistanceSurvey:
    """Meters of every cross-attention, over the documents of `joined`."""

    def __init__(self, model: Transformer, joined: JoinedPairs) -> None:
        self.joined = joined
        self.sites = [site for site in weighing_sites(model) if site.kind == "cross"]
        self.meters = [DistanceMeter() for _ in self.sites]

    def all_meters(self) -> list[Meter]:
        return list(self.meters)

    def observers(self, batch: Batch) -> Iterator[AbstractContextManager[None]]:
        keys, queries = (
            torch.from_numpy(self.joined.sentence_ids(side, batch.pairs, ids.shape[1]))
            for side, ids in enumerate((batch.source, batch.target))
        )

        def add(seen: Observation, meter: DistanceMeter) -> None:
            device = seen.q.device
            for rows, weights in weight_blocks(seen.q, seen.k, seen.variant, cells=BLOCK_CELLS, **seen.call):
                meter.update(weights, queries[:, rows].to(device), keys.to(device))

        for site, meter in zip(self.sites, self.meters, strict=True):
            yield observing(site.attention, partial(add, meter=meter))


def run_survey(survey: Survey, translator: Translator, encoded: EncodedPairs, advance: Callable[[int], None]) -> None:
    """Run the pairs through the model and add them to the meters; `advance` is told the size of each batch.

    Ranks share the batches, then merge their meters.
    """
    batches = translator.ranks.own_share(list(forced_order(encoded)))
    for indices in batches:
        batch = collate(encoded, np.array(indices), symbols_of(translator))
        with translator.inference(), ExitStack() as stack:
            for context in survey.observers(batch):
                stack.enter_context(context)
            decode_forced(translator, batch)
        advance(len(indices))
    advance(encoded.pairs - sum(map(len, batches)))
    add_over_ranks(translator.ranks, survey.all_meters())


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
