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
    sin, odd = angles.sin(), (0, head_dim % 2)
    cos = F.pad(angles.cos().repeat(1, 1, 1, 2), odd, value=1.0)
    return Rotation(cos.to(dtype), F.pad(torch.cat([-sin, sin], -1), odd).to(dtype))


def apply_rotary(x: Tensor, rotation: Rotation | None) -> Tensor:
    """Vectors [B, H, M, D] rotated, or x itself where there is no rotation."""
    if rotation is None:
        return x
    cos, sin = (part.to(x.dtype) for part in rotation)
    pairs = x.shape[-1] // 2
    partners = torch.cat([x[..., pairs : 2 * pairs], x[..., :pairs], x[..., 2 * pairs :]], -1)
    return torch.addcmul(x * cos, partners, sin)
