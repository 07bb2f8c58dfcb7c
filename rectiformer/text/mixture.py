"""Which pairs an epoch draws from corpora of different weight, in an order that anybody can compute again.

A corpus of weight w gives w times its pairs in each epoch, those of every padded length in proportion: of the n that it
has of one length, floor(w * n * e) are drawn before epoch e. They are drawn from one endless row of shuffled passes, so
none is drawn once more before all others were. Weight 1 is each pair once an epoch, weight 3 three times, weight 0.5
every other epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Part(NamedTuple):
    """A corpus among others: its first pair, how many it has, and its weight."""

    first: int
    pairs: int
    weight: float = 1.0


def mix(words: np.ndarray) -> np.ndarray:
    """A bijective hash of 64-bit words (the finalizer of SplitMix64), in place: the same on every machine and numpy."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def sort_keys(numbers: np.ndarray, *parts: object) -> np.ndarray:
    """A key for each number, by which sorting is shuffling; no two numbers have the same."""
    digest = hashlib.sha256("|".join(map(str, parts)).encode()).digest()
    words = numbers.astype(np.uint64)
    with np.errstate(over="ignore"):
        words *= GOLDEN
        words += np.uint64(int.from_bytes(digest[:8], "little"))
        return mix(words)


def shuffled(count: int, *parts: object) -> np.ndarray:
    """A permutation of 0 to count - 1 that depends on `parts` and nothing else."""
    return np.argsort(sort_keys(np.arange(count, dtype=np.uint64), *parts))


def drawn_before(weight: float | np.ndarray, pairs: int | np.ndarray, epoch: int) -> np.ndarray:
    """How many pairs of one length were drawn before an epoch."""
    return np.floor(np.asarray(weight) * (np.asarray(pairs) * epoch)).astype(np.int64)


def draw_pairs(padded: np.ndarray, length: int, parts: Sequence[Part], name: str, epoch: int) -> np.ndarray:
    """The pairs of one padded length that an epoch has, shuffled.

    Args:
        padded: the padded lengths of all pairs.
        name: what the order depends on beside epoch and length.
    """
    found = [np.empty(0, dtype=np.int64)]
    copies = [np.empty(0, dtype=np.int64)]
    for number, part in enumerate(parts):
        members = np.flatnonzero(padded[part.first : part.first + part.pairs] == length)
        times = count_draws(len(members), part.weight, epoch, name, number, length)
        members += part.first
        if times is None:
            found.append(members)
            copies.append(np.zeros(len(members), dtype=np.int64))
            continue
        found.append(np.repeat(members, times))
        copies.append(np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times))
    pairs = np.concatenate(found)
    keys = np.concatenate(copies) * len(padded)  # a pair drawn twice has two places
    keys += pairs
    return pairs[np.argsort(sort_keys(keys, name, epoch, "pairs"))]


def count_draws(pairs: int, weight: float, epoch: int, *name: object) -> np.ndarray | None:
    """How often each of these pairs is drawn in an epoch; None where each is drawn once."""
    if not pairs:
        return None
    start, stop = (int(drawn_before(weight, pairs, number)) for number in (epoch, epoch + 1))
    (first, skipped), (last, rest) = divmod(start, pairs), divmod(stop, pairs)
    if last == first + 1 and not skipped and not rest:
        return None
    times = np.full(pairs, last - first, dtype=np.int64)
    times[shuffled(pairs, *name, first, "corpus")[:skipped]] -= 1
    times[shuffled(pairs, *name, last, "corpus")[:rest]] += 1
    return times
