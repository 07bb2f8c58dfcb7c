"""Sequences laid end to end along one axis, and how to take them apart again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from rectiformer.ops.reference import AttentionCall
from rectiformer.ops.visibility import Visibility


@dataclass(frozen=True)
class Packing:
    """Sequence s owns queries bounds_q[s] to bounds_q[s + 1], and keys likewise; `most` bounds their numbers."""

    bounds_q: Tensor  # [sequences + 1]
    bounds_k: Tensor
    most_q: int | None = None
    most_k: int | None = None

    def split(
        self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, AttentionCall]]:
        """One call for each sequence of [1, H, total, D]; reads the bounds on the host."""
        starts, key_starts = self.bounds_q.tolist(), self.bounds_k.tolist()
        for start, stop, key_start, key_stop in zip(starts, starts[1:], key_starts, key_starts[1:], strict=False):
            M, N = stop - start, key_stop - key_start
            seen = Visibility(M, N, call.visibility.left, call.visibility.right, first=N - M)
            rows, keys = slice(start, stop), slice(key_start, key_stop)
            alone = replace(call, visibility=seen, origin=(start, key_start))
            yield q[:, :, rows], k[:, :, keys], v[:, :, keys], alone
