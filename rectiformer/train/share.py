"""Which micro-batches of an update are whose: rank r of R takes numbers r, r + R and so on.

Every rank knows the plan, which is a pure function, so it also knows what the micro-batches of the others count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rectiformer.distributed.ranks import Ranks
from rectiformer.errors import ConfigError
from rectiformer.text.batches import Batch, BatchPlan
from rectiformer.text.stream import StreamPlan


@dataclass(frozen=True)
class Whole:
    """An update that ranks share: the numbers of this rank's micro-batches in it, and what all of them count."""

    numbers: Sequence[int]
    tokens: int
    pairs: int

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> Whole:
        """The update that consists of these and no others."""
        return cls(range(len(batches)), sum(b.tokens for b in batches), sum(len(b.pairs) for b in batches))


def take_share(
    plan: BatchPlan | StreamPlan, first: int, count: int, ranks: Ranks, static: bool
) -> tuple[list[Batch], Whole, list[np.ndarray]]:
    """This rank's micro-batches of the update of batches `first` to `first + count - 1`, and which pairs all hold."""
    batches: list[Batch] = []
    everyone: list[np.ndarray] = []
    tokens = 0
    for number in range(count):
        if number % ranks.world_size == ranks.rank:
            batches.append(plan.batch(first + number, static))
            pairs = batches[-1].pairs
            tokens += batches[-1].tokens
        else:
            pairs = plan.pairs_of(first + number)
            assert isinstance(plan, BatchPlan)  # a stream has one rank only
            tokens += count_tokens(plan, first + number, pairs)
        everyone.append(pairs)
    numbers = range(ranks.rank, count, ranks.world_size)
    return batches, Whole(numbers, tokens, sum(map(len, everyone))), everyone


def count_tokens(plan: BatchPlan, index: int, pairs: np.ndarray) -> int:
    """Target tokens of batch `index`, ends included, without making it."""
    corpus = plan.corpora[plan.locate(index)[0] % len(plan.corpora)]
    return len(pairs) + sum(len(corpus.target(int(pair))) for pair in pairs)


def require_shares(accumulate: int, ranks: int) -> None:
    """ConfigError where the micro-batches of an update cannot be dealt out evenly."""
    if accumulate % ranks:
        fitting = -(-accumulate // ranks) * ranks
        raise ConfigError(
            f"training.grad_accumulation = {accumulate} is not a multiple of the {ranks} ranks; set it to {fitting}, "
            "and training.batch_tokens lower to keep the size of an update, or start another number of ranks"
        )
