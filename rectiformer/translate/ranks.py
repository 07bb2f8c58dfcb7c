"""Processes at one translation: which batches are whose, and one input read by all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple
from typing import TypeVar

from rectiformer.runs.team import Team
from rectiformer.translate.lines import take_chunks
from rectiformer.translate.options import Hypothesis

T = TypeVar("T")


def share(team: Team, items: Sequence[T]) -> Sequence[T]:
    """This rank's of some items that all ranks have: every `size`-th."""
    return items[team.rank :: team.size]


def gather_hypotheses(team: Team, own: dict[int, list[Hypothesis]]) -> dict[int, list[Hypothesis]]:
    """What all ranks have found, by the number of its part."""
    if team.size == 1:
        return own
    rows = team.gather(lambda: [(index, [astuple(each) for each in found]) for index, found in own.items()])
    return {index: [Hypothesis(*each) for each in found] for of_rank in rows for index, found in of_rank}


def stream_lines(team: Team, lines: Iterable[str | None], buffer: int = 1000) -> Iterator[str | None]:
    """The lines that rank 0 reads, on every rank; all must take them to the same end."""
    if team.size == 1:
        yield from lines
        return
    chunks = take_chunks(lines, buffer)
    while chunk := team.lead(lambda: next(chunks, [])):
        yield from chunk
