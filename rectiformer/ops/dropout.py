"""Dropout of attention weights as a pure function of (seed, batch, head, query, key).

No state and no generator order: any implementation may visit the cells in any order, or twice (forward and backward),
and drops the same ones. A cell's hash is the product of a number of its query and a number of its key, modulo 2^32: one
instruction, since kernels make it for every cell. All that has to look random is in those numbers (`scatter`).
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
    if seed >= 1 << 63:  # torch's own seeds have 64 bits without a sign
        seed -= 1 << 64
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

    pattern = count(batch)[:, None] * all_heads + count(heads)  # [b, h]
    of_queries = murmur3(murmur3(seed.to(torch.int32)) + pattern * GOLDEN)
    of_keys = murmur3(of_queries ^ (seed >> 32).to(torch.int32))
    row = scatter(of_queries, count(queries, origin[0])) | 1  # [b, h, m]; odd, so that its products differ
    column = scatter(of_keys, count(keys, origin[1]))  # [b, h, n]
    cell = row[..., None] * column[..., None, :]  # [b, h, m, n]
    return (cell & 0x7FFFFFFF) >= drop_threshold(probability)


def drop_threshold(probability: float) -> int:
    """Cells whose hash, of 31 bits, is below are dropped. 15 bits decide, since kernels compare two cells at once."""
    return min(round(probability * 2**15), 2**15 - 1) << 16


def scatter(word: Tensor, index: Tensor) -> Tensor:
    """A number for each index, [b, h, i]: a square, so that no sums of two numbers agree as those of equal steps do."""
    place = word[..., None] + index * GOLDEN
    return place * place ^ place


def murmur3(word: Tensor) -> Tensor:
    """The finalizer of MurmurHash3: a bijective hash of 32-bit words."""
    # torch shifts signed words arithmetically; the masks make the shifts logical.
    word = (word ^ ((word >> 16) & 0xFFFF)) * -2048144789  # 0x85EBCA6B
    word = (word ^ ((word >> 13) & 0x7FFFF)) * -1028477387  # 0xC2B2AE35
    return word ^ ((word >> 16) & 0xFFFF)
