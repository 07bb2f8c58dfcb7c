"""Subwords to vectors, with signals of their position: in the sequence, or in their sentence of a segment."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rectiformer.model.dropout import Dropout
from rectiformer.ops.reference import autocast_dtype


class Embedding(nn.Module):
    """Subwords to vectors: scaled rows, one learned bias, sinusoids of their positions.

    Args:
        bos: the id that a decoder's input begins with; it reads as zeros, bias included.
        separator: the id between sentences, where positions are counted in each sentence; default: counted through.
            A source's sentence ends with it; in a decoder, where it predicts the next word, it begins the next sentence
            as `bos` begins the first.
    """

    positions: Tensor

    def __init__(
        self, table: nn.Parameter, dropout: float, bos: int | None = None, separator: int | None = None
    ) -> None:
        super().__init__()
        self.table = table
        self.bias = nn.Parameter(torch.zeros(table.shape[1]))
        self.drop = Dropout(dropout)
        self.bos, self.separator = bos, separator
        self.outgrown: list[Tensor] = []  # shorter tables: graphs that were captured with them read them for good
        self.register_buffer("positions", sinusoids(512, table.shape[1]), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, M] to [B, M, E]."""
        self.reserve(ids.shape[1])
        where = slice(ids.shape[1]) if self.separator is None else self.sentence_positions(ids)[..., 0]
        return self.embed(ids, self.positions[where])

    def sentence_ids(self, ids: Tensor) -> Tensor | None:
        """The index [B, M] of the sentence that each of ids [B, M] is in; None where positions are counted through."""
        return None if self.separator is None else self.sentence_positions(ids)[..., 1]

    def embed(self, ids: Tensor, where: Tensor) -> Tensor:
        """ids [B, M] to [B, M, E], with the signals [M, E] or [B, M, E] of their positions."""
        x = F.embedding(ids, self.table) * math.sqrt(self.table.shape[1]) + self.bias
        if self.bos is not None:  # the decoder begins with a zero vector, not with a symbol of its own
            x = x * (ids != self.bos)[..., None]
        return self.drop((x + where).to(working_dtype(x)))

    def sentence_positions(self, ids: Tensor) -> Tensor:
        """The position of each of ids [B, M] in its sentence, and the index of that sentence, from 0: [B, M, 2]."""
        assert self.separator is not None
        separators = (ids == self.separator).long()
        sentence_ids = separators.cumsum(1)
        if self.bos is None:
            sentence_ids = sentence_ids - separators
        firsts = torch.searchsorted(sentence_ids, sentence_ids)  # they never fall: this is where each sentence begins
        return torch.stack([torch.arange(ids.shape[1], device=ids.device) - firsts, sentence_ids], -1)

    def next_sentence_positions(self, positions: Tensor, ids: Tensor) -> Tensor:
        """The sentence positions [R, 2] of a decoder's next ids [R], after those at `positions` [R, 2]."""
        assert self.separator is not None
        begins = ids == self.separator
        return torch.stack([(positions[:, 0] + 1).masked_fill(begins, 0), positions[:, 1] + begins], -1)

    def reserve(self, length: int) -> None:
        """Have position signals for `length` positions, before steps that cannot make them."""
        if length > len(self.positions):
            self.outgrown.append(self.positions)
            with torch.inference_mode(False):  # made while translating, they may be used in training next
                self.positions = sinusoids(2 * length, self.table.shape[1]).to(self.positions)


def working_dtype(x: Tensor) -> torch.dtype:
    """What the residual stream is held in: the dtype of autocast where that is on."""
    return autocast_dtype(x.device) or x.dtype


def sinusoids(length: int, width: int) -> Tensor:
    """Position signals [length, width] of the first positions."""
    return position_signals(torch.arange(length), width)


def position_signals(positions: Tensor, width: int) -> Tensor:
    """Signals [length, width]: sines in the first half, cosines in the second, time scales 1 to 10,000."""
    half = width // 2
    # In float32 the signals of position 2,048 would already be off by 1e-4.
    steps = torch.arange(half, dtype=torch.float64, device=positions.device)
    angles = positions[:, None] * torch.exp(steps * (-math.log(10_000) / max(1, half - 1)))  # [length, half]
    return F.pad(torch.cat([angles.sin(), angles.cos()], -1), (0, width % 2)).float()
