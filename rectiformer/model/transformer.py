"""The encoder-decoder Transformer of both papers, with any variant of attention at each of its three sites."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from rectiformer.config import ModelConfig
from rectiformer.errors import ArgumentError, ConfigError
from rectiformer.model.attention import RectifiedAttention
from rectiformer.model.cache import KeyValueCache, StaticCache, StaticLayer, before_start
from rectiformer.model.embedding import Embedding, position_signals, working_dtype
from rectiformer.model.layers import DecoderLayer, EncoderLayer, LayerNorm, build_shared, require_power
from rectiformer.model.memory import KeyValueMemory
from rectiformer.model.projection import variance_scaling_
from rectiformer.model.rotary import Rotation, SentenceRotary, rotation_of
from rectiformer.ops.distributed import ContextGroup, own_shard, require_rectified


@dataclass(frozen=True)
class Site:
    """One attention of a model, with its site and layer."""

    kind: str  # encoder, decoder or cross
    layer: int
    attention: RectifiedAttention


class Encoded(NamedTuple):
    """Encoded sources, each held once however many hypotheses read it: the context of cross-attention."""

    states: Tensor  # [B, N, E]
    lengths: Tensor | None = None  # [B]; None where no source is padded
    sentence_ids: Tensor | None = None  # [B, N]; None where positions are counted through

    def select(self, sources: Tensor) -> Encoded:
        """These sources only."""
        lengths = None if self.lengths is None else self.lengths[sources]
        return Encoded(self.states[sources], lengths, None if self.sentence_ids is None else self.sentence_ids[sources])


@dataclass
class DecoderState:
    """The state of step-by-step decoding: the encoded sources and the caches of every hypothesis."""

    context: Encoded
    self_caches: Sequence[KeyValueCache | StaticLayer]
    cross_caches: Sequence[KeyValueCache]
    position: Tensor  # [1], the position the next step writes
    static: StaticCache | None = None
    """What `self_caches` are layers of, when their size is fixed."""
    sentence_positions: Tensor | None = None
    """The position in its sentence of each hypothesis's last token, [R, 2], if that is counted; the static cache's
    where there is one, else None before the first step."""

    def reorder(self, rows: Tensor) -> None:
        """Let hypothesis r continue what was hypothesis rows[r]."""
        if self.sentence_positions is not None:
            self.sentence_positions = self.sentence_positions[rows]
        for cache in self.self_caches:
            assert isinstance(cache, KeyValueCache)
            cache.reorder(rows)

    def keep(self, sources: Tensor, beam: int) -> None:
        """Go on with these sources only."""
        self.context = self.context.select(sources)
        for cache in self.cross_caches:
            cache.reorder(sources)
        self.reorder((sources[:, None] * beam + torch.arange(beam, device=sources.device)).flatten())


class Transformer(nn.Module):
    """Encode a source once, decode a target all at once or a token at a time.

    Args:
        config: sizes, variants, order of the norms, ties.
        source_size, target_size: rows of the embeddings.
        bos: the id at position 0 of every decoder input, read as a zero vector.
        separators: the ids between sentences of a source and of a target, None where a vocabulary has none.
    """

    context_group: ContextGroup | None = None
    """Who shares the positions of every source, inside of `sharded_source`: encoded sources are then this rank's."""

    def __init__(
        self,
        config: ModelConfig,
        source_size: int,
        target_size: int,
        bos: int = 2,
        separators: tuple[int | None, int | None] = (None, None),
    ) -> None:
        super().__init__()
        if config.tie_embeddings == "all" and source_size != target_size:
            raise ConfigError(
                f'model.tie_embeddings = "all" needs one vocabulary, but the source has {source_size} entries and '
                f'the target {target_size}; use model.tie_embeddings = "target" or vocabulary.shared = true'
            )
        self.config = config
        tables = [nn.Parameter(torch.empty(size, config.hidden_size)) for size in (source_size, target_size)]
        if config.tie_embeddings == "all":
            tables[0] = tables[1]
        ends = find_separators(config, separators)
        self.source_embedding = Embedding(tables[0], config.dropout, None, ends[0])
        self.target_embedding = Embedding(tables[1], config.dropout, bos, ends[1])
        self.output = (
            tables[1] if config.tie_embeddings != "none" else nn.Parameter(torch.empty(target_size, config.hidden_size))
        )
        require_power(config)
        shared = build_shared(config)
        self.encoder = nn.ModuleList(EncoderLayer(config, shared) for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(config, shared) for _ in range(config.decoder_layers))
        final = config.norm == "pre"
        self.encoder_norm = LayerNorm(config.hidden_size) if final else nn.Identity()
        self.decoder_norm = LayerNorm(config.hidden_size) if final else nn.Identity()
        with torch.no_grad():
            for table in tables:
                nn.init.normal_(table, std=config.hidden_size**-0.5)
            if config.tie_embeddings == "none":
                variance_scaling_(self.output)

    def encode(self, source: Tensor, lengths: Tensor | None) -> Encoded:
        """Encoded source ids [B, N]; `lengths` None says that no row is padded."""
        x, sentence_ids = self.embed_source(source)
        rotation = self.rotation(sentence_ids)
        for layer in self.encoder:
            x = layer(x, lengths, rotation)
        return Encoded(self.encoder_norm(x), lengths, sentence_ids)

    def embed_source(self, source: Tensor) -> tuple[Tensor, Tensor | None]:
        """Sources [B, N] as vectors, and the index of each position's sentence; this rank's part where ranks share."""
        embedding, group = self.source_embedding, self.context_group
        if group is None:
            return embedding(source), embedding.sentence_ids(source)
        padded = F.pad(source, (0, -source.shape[1] % (2 * group.size)))  # until the ranks can share them
        where = own_shard(torch.arange(padded.shape[1], device=source.device), group, 0)
        if embedding.separator is None:
            return embedding.embed(padded[:, where], position_signals(where, self.config.hidden_size)), None
        embedding.reserve(padded.shape[1])
        positions, sentence_ids = embedding.sentence_positions(padded)[:, where].unbind(-1)
        return embedding.embed(padded[:, where], embedding.positions[positions]), sentence_ids

    def rotation(self, sentence_ids: Tensor | None) -> Rotation | None:
        """The rotation of positions by the index [B, M] of their sentence."""
        if sentence_ids is None:
            return None
        return rotation_of(sentence_ids, self.config.hidden_size // self.config.num_heads, working_dtype(self.output))

    def decode(self, target: Tensor, context: Encoded) -> Tensor:
        """Decoder inputs [B, M] (first `bos`, then the target) to states [B, M, E] that predict the next token."""
        x, rotation = self.target_embedding(target), self.rotation(self.target_embedding.sentence_ids(target))
        context_rotation = self.rotation(context.sentence_ids)
        for layer in self.decoder:
            x = layer(x, context.states, context.lengths, rotation, context_rotation)
        return self.decoder_norm(x)

    def forward(self, source: Tensor, source_lengths: Tensor | None, target: Tensor) -> Tensor:
        """Logits [B, M, V] for every position of the target."""
        return self.logits(self.decode(target, self.encode(source, source_lengths)))

    def logits(self, states: Tensor) -> Tensor:
        return F.linear(states, self.output)

    def begin(self, context: Encoded) -> DecoderState:
        """The state before the first token; its caches grow as needed."""
        cross_caches = [KeyValueCache(*pair) for pair in self.project_context(context)]
        position = torch.zeros(1, dtype=torch.long, device=context.states.device)
        return DecoderState(context, [KeyValueCache() for _ in self.decoder], cross_caches, position)

    def begin_static(self, context: Encoded, beam: int, capacity: int) -> DecoderState:
        """The same for at most `capacity` tokens; `static.parents` says which hypothesis each continues.

        Nothing in a step of this state depends on numbers held by Python, so it can be captured as a CUDA graph.
        """
        self.target_embedding.reserve(capacity)
        heads, layers, rows = self.config.num_heads, len(self.decoder), len(context.states) * beam
        buffer = context.states.new_zeros(2 * layers, rows, heads, capacity, self.config.hidden_size // heads)
        static = StaticCache(buffer, by_sentence=self.target_embedding.separator is not None)
        position = torch.zeros(1, dtype=torch.long, device=context.states.device)
        self_caches = [StaticLayer(static, layer) for layer in range(layers)]
        cross_caches = [KeyValueCache(*pair) for pair in self.project_context(context)]
        return DecoderState(context, self_caches, cross_caches, position, static, static.sentence_positions)

    def project_context(self, context: Encoded) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [B, H, N, D] of encoded sources, for every decoder layer."""
        rotary = SentenceRotary(keys=self.rotation(context.sentence_ids))
        for layer in self.decoder:
            assert isinstance(layer, DecoderLayer)
            _, keys, values = layer.cross.project(context.states[:, :1], context.states, None, context.lengths, rotary)
            yield keys.contiguous(), values.contiguous()

    def step(self, ids: Tensor, state: DecoderState) -> Tensor:
        """Write ids [B * beam], one per hypothesis, and return the logits [B * beam, V] of what comes next."""
        if state.static is None:
            self.target_embedding.reserve(state.self_caches[0].length + 1)
        else:
            state.static.reorder(state.position)
        x = self.target_embedding.embed(ids[:, None], self.next_signals(ids, state))
        rotation = self.rotation(None if state.sentence_positions is None else state.sentence_positions[:, 1:])
        self_lengths = None if state.static is None else (state.position + 1).expand(len(ids))
        states, lengths = state.context.states, state.context.lengths
        for layer, self_cache, cross_cache in zip(self.decoder, state.self_caches, state.cross_caches, strict=True):
            assert isinstance(layer, DecoderLayer)
            x = layer.step(x, states, lengths, self_cache, cross_cache, self_lengths, rotation)
        state.position += 1
        return self.logits(self.decoder_norm(x)).squeeze(1)

    def next_signals(self, ids: Tensor, state: DecoderState) -> Tensor:
        """The position signals [1, E] or [R, 1, E] of the next ids [R], whose positions `state` then holds."""
        embedding = self.target_embedding
        if embedding.separator is None:
            return embedding.positions[state.position]
        held = state.sentence_positions
        before = before_start(len(ids), ids.device) if held is None else held
        positions = embedding.next_sentence_positions(before, ids)
        if state.static is None:
            state.sentence_positions = positions
        else:
            before.copy_(positions)
        return embedding.positions[positions[:, 0]][:, None]

    def sites(self) -> Iterator[Site]:
        """Every attention, encoder first."""
        for index, layer in enumerate(self.encoder):
            assert isinstance(layer, EncoderLayer)
            yield Site("encoder", index, layer.attention)
        for index, layer in enumerate(self.decoder):
            assert isinstance(layer, DecoderLayer)
            yield Site("decoder", index, layer.attention)
            yield Site("cross", index, layer.cross)

    def memories(self) -> Iterator[KeyValueMemory]:
        """Every feed-forward memory, encoder first."""
        return (module for module in self.modules() if isinstance(module, KeyValueMemory))


def find_separators(config: ModelConfig, separators: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    """The ids after which positions are counted anew, None where they are counted through."""
    if config.positions == "sequence":
        return None, None
    if None in separators:
        raise ConfigError(
            'model.positions = "sentence" needs a vocabulary with a separator, which that of data with documents has; '
            "set data.documents or data.segment_length"
        )
    return separators


@contextmanager
def sharded_source(model: Transformer, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Inside, every rank of `group` runs the same model on the same batches and holds a part of each source only.

    `encode` takes whole sources and gives this rank's positions of them, which `decode`, `begin` and `step` take; the
    decoder runs on every rank and gives the same there. Partial results of cross-attention are summed, so encoder and
    cross-attention must be rectified. Lengths must be given, and dropout of attention be 0 in training.

    Gradients are those of the sum of all ranks' losses: with the same loss on each, their mean over ranks, as
    DistributedDataParallel takes it, is the gradient of that loss. Other dropout must draw the same on every rank.
    """
    shared = ContextGroup.of(group)
    sites = [site for site in model.sites() if site.kind != "decoder"]
    for site in sites:
        try:
            require_rectified(site.attention.variant)
        except ArgumentError as error:
            raise ArgumentError(f"{site.kind} attention cannot read a source shared by ranks: {error}") from error
    model.context_group = shared
    for site in sites:
        site.attention.context_group = shared
    try:
        yield
    finally:
        model.context_group = None
        for site in sites:
            site.attention.context_group = None
