"""The encoder-decoder Transformer of both papers, with any attention of the table in each of its three places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rectiformer.config import ModelConfig
from rectiformer.errors import ConfigError
from rectiformer.model.attention import RectifiedAttention
from rectiformer.model.cache import Cache, ContextCache, KeyValueCache, StaticCache, StaticLayer, before_start
from rectiformer.model.embedding import Embedding, position_signals, working_dtype
from rectiformer.model.layers import DecoderLayer, EncoderLayer, LayerNorm, build_shared
from rectiformer.model.memory import KeyValueMemory
from rectiformer.model.projection import variance_scaling_
from rectiformer.model.rotary import Rotation, SentenceRotary, rotation_of, with_numbers, without_numbers
from rectiformer.ops.distributed import Ranks, own_shard


@dataclass(frozen=True)
class Site:
    """One attention of a model and where it stands."""

    kind: str  # encoder, decoder or cross
    layer: int
    attention: RectifiedAttention


@dataclass
class DecoderState:
    """Where a step-by-step decoding stands: encoded sources, held once each, and caches of every hypothesis."""

    source: Tensor  # [B, N, E], as `encode` gives it
    source_lengths: Tensor  # [B]
    own: Sequence[Cache | StaticLayer]
    cross: Sequence[Cache]
    position: Tensor  # [1], the position the next step writes
    static: StaticCache | None = None
    """What `own` are layers of, when their size is fixed."""
    places: Tensor | None = None
    """Where in its sentence each hypothesis has written last, [R, 2], if that is counted; the static cache's
    where there is one, else None before the first step."""

    def reorder(self, rows: Tensor) -> None:
        """Let hypothesis r continue what was hypothesis rows[r]."""
        if self.places is not None:
            self.places = self.places[rows]
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
        separators: the ids between sentences of a source and of a target, None where a vocabulary has none.
    """

    source_ranks: Ranks | None = None
    """Who shares the positions of every source, inside of `sharded_source`: encoded sources are then this rank's."""

    def __init__(
        self,
        config: ModelConfig,
        source_size: int,
        target_size: int,
        start: int = 2,
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
        borders = find_borders(config, separators)
        self.source_embedding = Embedding(tables[0], config.dropout, None, borders[0])
        self.target_embedding = Embedding(tables[1], config.dropout, start, borders[1])
        self.output = (
            tables[1] if config.tie_embeddings != "none" else nn.Parameter(torch.empty(target_size, config.hidden_size))
        )
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

    @property
    def encoded_width(self) -> int:
        """Columns of encoded sources: those of the residual stream, and the numbers of sentences if they count."""
        return self.config.hidden_size + 2 * (self.source_embedding.separator is not None)

    def encode(self, source: Tensor, lengths: Tensor | None) -> Tensor:
        """Source ids [B, N] to [B, N, E], with the numbers of their sentences where those count (`encoded_width`);
        `lengths` None says that no row is padded."""
        x, numbers = self.embed_source(source)
        rotation = self.rotation(numbers)
        for layer in self.encoder:
            x = layer(x, lengths, rotation)
        return with_numbers(self.encoder_norm(x), numbers)

    def embed_source(self, source: Tensor) -> tuple[Tensor, Tensor | None]:
        """Sources [B, N] to vectors and the numbers of their sentences; of this rank's positions where ranks share."""
        embedding, ranks = self.source_embedding, self.source_ranks
        if ranks is None:
            return embedding(source), embedding.numbers(source)
        padded = F.pad(source, (0, -source.shape[1] % (2 * ranks.size)))  # until the ranks can share them
        where = own_shard(torch.arange(padded.shape[1], device=source.device), ranks, 0)
        if embedding.separator is None:
            return embedding.embed(padded[:, where], position_signals(where, self.config.hidden_size)), None
        embedding.reserve(padded.shape[1])
        positions, numbers = embedding.places(padded)[:, where].unbind(-1)
        return embedding.embed(padded[:, where], embedding.positions[positions]), numbers

    def rotation(self, numbers: Tensor | None) -> Rotation | None:
        """The rotation of positions by the numbers [B, M] of their sentences."""
        if numbers is None:
            return None
        return rotation_of(numbers, self.config.hidden_size // self.config.num_heads, working_dtype(self.output))

    def decode(self, target: Tensor, source: Tensor, source_lengths: Tensor | None) -> Tensor:
        """Decoder inputs [B, M] (first `start`, then the target) to states [B, M, E] that predict the next token."""
        x, rotation = self.target_embedding(target), self.rotation(self.target_embedding.numbers(target))
        source, numbers = without_numbers(source, self.config.hidden_size)
        source_rotation = self.rotation(numbers)
        for layer in self.decoder:
            x = layer(x, source, source_lengths, rotation, source_rotation)
        return self.decoder_norm(x)

    def forward(self, source: Tensor, source_lengths: Tensor | None, target: Tensor) -> Tensor:
        """Logits [B, M, V] for every position of the target."""
        return self.logits(self.decode(target, self.encode(source, source_lengths), source_lengths))

    def logits(self, states: Tensor) -> Tensor:
        return F.linear(states, self.output)

    def begin(self, source: Tensor, source_lengths: Tensor) -> DecoderState:
        """A state that has written nothing, from encoded sources [B, N, E]; its caches grow as needed."""
        own, cross = ([KeyValueCache() for _ in self.decoder] for _ in range(2))
        for cache, pair in zip(cross, self.project_source(source, source_lengths), strict=True):
            cache.append(*pair)
        position = torch.zeros(1, dtype=torch.long, device=source.device)
        return DecoderState(source, source_lengths, own, cross, position)

    def begin_static(self, source: Tensor, source_lengths: Tensor, beam: int, capacity: int) -> DecoderState:
        """The same for at most `capacity` tokens; `static.parents` says which hypothesis each continues.

        Nothing in a step of this state depends on numbers held by Python, so it can be captured as a CUDA graph.
        """
        self.target_embedding.reserve(capacity)
        heads, layers = self.config.num_heads, len(self.decoder)
        static = StaticCache(
            source,
            layers=layers,
            rows=len(source) * beam,
            heads=heads,
            capacity=capacity,
            head_dim=self.config.hidden_size // heads,
            by_sentence=self.target_embedding.separator is not None,
        )
        position = torch.zeros(1, dtype=torch.long, device=source.device)
        own = [StaticLayer(static, layer) for layer in range(layers)]
        cross = [ContextCache(*pair) for pair in self.project_source(source, source_lengths)]
        return DecoderState(source, source_lengths, own, cross, position, static, static.places)

    def project_source(self, source: Tensor, lengths: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [B, H, N, D] of encoded sources, for every decoder layer."""
        states, numbers = without_numbers(source, self.config.hidden_size)
        rotary = SentenceRotary(keys=self.rotation(numbers))
        for layer in self.decoder:
            assert isinstance(layer, DecoderLayer)
            _, keys, values = layer.cross.project(states[:, :1], states, None, lengths, rotary)
            yield keys.contiguous(), values.contiguous()

    def step(self, ids: Tensor, state: DecoderState) -> Tensor:
        """Write ids [B * beam], one a hypothesis, and return the logits [B * beam, V] of what comes next."""
        if state.static is None:
            self.target_embedding.reserve(state.own[0].length + 1)
        else:
            state.static.reorder(state.position)
        x = self.target_embedding.embed(ids[:, None], self.next_signals(ids, state))
        rotation = self.rotation(None if state.places is None else state.places[:, 1:])
        written = None if state.static is None else (state.position + 1).expand(len(ids))
        source = state.source[..., : self.config.hidden_size]
        for layer, own, cross in zip(self.decoder, state.own, state.cross, strict=True):
            assert isinstance(layer, DecoderLayer)
            x = layer.step(x, source, state.source_lengths, own, cross, written, rotation)
        state.position += 1
        return self.logits(self.decoder_norm(x)).squeeze(1)

    def next_signals(self, ids: Tensor, state: DecoderState) -> Tensor:
        """The signals [1, E] or [R, 1, E] of where ids [R] come to stand, which `state` then knows."""
        embedding = self.target_embedding
        if embedding.separator is None:
            return embedding.positions[state.position]
        before = before_start(len(ids), ids.device) if state.places is None else state.places
        places = embedding.next_places(before, ids)
        if state.static is None:
            state.places = places
        else:
            before.copy_(places)
        return embedding.positions[places[:, 0]][:, None]

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


def find_borders(config: ModelConfig, separators: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    """The ids after which positions are counted anew, None where they are counted through."""
    if config.positions == "sequence":
        return None, None
    if None in separators:
        raise ConfigError(
            'model.positions = "sentence" needs a vocabulary with a separator, which that of data with documents has; '
            "set data.documents or data.segment_length"
        )
    return separators
