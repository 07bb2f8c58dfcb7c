"""A rotary embedding over the sentence index, so that a word finds its own sentence in a segment of a document.

Rotated by the same angle, a query and a key keep their product: within a sentence all scores are those of a model of
single sentences. Between sentences they depend on how far apart the sentences are. It is the rotation of Su et al. 2021
(RoFormer) by sentences instead of words, and it needs no mask: each head learns from there what to look for in other
sentences.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Rotation(NamedTuple):
    """Cosines and signed sines [B, 1, M, D] that rotate the vectors of M positions, alike in all heads."""

    cos: Tensor
    sin: Tensor

    def per_source(self, sources: int) -> Rotation:
        """That of hypotheses [R, 1, 1, D] with the beam as the query axis of each source: [B, 1, R / B, D]."""
        return Rotation(*(part.view(sources, 1, -1, part.shape[-1]) for part in self))

    def per_view(self, views: int) -> Rotation:
        """That of each of `views` equal parts of the vectors: every one has some of the frequencies, fast and slow."""
        head_dim, pairs = self.cos.shape[-1] // views, self.cos.shape[-1] // 2
        chosen = slice(0, head_dim // 2 * views, views)
        cos, sin = self.cos[..., :pairs], self.sin[..., pairs : 2 * pairs]
        return pair_up(cos[..., chosen], sin[..., chosen], head_dim)


class SentenceRotary(NamedTuple):
    """How one attention rotates its queries and its keys; None leaves them as they are."""

    queries: Rotation | None = None
    keys: Rotation | None = None


NO_ROTARY = SentenceRotary()


def rotation_of(sentence_ids: Tensor, head_dim: int, dtype: torch.dtype = torch.float32) -> Rotation:
    """The rotation of positions by the index [B, M] of their sentence.

    Dimension j rotates with dimension j + head_dim // 2, by pi (2 j / head_dim)^1.5 from one sentence to the next. No
    two of two thousand sentences then look alike, and in the slow dimensions neighbors still do. The first does not
    rotate at all: it may be the one that holds the score bias (`ScoreBias`).
    """
    pairs = head_dim // 2
    frequencies = math.pi * (torch.arange(pairs, device=sentence_ids.device) / max(1, pairs)) ** 1.5
    angles = sentence_ids[:, None, :, None] * frequencies
    return pair_up(angles.cos().to(dtype), angles.sin().to(dtype), head_dim)


def pair_up(cos: Tensor, sin: Tensor, head_dim: int) -> Rotation:
    """The rotation of vectors whose dimensions j and j + head_dim // 2 turn together; an odd one does not turn."""
    odd = (0, head_dim % 2)
    return Rotation(F.pad(torch.cat([cos, cos], -1), odd, value=1.0), F.pad(torch.cat([-sin, sin], -1), odd))


def apply_rotary(x: Tensor, rotation: Rotation | None, views: int = 1) -> Tensor:
    """Vectors [B, H, M, D] rotated, or x itself where there is no rotation; each view of a variant by itself."""
    if rotation is None:
        return x
    if views > 1:
        parts = [part[:, :, :, None] for part in rotation.per_view(views)]
        return apply_rotary(x.unflatten(-1, (views, -1)), Rotation(*parts)).flatten(-2)
    cos, sin = (part.to(x.dtype) for part in rotation)
    pairs = x.shape[-1] // 2
    partners = torch.cat([x[..., pairs : 2 * pairs], x[..., :pairs], x[..., 2 * pairs :]], -1)
    return torch.addcmul(x * cos, partners, sin)
