"""The encoder-decoder Transformer of both papers, with any attention of the table in each of its three places."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rectiformer.config import ModelConfig
from rectiformer.errors import ConfigError
from rectiformer.model.attention import MultiHeadAttention, variance_scaling_
from rectiformer.model.cache import Cache, FixedCache, FixedRoom, KeyValueCache, ReadyCache
from rectiformer.model.dropout import Dropout
from rectiformer.model.layers import (
    DecoderLayer,
    EncoderLayer,
    LayerNorm,
    build_shared,
    position_signals,
    sinusoids,
)
from rectiformer.model.memory import KeyValueMemory
from rectiformer.ops.ranks import Ranks, own_shard


@dataclass(frozen=True)
class Site:
    """One attention of a model and where it stands."""

    kind: str  # encoder, decoder or cross
    layer: int
    attention: MultiHeadAttention


class Embedding(nn.Module):
    """Subwords to vectors: scaled rows, one learned bias, sinusoid positions. `start` reads as zeros, bias included."""

    positions: Tensor

    def __init__(self, table: nn.Parameter, dropout: float, start: int | None = None) -> None:
        super().__init__()
        self.table = table
        self.bias = nn.Parameter(torch.zeros(table.shape[1]))
        self.drop = Dropout(dropout)
        self.start = start
        self.register_buffer("positions", sinusoids(512, table.shape[1]), persistent=False)

    def forward(self, ids: Tensor, position: Tensor | None = None) -> Tensor:
        """ids [B, M] to [B, M, E]; `position` [1], for one column of ids, says where it stands."""
        return self.embed(
            ids, self._table(ids.shape[1])[: ids.shape[1]] if position is None else self.positions[position]
        )

    def embed(self, ids: Tensor, where: Tensor) -> Tensor:
        """ids [B, M] to [B, M, E], with the signals [M, E] of where they stand."""
        x = F.embedding(ids, self.table) * math.sqrt(self.table.shape[1]) + self.bias
        if self.start is not None:  # the decoder begins with a zero vector, not with a symbol of its own
            x = x * (ids != self.start)[..., None]
        return self.drop((x + where).to(working_dtype(x)))

    def _table(self, length: int) -> Tensor:
        """The position signals, made longer when a sequence asks for it."""
        if length > len(self.positions):
            with torch.inference_mode(False):  # made while translating, they may be used in training next
                self.positions = sinusoids(2 * length, self.table.shape[1]).to(self.positions)
        return self.positions

    def reserve(self, length: int) -> None:
        """Have position signals for `length` positions, before steps that cannot make them."""
        self._table(length)


def working_dtype(x: Tensor) -> torch.dtype:
    """What the residual stream is held in: the dtype of autocast where that is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


@dataclass
class DecoderState:
    """Where a step-by-step decoding stands: encoded sources, held once each, and caches of every hypothesis."""

    source: Tensor  # [B, N, E]
    source_lengths: Tensor  # [B]
    own: Sequence[Cache | FixedCache]
    cross: Sequence[Cache]
    position: Tensor  # [1], the position the next step writes
    room: FixedRoom | None = None
    """What `own` are parts of, when they are of fixed size."""

    def reorder(self, rows: Tensor) -> None:
        """Let hypothesis r continue what was hypothesis rows[r]."""
        for cache in self.own:
            assert isinstance(cache, KeyValueCache)
            cache.reorder(rows)

    def keep(self, sentences: Tensor, beam: int) -> None:
        """Go on with these sentences only."""
        self.source, self.source_lengths = self.source[sentences], self.source_lengths[sentences]
        for cache in self.cross:
            assert isinstance(cache, KeyValueCache)
            cache.reorder(sentences)
        self.reorder((sentences[:, None] * beam + torch.arange(beam, device=sentences.device)).flatten())


