"""Beam search as CUDA graphs: one replay per token, with nothing asked of the host in between.

Shapes are rounded up to a few, and for each the buffers and the graph of one step are kept, so that the next batch of
the same shape only copies its sources in. Without capture the same steps run one operation at a time, on any device.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from rectiformer.model.transformer import Encoded, Transformer
from rectiformer.translate.beam import BeamState, begin_beams
from rectiformer.translate.options import ABANDONED, Hypothesis, SearchBatch, Specials

CHECK_EVERY = 8
"""Steps after which the host looks at what is done; divides every capacity."""

MIN_CAPACITY = 32
"""Fewest positions of a shape; they double when they run out."""

SOURCE_MULTIPLE = 16
"""Source lengths are rounded up to a multiple of this."""

MAX_BYTES = 8 << 30
"""Size of the buffers kept for one model; the least recently used shapes go first."""


@dataclass(frozen=True)
class Shape:
    """All that a captured step depends on, besides the model."""

    sentences: int
    source: int
    capacity: int
    beam: int
    nbest: int
    max_repeats: int
    forced: bool
    counts_separators: bool
    vocabulary: int
    specials: Specials
    precision: torch.dtype | None

    @classmethod
    def of(cls, model: Transformer, batch: SearchBatch) -> Shape:
        """The smallest shape that takes this batch to its first tokens."""
        prefix = max(map(len, batch.prefixes)) if batch.prefixes else 0
        return cls(
            sentences=power_of_two(len(batch.sources)),
            source=-(-max(map(len, batch.sources)) // SOURCE_MULTIPLE) * SOURCE_MULTIPLE,
            capacity=max(MIN_CAPACITY, power_of_two(prefix + 1)),
            beam=batch.options.beam,
            nbest=batch.options.nbest,
            max_repeats=batch.options.max_repeats,
            forced=batch.prefixes is not None,
            counts_separators=batch.separator_counts is not None,
            vocabulary=len(model.output),
            specials=batch.specials,
            precision=batch.precision,
        )


class CapturedStep:
    """Buffers of one shape, and two pieces of work on them: encode sources, and generate a token."""

    def __init__(self, model: Transformer, shape: Shape, batch: SearchBatch) -> None:
        self.shape = shape
        device = model.output.device
        dtype = model.output.dtype if shape.precision is None else shape.precision
        self.ids = torch.zeros(shape.sentences, shape.source, dtype=torch.long, device=device)
        states = torch.zeros(shape.sentences, shape.source, model.config.hidden_size, device=device, dtype=dtype)
        self.lengths = torch.ones(shape.sentences, dtype=torch.long, device=device)
        sentence_ids = model.source_embedding.sentence_ids(self.ids)
        self.decoder = model.begin_static(Encoded(states, self.lengths, sentence_ids), shape.beam, shape.capacity)
        assert self.decoder.static is not None
        self.cache = self.decoder.static
        empty = SearchBatch(
            [],
            batch.options,
            shape.specials,
            prefixes=[] if shape.forced else None,
            separator_counts=[] if shape.counts_separators else None,
        )
        self.beam = BeamState(empty, shape.vocabulary, device, size=shape.sentences, capacity=shape.capacity)
        self.begin_graph: torch.cuda.CUDAGraph | None = None
        self.step_graph: torch.cuda.CUDAGraph | None = None

    def run(self, model: Transformer) -> None:
        """A token for every hypothesis; `model` must be the one this was made for."""
        if self.step_graph is not None:
            self.step_graph.replay()
            return
        logits = model.step(self.beam.last.flatten(), self.decoder)
        self.cache.parents.copy_(self.beam.advance(logits))

    def encode(self, model: Transformer) -> None:
        """Encode the sources in `ids` and project them for every layer."""
        if self.begin_graph is not None:
            self.begin_graph.replay()
            return
        context = self.decoder.context
        encoded = model.encode(self.ids, self.lengths)
        context.states.copy_(encoded.states)
        if context.sentence_ids is not None and encoded.sentence_ids is not None:
            context.sentence_ids.copy_(encoded.sentence_ids)
        for cache, (keys, values) in zip(self.decoder.cross_caches, model.project_context(context), strict=True):
            cache.keys.copy_(keys)
            cache.values.copy_(values)

    def capture(self, model: Transformer, pool: Any) -> None:
        """Record both as graphs that allocate from `pool`. What the buffers hold is lost."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # libraries allocate their workspaces at first use, which a capture does not allow
                self.encode(model)
                self.run(model)
        torch.cuda.current_stream().wait_stream(stream)
        begin_graph, step_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(begin_graph, pool=pool):
            self.encode(model)
        with torch.cuda.graph(step_graph, pool=begin_graph.pool()):
            self.run(model)
        self.begin_graph, self.step_graph = begin_graph, step_graph

    def load(self, model: Transformer, batch: SearchBatch) -> None:
        """Begin with a batch that fits the shape."""
        ids, lengths = batch.padded(self.shape.sentences, self.shape.source)
        self.ids.copy_(ids)
        self.lengths.copy_(lengths)
        self.encode(model)
        self.decoder.position.zero_()
        self.cache.clear()
        beams = begin_beams(model, batch, self.shape.capacity)
        self.beam.copy_from(beams, torch.arange(len(batch.sources), device=self.ids.device))

    def take(self, other: CapturedStep, sentences: Tensor) -> None:
        """Go on with these sentences of another shape, whose capacity is no larger than this one's."""
        for mine, held in zip(self._sources(), other._sources(), strict=True):
            mine[: len(sentences)].copy_(held[sentences])
        beams = torch.arange(self.shape.beam, device=sentences.device)
        self.cache.take(other.cache, (sentences[:, None] * self.shape.beam + beams).flatten())
        self.decoder.position.copy_(other.decoder.position)
        self.beam.copy_from(other.beam, sentences)

    def size(self) -> int:
        """Bytes of the buffers that matter."""
        return self.cache.buffer.nbytes + sum(held.nbytes for held in self._sources())

    def _sources(self) -> list[Tensor]:
        """All that is known of the sources, sentence by sentence."""
        context = [part for part in self.decoder.context if part is not None]
        return context + [part for cache in self.decoder.cross_caches for part in (cache.keys, cache.values)]


