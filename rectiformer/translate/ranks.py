"""Processes at one translation: which batches are whose, and one input read by all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple
from typing import TypeVar

from rectiformer.distributed.ranks import Ranks
from rectiformer.translate.lines import take_chunks
from rectiformer.translate.options import Hypothesis

T = TypeVar("T")


def gather_hypotheses(ranks: Ranks, own: dict[int, list[Hypothesis]]) -> dict[int, list[Hypothesis]]:
    """What all ranks have found, by the number of its part."""
    if ranks.world_size == 1:
        return own
    rows = ranks.all_gather_object(lambda: [(index, [astuple(each) for each in found]) for index, found in own.items()])
    return {index: [Hypothesis(*each) for each in found] for of_rank in rows for index, found in of_rank}


def stream_lines(ranks: Ranks, lines: Iterable[str | None], buffer: int = 1000) -> Iterator[str | None]:
    """The lines that rank 0 reads, on every rank; all must take them to the same end."""
    if ranks.world_size == 1:
        yield from lines
        return
    chunks = take_chunks(lines, buffer)
    while chunk := ranks.on_rank0(lambda: next(chunks, [])):
        yield from chunk