class Transformer(nn.Module):
    """Encode a source once, decode a target all at once or a token at a time.

    Args:
        config: sizes, variants, order of the norms, ties.
        source_size, target_size: rows of the embeddings.
        start: the id at position 0 of every decoder input, read as a zero vector.
    """

    source_ranks: Ranks | None = None
    """Who shares the positions of every source, inside of `sharded_source`: encoded sources are then this rank's."""

    def __init__(self, config: ModelConfig, source_size: int, target_size: int, start: int = 2) -> None:
        super().__init__()
        if config.tie == "all" and source_size != target_size:
            raise ConfigError(
                f'model.tie = "all" needs one vocabulary, but the source has {source_size} entries and the target '
                f'{target_size}; use model.tie = "target" or vocabulary.shared = true'
            )
        self.config = config
        tables = [nn.Parameter(torch.empty(size, config.width)) for size in (source_size, target_size)]
        if config.tie == "all":
            tables[0] = tables[1]
        self.source_embedding = Embedding(tables[0], config.dropout)
        self.target_embedding = Embedding(tables[1], config.dropout, start)
        self.output = tables[1] if config.tie != "none" else nn.Parameter(torch.empty(target_size, config.width))
        shared = build_shared(config)
        self.encoder = nn.ModuleList(EncoderLayer(config, shared) for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(config, shared) for _ in range(config.decoder_layers))
        final = config.order == "pre"
        self.encoder_norm = LayerNorm(config.width) if final else nn.Identity()
        self.decoder_norm = LayerNorm(config.width) if final else nn.Identity()
        with torch.no_grad():
            for table in tables:
                nn.init.normal_(table, std=config.width**-0.5)
            if config.tie == "none":
                variance_scaling_(self.output)

    def encode(self, source: Tensor, lengths: Tensor | None) -> Tensor:
        """Source ids [B, N] to [B, N, E]; `lengths` None says that no row is padded."""
        x = self.source_embedding(source) if self.source_ranks is None else self.embed_shard(source, self.source_ranks)
        for layer in self.encoder:
            x = layer(x, lengths)
        return self.encoder_norm(x)

    def embed_shard(self, source: Tensor, ranks: Ranks) -> Tensor:
        """This rank's positions of sources [B, N], which are padded until the ranks can share them."""
        padded = F.pad(source, (0, -source.shape[1] % (2 * ranks.size)))
        where = own_shard(torch.arange(padded.shape[1], device=source.device), ranks, 0)
        return self.source_embedding.embed(padded[:, where], position_signals(where, self.config.width))

    def decode(self, target: Tensor, source: Tensor, source_lengths: Tensor | None) -> Tensor:
        """Decoder inputs [B, M] (first `start`, then the target) to states [B, M, E] that predict the next token."""
        x = self.target_embedding(target)
        for layer in self.decoder:
            x = layer(x, source, source_lengths)
        return self.decoder_norm(x)

    def forward(self, source: Tensor, source_lengths: Tensor | None, target: Tensor) -> Tensor:
        """Logits [B, M, V] for every position of the target."""
        return self.logits(self.decode(target, self.encode(source, source_lengths), source_lengths))

    def logits(self, states: Tensor) -> Tensor:
        return F.linear(states, self.output)

    def begin(self, source: Tensor, source_lengths: Tensor) -> DecoderState:
        """A state that has written nothing, from encoded sources [B, N, E]; its caches grow as needed."""
        layers = range(len(self.decoder))
        position = torch.zeros(1, dtype=torch.long, device=source.device)
        return DecoderState(
            source,
            source_lengths,
            [KeyValueCache() for _ in layers],
            [KeyValueCache() for _ in layers],
            position,
        )

    def begin_fixed(self, source: Tensor, source_lengths: Tensor, beam: int, room: int) -> DecoderState:
        """The same with room for `room` tokens and no more; `room.parents` says which hypothesis each continues.

        Nothing in a step of this state depends on numbers held by Python, so it can be captured as a CUDA graph.
        """
        self.target_embedding.reserve(room)
        heads, layers = self.config.heads, len(self.decoder)
        held = FixedRoom(source, layers, len(source) * beam, heads, room, self.config.width // heads)
        position = torch.zeros(1, dtype=torch.long, device=source.device)
        own = [FixedCache(held, layer) for layer in range(layers)]
        cross = [ReadyCache(*pair) for pair in self.project_source(source, source_lengths)]
        return DecoderState(source, source_lengths, own, cross, position, held)

    def project_source(self, source: Tensor, lengths: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [B, H, N, D] of encoded sources, for every decoder layer."""
        for layer in self.decoder:
            assert isinstance(layer, DecoderLayer)
            _, keys, values = layer.cross.project(source[:, :1], source, None, lengths)
            yield keys.contiguous(), values.contiguous()

    def step(self, ids: Tensor, state: DecoderState) -> Tensor:
        """Write ids [B * beam], one a hypothesis, and return the logits [B * beam, V] of what comes next."""
        if state.room is None:
            self.target_embedding.reserve(state.own[0].length + 1)
        else:
            state.room.reorder(state.position)
        x = self.target_embedding(ids[:, None], state.position)
        written = None if state.room is None else (state.position + 1).expand(len(ids))
        for layer, own, cross in zip(self.decoder, state.own, state.cross, strict=True):
            assert isinstance(layer, DecoderLayer)
            x = layer.step(x, state.source, state.source_lengths, own, cross, written)
        state.position += 1
        return self.logits(self.decoder_norm(x)).squeeze(1)

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