class CapturedSteps:
    """Steps of one model by shape, as long as its weights stay where they are."""

    def __init__(self) -> None:
        self.steps: OrderedDict[Shape, CapturedStep] = OrderedDict()
        self.addresses: list[int] = []

    def find(self, model: Transformer, shape: Shape, batch: SearchBatch, capture: bool) -> CapturedStep:
        """The step of this shape, made and captured if it is not there."""
        model.target_embedding.reserve(shape.capacity)
        tensors = [*model.parameters(), model.target_embedding.positions]
        addresses = [tensor.data_ptr() for tensor in tensors]
        if addresses != self.addresses:  # a graph reads where the weights were when it was captured
            self.steps.clear()
            self.addresses = addresses
        if shape not in self.steps:
            self.steps[shape] = CapturedStep(model, shape, batch)
        step = self.steps[shape]
        if capture and step.step_graph is None:
            step.capture(model, self._pool())
        self.steps.move_to_end(shape)
        while len(self.steps) > 1 and sum(kept.size() for kept in self.steps.values()) > MAX_BYTES:
            self.steps.popitem(last=False)
        return step

    def _pool(self) -> Any:
        """One pool for what is in use only inside of a step: no two steps run at once."""
        graphs = (step.step_graph for step in self.steps.values())
        return next((graph.pool() for graph in graphs if graph is not None), None)


CAPTURED: WeakKeyDictionary[Transformer, CapturedSteps] = WeakKeyDictionary()


def search_static(model: Transformer, batch: SearchBatch, capture: bool = True) -> list[list[Hypothesis]]:
    """Beam search of one batch; `capture` False runs the steps without a graph."""
    kept = CAPTURED.setdefault(model, CapturedSteps())
    with batch.autocast(model.output.device):
        step = kept.find(model, Shape.of(model, batch), batch, capture)
        step.load(model, batch)
        sentences = dict(enumerate(range(len(batch.sources))))  # row of the shape -> sentence of the batch
        found: dict[int, list[Hypothesis]] = {}
        position = 0
        while True:
            for _ in range(CHECK_EVERY):
                step.run(model)
            position += CHECK_EVERY
            done = step.beam.done.tolist()
            going = [row for row in sentences if not done[row] and batch.wants(sentences[row])]
            full = position == step.shape.capacity
            if going and not full and 2 * len(going) > step.shape.sentences:
                continue
            ready = [row for row in sentences if done[row]]
            found |= zip((sentences[row] for row in ready), step.beam.hypotheses(ready), strict=True)
            if not going:
                return [found.get(index, [ABANDONED]) for index in range(len(batch.sources))]
            shape = replace(
                step.shape, sentences=power_of_two(len(going)), capacity=step.shape.capacity * (2 if full else 1)
            )
            larger = kept.find(model, shape, batch, capture)
            larger.take(step, torch.tensor(going, device=step.ids.device))
            step, sentences = larger, {new: sentences[row] for new, row in enumerate(going)}


def capturable(model: Transformer) -> bool:
    """Whether a step never waits for the host: experts ask how many tokens each has, observers see every call.

    Nor may it wait for other ranks, where these share the sources.
    """
    watched = any(part.observer is not None for part in [*(s.attention for s in model.sites()), *model.memories()])
    alone = model.context_group is None
    return alone and not watched and not any(memory.memory.keeps == "experts" for memory in model.memories())


def power_of_two(least: int) -> int:
    """The smallest power of two that is at least this."""
    return 1 << (least - 1).bit_length()
