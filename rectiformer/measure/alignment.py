"""Word alignments: the Pharaoh format, links out of attention weights, and the alignment error rate."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from rectiformer.errors import ArgumentError, DataError, ShapeError, unknown_name

Link = tuple[int, int]
"""A source and a target word, both counted from 0."""

TOKEN = re.compile(r"([0-9]{1,9})([-p])([0-9]{1,9})")

INDUCTIONS = {"normal": slice(None, -1), "shifted": slice(1, None)}
"""The decoder steps whose rows the target pieces take."""


@dataclass(frozen=True)
class Links:
    """What people found in one sentence pair."""

    sure: frozenset[Link]
    possible: frozenset[Link] = frozenset()
    """Links that may be predicted but need not be. A sure link counts as possible whether or not it is here too."""


@dataclass(frozen=True, kw_only=True)
class AlignmentScore:
    """Alignment error over a corpus, and the numbers of links it was counted from."""

    aer: float
    """1 - (|A & S| + |A & P|) / (|A| + |S|): predicted A, sure S, sure or possible P. 0 if A and S are both empty."""
    precision: float
    """|A & P| / |A|; 1 if nothing was predicted."""
    recall: float
    """|A & S| / |S|; 1 if nothing is sure."""
    predicted: int
    sure: int
    possible: int
    """Links that are possible but not sure."""


def parse_links(line: str, where: str) -> Links:
    """The links of a Pharaoh line: `i-j` is sure, `ipj` possible; one given as both is sure.

    Args:
        where: file and line, to which a message adds the byte.
    """
    found: dict[str, set[Link]] = {"-": set(), "p": set()}
    for token in re.finditer(r"\S+", line):
        link = TOKEN.fullmatch(token[0])
        if link is None:
            byte = len(line[: token.start()].encode("utf-8", "surrogatepass")) + 1
            raise DataError(
                f"{where}:{byte}: {token[0][:40]!r} is not a link; "
                "write i-j where it is sure and ipj where it is possible, words counted from 0"
            )
        found[link[2]].add((int(link[1]), int(link[3])))
    return Links(frozenset(found["-"]), frozenset(found["p"] - found["-"]))


def format_links(sure: Iterable[Link], possible: Iterable[Link] = ()) -> str:
    """The Pharaoh line of these links, sorted; empty if there are none."""
    sure = set(sure)
    return " ".join(f"{i}-{j}" if (i, j) in sure else f"{i}p{j}" for i, j in sorted(sure.union(possible)))


def read_gold(lines: Iterable[str], where: str = "gold") -> list[Links]:
    """The links of each line; an empty line is a sentence without links.

    Args:
        where: the file, to which a message adds line and byte.
    """
    return [parse_links(line, f"{where}:{number}") for number, line in enumerate(lines, 1)]


def rows_for(weights: np.ndarray, induction: str, source_pieces: int) -> np.ndarray:
    """One row for each target piece, out of cross-attention weights [M, N]: [M - 1, source_pieces].

    Step i of the M decoder steps predicts piece i, and the last one the end of the sentence; step i + 1 has piece i as
    its input. "normal" gives a piece the row of the step that predicts it, "shifted" that of the step that reads it.

    Args:
        source_pieces: columns to keep; those after them belong to the end of the sentence or to padding.
    """
    if induction not in INDUCTIONS:
        raise ArgumentError(unknown_name("induction", induction, INDUCTIONS))
    if weights.ndim != 2 or weights.shape[0] < 1 or not 0 <= source_pieces <= weights.shape[1]:
        raise ShapeError(
            f"weights are {list(weights.shape)}, but they need [M N] with M >= 1 and N >= {source_pieces} source pieces"
        )
    return weights[INDUCTIONS[induction], :source_pieces]


def links_from_weights(weights: np.ndarray) -> set[Link]:
    """Link each target (row of weights [M, N]) to the source with its largest weight, the first if several have it.

    A row without a positive weight attends to nothing, and its target gets no link.
    """
    if weights.shape[1] == 0:
        return set()
    sources = weights.argmax(1)
    largest = weights.max(1)
    return {(int(sources[target]), int(target)) for target in np.flatnonzero(largest > 0)}


def alignment_error(predicted: Sequence[AbstractSet[Link]], gold: Sequence[Links]) -> AlignmentScore:
    """Compare predicted links with gold links, summed over all sentences."""
    counts = count_links(predicted, gold)
    found_sure, found_possible, links, sure, possible = (int(total) for total in counts.sum(0))
    return AlignmentScore(
        aer=float(error_rates(counts.sum(0))),
        precision=found_possible / links if links else 1.0,
        recall=found_sure / sure if sure else 1.0,
        predicted=links,
        sure=sure,
        possible=possible,
    )


def bootstrap_interval(
    predicted: Sequence[AbstractSet[Link]], gold: Sequence[Links], samples: int = 1000, seed: int = 1
) -> tuple[float, float]:
    """Where 95 % of the alignment errors of resampled corpora lie: sentences are drawn with replacement."""
    if samples < 2:
        raise ArgumentError(f"samples = {samples}, but an interval needs at least 2; 1000 is usual")
    counts = count_links(predicted, gold)
    random = np.random.default_rng(seed)
    totals = [counts[random.integers(len(counts), size=len(counts))].sum(0) for _ in range(samples)]
    low, high = np.quantile(error_rates(np.array(totals)), [0.025, 0.975])
    return float(low), float(high)


def count_links(predicted: Sequence[AbstractSet[Link]], gold: Sequence[Links]) -> np.ndarray:
    """For each sentence |A & S|, |A & P|, |A|, |S| and |P - S|."""
    if len(predicted) != len(gold):
        raise DataError(f"{len(predicted)} predicted alignments for {len(gold)} gold ones; each sentence needs both")
    if not gold:
        raise DataError("0 predicted alignments for 0 gold ones; there is nothing to compare")
    return np.array(
        [
            (
                len(links & truth.sure),
                len(links & (truth.sure | truth.possible)),
                len(links),
                len(truth.sure),
                len(truth.possible - truth.sure),
            )
            for links, truth in zip(predicted, gold, strict=True)
        ]
    )


def error_rates(totals: np.ndarray) -> np.ndarray:
    """Alignment error of counts [..., 5] as `count_links` has them."""
    found = totals[..., 0] + totals[..., 1]
    links = totals[..., 2] + totals[..., 3]
    return np.where(links > 0, 1 - found / np.maximum(links, 1), 0.0)
