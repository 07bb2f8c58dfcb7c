"""Dropout of attention weights as a pure function of (seed, batch, head, query, key).

No state and no generator order: any implementation may visit the cells in any order, or twice (forward and backward),
and drops the same ones. The hash is MurmurHash3's finalizer over 32-bit words.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

GOLDEN = -1640531527  # 0x9E3779B9 as a signed word: spreads neighboring counters over all bits


def drop_seed(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """The seed as one int64 on `device`; drawn from torch's own generator when none is given."""
    if seed is None:
        return torch.randint(1 << 62, (1,), device=device)
    if isinstance(seed, Tensor):
        return seed.to(device=device, dtype=torch.int64).reshape(1)
    return torch.tensor([seed], dtype=torch.int64, device=device)


def keep_cells(
    seed: Tensor, probability: float, cells: Iterable[slice], all_heads: int, origin: tuple[int, int] = (0, 0)
) -> Tensor:
    """True where a weight survives, for the cells in four slices of [B, H, M, N]: [b, h, m, n].

    `origin` is where query 0 and key 0 lie in the dropout pattern of a packed batch.
    """
    batch, heads, queries, keys = cells

    def count(part: slice, first: int = 0) -> Tensor:
        return torch.arange(first + part.start, first + part.stop, device=seed.device, dtype=torch.int32)

    word = (seed ^ (seed >> 32)).to(torch.int32)  # [1]
    sequence = count(batch)[:, None] * all_heads + count(heads)  # [b, h]
    row = murmur3(murmur3(word + sequence * GOLDEN)[:, :, None] + count(queries, origin[0]) * GOLDEN)  # [b, h, m]
    cell = murmur3(row[..., None] + count(keys, origin[1]) * GOLDEN)  # [b, h, m, n], uniform over all 32-bit words
    return cell >= round(probability * 2**32) - 2**31


def murmur3(word: Tensor) -> Tensor:
    """The finalizer of MurmurHash3: a bijective hash of 32-bit words."""
    # torch shifts signed words arithmetically; the masks make the shifts logical.
    word = (word ^ ((word >> 16) & 0xFFFF)) * -2048144789  # 0x85EBCA6B
    word = (word ^ ((word >> 13) & 0x7FFFF)) * -1028477387  # 0xC2B2AE35
    return word ^ ((word >> 16) & 0xFFFF)
