"""Queries and keys turned by the numbers of their sentences, so that a word finds its own sentence in a segment.

Turned by the same angle, a query and a key have the product they had: within a sentence all scores are those of a model
of single sentences. Between sentences they depend on how far apart those are, and what fitted fits no more. It is the
rotation of Su et al. 2021 (RoFormer) by sentences in place of words, and it needs no mask: each head learns from there
what to look for in other sentences.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

COUNTED = 128
"""Numbers of sentences are held as two digits of this base, which 16-bit floats hold exactly."""


class Turn(NamedTuple):
    """How far vectors of some positions are turned, for all heads alike: what each dimension and the one it turns with
    are multiplied by, [B, 1, M, D]."""

    cosines: Tensor
    sines: Tensor

    def of_beams(self, sentences: int) -> Turn:
        """That of hypotheses [R] as those of each of `sentences`: [B, 1, R / B, D]."""
        return Turn(*(part.view(sentences, 1, -1, part.shape[-1]) for part in self))


class Turns(NamedTuple):
    """Those of the queries and of the keys of one attention; None leaves them as they are."""

    queries: Turn | None = None
    keys: Turn | None = None


STILL = Turns()


def turn_by(numbers: Tensor, head: int, dtype: torch.dtype = torch.float32) -> Turn:
    """What the numbers [B, M] of their sentences turn positions by, for heads of `head` dimensions.

    Dimension j turns with dimension j + head // 2, by pi (2 j / head)^1.5 from one sentence to the next. No two of two
    thousand sentences then look alike, and in the slow ones neighbors still do. The first does not turn at all: it may
    be the one that opens rectified scores (`Opening`).
    """
    pairs = head // 2
    angles = math.pi * (torch.arange(pairs, device=numbers.device) / max(1, pairs)) ** 1.5
    by = numbers[:, None, :, None] * angles
    sines, odd = by.sin(), (0, head % 2)
    cosines = F.pad(by.cos().repeat(1, 1, 1, 2), odd, value=1.0)
    return Turn(cosines.to(dtype), F.pad(torch.cat([-sines, sines], -1), odd).to(dtype))


def turned(x: Tensor, turn: Turn | None) -> Tensor:
    """Vectors [B, H, M, D] of the positions of `turn`, turned."""
    if turn is None:
        return x
    cosines, sines = (part.to(x.dtype) for part in turn)
    pairs = x.shape[-1] // 2
    others = torch.cat([x[..., pairs : 2 * pairs], x[..., :pairs], x[..., 2 * pairs :]], -1)
    return torch.addcmul(x * cosines, others, sines)


def with_numbers(states: Tensor, numbers: Tensor | None) -> Tensor:
    """Encoded positions [B, N, E] with the numbers [B, N] of their sentences, if any, as two more columns: what copies,
    selects or shares them takes those along."""
    if numbers is None:
        return states
    digits = torch.stack([numbers // COUNTED, numbers % COUNTED], -1)
    return torch.cat([states, digits.to(states.dtype)], -1)


def without_numbers(encoded: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
    """What `with_numbers` was given, for states of `width` columns."""
    if encoded.shape[-1] == width:
        return encoded, None
    states, digits = encoded[..., :width], encoded[..., width:].long()
    return states, digits[..., 0] * COUNTED + digits[..., 1]
