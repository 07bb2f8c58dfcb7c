"""Observation: what an attention hands to whoever watches it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rectiformer.ops.weights import AttentionStats, attention_stats, attention_weights, visible_keys


@dataclass(frozen=True, repr=False)
class Observation:
    """One attention call, seen from outside. Nothing is computed until it is asked for."""

    variant: str
    q: Tensor  # [B, H, M, D]
    k: Tensor  # [B, K, N, D]
    output: Tensor  # [B, H, M, Dv], before norm and output projection
    call: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"Observation({self.variant!r}, q {list(self.q.shape)}, k {list(self.k.shape)})"

    def weights(self, sparse: bool = False) -> Tensor:
        """Weights before dropout: [B, H, M, N], or CSR of the non-zero ones."""
        return attention_weights(self.q, self.k, self.variant, sparse=sparse, **self.call)

    def stats(self) -> AttentionStats:
        """Row statistics, without M x N of anything."""
        return attention_stats(self.q, self.k, self.variant, **self.call)

    def visible(self) -> Tensor:
        """How many keys each query sees; broadcasts to [B, H, M]."""
        return visible_keys(self.q, self.k, self.variant, **self.call)
