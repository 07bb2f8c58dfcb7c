"""Who reads which keys in a decoding step: splits, blocks, warps, and which of the two kernels.

A step is bound by the bytes of the cache, so what counts is how much is on its way from memory at once: enough programs
to fill the device, and in each of them loads that do not wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from rectiformer.ops.gpu import queries_per_key_head
from rectiformer.ops.gpu.common import block_size, power_of_two

SHORT_CACHE = 128
"""Most keys for which one program takes all heads of a row, as its norm needs; longer rows want more programs."""
WIDEST_ROW = 1024
"""Most numbers of all heads that one program holds, filled up to powers of two."""
TILE = 4096
"""Numbers of keys that a program without matrix products holds at once, 16 or 32 for each of its threads."""
MAX_BLOCK_KEYS = 64
"""Keys that a program holds at once, at most."""
KEYS_PER_SPLIT = 128
"""Least keys that are worth a split, in general."""
MAX_SPLITS = 64
FEW_KEYS = 32
"""Up to here grouped heads of a beam take one block, with nothing on its way behind it."""
KEYS_PER_LAUNCH = 1024
"""Least keys of a split for which generation from Python launches a merge: the host, not the device, is what waits."""
MIDDLING = 512
"""Keys that one program reads in about the time that merging takes."""


@dataclass(frozen=True)
class Tiling:
    """How a program of grouped heads walks over its keys. Loads of `stages` - 1 blocks are on their way at once; each
    turn of a beam also waits for the rows it reads, so it takes more stages to keep as much on its way."""

    keys: int
    warps: int
    stages: int


# largest head size of 16-bit numbers -> tiling of many programs, of fewer than multiprocessors, and of a beam, whose
# index says which rows are read; measured on an H200 for heads of 128
TILINGS = {
    64: (Tiling(64, 4, 3), Tiling(64, 4, 3), Tiling(64, 4, 5)),
    128: (Tiling(32, 4, 3), Tiling(64, 4, 3), Tiling(32, 4, 5)),
    256: (Tiling(32, 8, 3), Tiling(32, 8, 3), Tiling(32, 8, 5)),
}
FEW = Tiling(32, 4, 1)
"""Of a beam with at most `FEW_KEYS` keys and heads of 128."""
SMALL_BLOCK = Tiling(32, 2, 0)
"""Of one query row per key head, where a split is short; its loop is not pipelined by Triton."""
EXACT = Tiling(16, 8, 3)
"""Of float32, whose products are each made of three."""
MAX_SKIP_ROWS = 32
"""Most query rows of a key head with which values of zeros are left unread: one of so many wants almost every value.
From 64 on Triton could not even compile it: products of warp groups have no place in the middle of its pipeline."""
PROGRAMS_PER_SM = 4
"""Programs that a multiprocessor runs at once, with what each has asked for on its way from memory."""


def choose_splits(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    normed: bool = False,
    splits: int | None = None,
    skip: bool | None = None,
    indexed: bool = False,
) -> tuple[int, bool, bool]:
    """Splits of a head's keys, whether values of zeros are left unread, and whether one program takes all heads.

    Unread values pay where there are many: finding them out makes a program wait once more. `indexed`: heads that share
    keys and beams that share rows want nearly every value.
    """
    together = splits in (None, 1) and holds_all_heads(q, keys, values) and (normed or fills_device(q))
    length, rows = keys.shape[2], queries_per_key_head(q, keys)
    if skip is None:
        skip = length > (SHORT_CACHE if takes_one_row(q, keys) or not leaves_idle(q, keys) else MIDDLING)
        skip = skip and (rows == 1 or not indexed)
    return 1 if together else splits or split_keys(q, keys), skip and rows <= MAX_SKIP_ROWS, together


def split_keys(q: Tensor, keys: Tensor) -> int:
    """Splits of a head's keys, as measured on an H200; powers of two, so that growing keys change them seldom."""
    one_row = takes_one_row(q, keys)
    if not leaves_idle(q, keys) or (one_row and not takes_small_blocks(q, keys)):
        return count_splits(q, keys)
    programs, length, sms = len(q) * keys.shape[1], keys.shape[2], count_sms(q)
    if one_row:
        splits = min(8 * sms // programs, length // SMALL_BLOCK.keys // 2, MAX_SPLITS)
    elif 4 * programs >= sms:
        splits = min(2 * sms // programs, length // MIDDLING)
    else:
        splits = min(2 * sms // programs, length // 64, 16)
    return power_of_two(max(1, splits) + 1) // 2


def takes_one_row(q: Tensor, keys: Tensor) -> bool:
    """Whether the kernel for one query row per key head does a step: where there is one, unless a row of middling
    length would be all that a multiprocessor has to do. Then the other kernel, which has more on its way, is faster."""
    if queries_per_key_head(q, keys) > 1:
        return False
    half_idle = leaves_idle(q, keys) and 4 * len(q) * keys.shape[1] >= count_sms(q)
    return not (half_idle and SHORT_CACHE < keys.shape[2] <= MIDDLING and q.dtype != torch.float32)


def takes_small_blocks(q: Tensor, keys: Tensor) -> bool:
    """Whether programs of one query row are so many, and their splits so short, that each should hold little."""
    most = min(8 * count_sms(q) // (len(q) * keys.shape[1]), MAX_SPLITS)
    return leaves_idle(q, keys) and keys.shape[2] <= KEYS_PER_SPLIT * most


def leaves_idle(q: Tensor, keys: Tensor) -> bool:
    """Whether one program for each key head leaves multiprocessors without any."""
    return 0 < len(q) * keys.shape[1] < count_sms(q)


def holds_all_heads(q: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether one program should take all heads of a row: short rows with one query each."""
    width = power_of_two(q.shape[1]) * max(block_size(q.shape[3]), block_size(values.shape[3]))
    return queries_per_key_head(q, keys) == 1 and keys.shape[2] <= SHORT_CACHE and width <= WIDEST_ROW


def fills_device(q: Tensor) -> bool:
    """Whether one program per row is enough."""
    return len(q) > 2 * count_sms(q)


def count_splits(q: Tensor, keys: Tensor) -> int:
    """Enough programs to fill the device, as long as each has keys enough to be worth it."""
    programs = max(1, len(q) * keys.shape[1])
    return max(1, min(PROGRAMS_PER_SM * count_sms(q) // programs, keys.shape[2] // KEYS_PER_SPLIT, MAX_SPLITS))


def count_sms(q: Tensor) -> int:
    return count_sms_of(q.get_device()) if q.is_cuda else 1


@cache
def count_sms_of(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
