"""Word alignments: file formats, links out of attention weights, symmetrization, and the alignment error rate."""

import heapq
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

import numpy as np

from rectiformer.errors import ArgumentError, DataError, ShapeError, unknown_name

Link = tuple[int, int]
"""A source and a target word, both counted from 0."""

FORMATS = {"pharaoh": 0, "talp": 1, "naacl": 1}
"""The number of the first word. Pharaoh and TALP have one line per sentence, of `i-j` and `ipj`; NAACL one per link."""

TOKEN = re.compile(r"([0-9]{1,9})([-p])([0-9]{1,9})")
NUMBERED = re.compile(r"\s*([0-9]{1,9})\s+([0-9]{1,9})\s+([0-9]{1,9})(?:\s+([SP]))?(?:\s+[0-9]{0,9}\.?[0-9]{1,20})?\s*")

INDUCTIONS = {"normal": slice(None, -1), "shifted": slice(1, None)}
"""The decoder steps whose rows the target pieces take."""

HEURISTICS = ("intersection", "union", "grow-diag", "grow-diag-final", "grow-diag-final-and")
"""How two alignments become one, by Koehn et al. 2005."""

NEIGHBORS = ((-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1))  # diagonal ones last


@dataclass(frozen=True)
class Links:
    """The gold links of one sentence pair."""

    sure: frozenset[Link]
    possible: frozenset[Link] = frozenset()
    """Links that may be predicted but need not be. A sure link counts as possible, listed here or not."""


@dataclass(frozen=True, kw_only=True)
class AlignmentScore:
    """Alignment error over a corpus, and the link counts behind it."""

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
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By the name of a rate, the 95 % interval of its values in resampled corpora, if requested."""

    def describe(self, intervals: bool = True) -> str:
        """One line: rates, their intervals (without `intervals` only that of the error), and link counts."""
        parts = []
        for name, label in (("aer", "AER"), ("precision", "precision"), ("recall", "recall")):
            low, high = self.intervals[name]
            interval = f" (95 % {low:.4f} to {high:.4f})" if intervals or name == "aer" else ""
            parts.append(f"{label} {getattr(self, name):.4f}{interval}")
        counts = f"{self.predicted:,} links found, {self.sure:,} sure and {self.possible:,} more possible"
        return f"{', '.join(parts)}; {counts} in the gold file"


def parse_links(line: str, where: str, first: int = 0) -> Links:
    """The links of a Pharaoh or TALP line: `i-j` is sure, `ipj` possible; one given as both is sure.

    Args:
        where: file and line, to which a message adds the byte.
        first: number of the first word: 0 for Pharaoh, 1 for TALP.
    """
    found: dict[str, set[Link]] = {"-": set(), "p": set()}
    for token in re.finditer(r"\S+", line):
        link = TOKEN.fullmatch(token[0])
        if link is None or min(int(link[1]), int(link[3])) < first:
            byte = len(line[: token.start()].encode("utf-8", "surrogatepass")) + 1
            raise DataError(
                f"{where}:{byte}: {token[0][:40]!r} is not a link; "
                f"write i-j where it is sure and ipj where it is possible, words counted from {first}"
            )
        found[link[2]].add((int(link[1]) - first, int(link[3]) - first))
    return Links(frozenset(found["-"]), frozenset(found["p"] - found["-"]))


def format_links(sure: Iterable[Link], possible: Iterable[Link] = (), first: int = 0) -> str:
    """The Pharaoh line of these links (TALP, if the first word is 1), sorted; empty if there are none."""
    sure = set(sure)
    marked = ((i, "-" if (i, j) in sure else "p", j) for i, j in sorted(sure.union(possible)))
    return " ".join(f"{i + first}{mark}{j + first}" for i, mark, j in marked)


def read_gold(
    lines: Iterable[str], where: str = "gold", format: str = "pharaoh", sentences: int | None = None
) -> list[Links]:
    """The links of each sentence.

    Args:
        where: the file, to which a message adds line and byte.
        format: one of FORMATS. Where a line is a sentence, an empty line has no links.
        sentences: how many there are; needed for NAACL, which has no lines for sentences without links.
    """
    first = first_word(format)
    if format == "naacl":
        if sentences is None:
            raise ArgumentError("NAACL does not say how many sentences there are; give their number as `sentences`")
        return read_naacl(lines, where, sentences)
    return [parse_links(line, f"{where}:{number}", first) for number, line in enumerate(lines, 1)]


def read_naacl(lines: Iterable[str], where: str, sentences: int) -> list[Links]:
    """Links in the format of the shared tasks of 2003 and 2005, `sentence source target [S|P] [confidence]`.

    All are counted from 1, and lines may come in any order. Without a letter a link is sure; a link to word 0 says that
    the other word has no counterpart.
    """
    found: list[dict[str, set[Link]]] = [{"S": set(), "P": set()} for _ in range(sentences)]
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        link = NUMBERED.fullmatch(line)
        if link is None:
            raise DataError(
                f"{where}:{number}: {line.strip()[:40]!r} is not a link; write `sentence source target S` where it is "
                "sure and P where it is possible, all counted from 1"
            )
        sentence, source, target = (int(part) for part in link.group(1, 2, 3))
        if not 1 <= sentence <= sentences:
            raise DataError(f"{where}:{number}: a link of sentence {sentence}, but there are {sentences}, from 1")
        if source and target:
            found[sentence - 1][link[4] or "S"].add((source - 1, target - 1))
    return [Links(frozenset(each["S"]), frozenset(each["P"] - each["S"])) for each in found]


def check_links(links: Links, source_words: int, target_words: int, where: str) -> None:
    """DataError if a link leads to a word that does not exist."""
    for i, j in sorted(links.sure | links.possible):
        if not (0 <= i < source_words and 0 <= j < target_words):
            raise DataError(
                f"{where}: link {i}-{j} is beyond the sentence, which has {source_words} source and {target_words} "
                "target words, counted from 0; check how the words were split"
            )


def write_links(links: Iterable[AbstractSet[Link]], format: str = "pharaoh") -> Iterator[str]:
    """The lines of an alignment file with the links of each sentence, all of them sure."""
    first = first_word(format)
    for number, each in enumerate(links, 1):
        if format == "naacl":
            yield from (f"{number} {i + first} {j + first} S" for i, j in sorted(each))
        else:
            yield format_links(each, first=first)


def first_word(format: str) -> int:
    if format not in FORMATS:
        raise ArgumentError(unknown_name("alignment format", format, FORMATS))
    return FORMATS[format]


def rows_for(weights: np.ndarray, induction: str, source_pieces: int) -> np.ndarray:
    """One row for each target piece, out of cross-attention weights [M, N]: [M - 1, source_pieces].

    Step i of the M decoder steps predicts piece i, and the last one the end of the sentence; step i + 1 has piece i as
    its input. "normal" gives a piece the row of the step that predicts it, "shifted" that of the step that reads it.
    Columns after the source pieces belong to the end of the sentence or to padding, and are left out.
    """
    steps = steps_of(induction)
    if weights.ndim != 2 or weights.shape[0] < 1 or not 0 <= source_pieces <= weights.shape[1]:
        raise ShapeError(
            f"weights are {list(weights.shape)}, but they need [M N] with M >= 1 and N >= {source_pieces} source pieces"
        )
    return weights[steps, :source_pieces]


def steps_of(induction: str) -> slice:
    """The decoder steps that an induction reads."""
    if induction not in INDUCTIONS:
        raise ArgumentError(unknown_name("induction", induction, INDUCTIONS))
    return INDUCTIONS[induction]


def strongest(weights: np.ndarray) -> np.ndarray:
    """The column of the largest weight in each row of weights [..., M, N], the first of equal ones: [..., M].

    -1 for a null row, which attends to nothing.
    """
    if weights.shape[-1] == 0:
        return np.full(weights.shape[:-1], -1)
    return np.where(weights.max(-1) > 0, weights.argmax(-1), -1)


def links_from_steps(sources: np.ndarray) -> set[Link]:
    """Link target i to sources[i]; -1 is no link."""
    return {(int(sources[target]), int(target)) for target in np.flatnonzero(sources >= 0)}


def alignment_error(predicted: Sequence[AbstractSet[Link]], gold: Sequence[Links]) -> AlignmentScore:
    """Compare predicted links with gold links, summed over all sentences."""
    return score_counts(count_links(predicted, gold).sum(0))


def score_counts(totals: np.ndarray) -> AlignmentScore:
    """The score of counts [5] as `count_links` has them, summed over all sentences."""
    aer, precision, recall = (float(rate) for rate in rates(totals))
    _, _, links, sure, possible = (int(total) for total in totals)
    return AlignmentScore(aer=aer, precision=precision, recall=recall, predicted=links, sure=sure, possible=possible)


def score_with_intervals(
    predicted: Sequence[AbstractSet[Link]], gold: Sequence[Links], resamples: int = 1000, seed: int = 1
) -> AlignmentScore:
    """`alignment_error` with 95 % bootstrap intervals over sentences."""
    if resamples < 2:
        raise ArgumentError(f"resamples = {resamples}, but an interval needs at least 2; 1000 is usual")
    counts = count_links(predicted, gold)
    random = np.random.default_rng(seed)
    totals = [counts[random.integers(len(counts), size=len(counts))].sum(0) for _ in range(resamples)]
    bounds = np.quantile(rates(np.array(totals)), [0.025, 0.975], axis=0)  # [2, 3]
    pairs = [(float(low), float(high)) for low, high in bounds.T]
    intervals = dict(zip(("aer", "precision", "recall"), pairs, strict=True))
    return replace(alignment_error(predicted, gold), intervals=intervals)


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


def rates(totals: np.ndarray) -> np.ndarray:
    """Alignment error, precision and recall [..., 3] of counts [..., 5] as `count_links` has them."""
    found_sure, found_possible, links, sure, _ = np.moveaxis(totals, -1, 0)
    error = np.where(links + sure > 0, 1 - (found_sure + found_possible) / np.maximum(links + sure, 1), 0.0)
    precision = np.where(links > 0, found_possible / np.maximum(links, 1), 1.0)
    recall = np.where(sure > 0, found_sure / np.maximum(sure, 1), 1.0)
    return np.stack([error, precision, recall], axis=-1)


def flip(links: AbstractSet[Link]) -> set[Link]:
    """The same links with source and target exchanged."""
    return {(target, source) for source, target in links}


def symmetrize(forward: AbstractSet[Link], backward: AbstractSet[Link], how: str = "grow-diag-final-and") -> set[Link]:
    """Combine two alignments of one sentence pair, both as (source word, target word).

    Links of a model of the other direction have to be flipped first. "grow-diag" starts from the intersection and adds
    neighbors from the union while they link an unlinked word; "final" then adds links of either alignment with at
    least one unlinked word, "final-and" those with two (Koehn et al. 2005). Links are added in the order of Moses: by
    target word, then by source word, forward before backward. `how` is one of HEURISTICS.
    """
    check_heuristic(how)
    if how == "union":
        return {*forward, *backward}
    grown = Alignment(flip(forward & backward))
    if how != "intersection":
        grown.grow(flip(forward | backward))
    if how.startswith("grow-diag-final"):
        for links in (forward, backward):
            grown.fill(flip(links), both=how.endswith("-and"))
    return flip(grown.links)


def check_heuristic(how: str) -> None:
    """ArgumentError, with the nearest name, if `how` is not one of HEURISTICS."""
    if how not in HEURISTICS:
        raise ArgumentError(unknown_name("symmetrization", how, HEURISTICS))


class Alignment:
    """A growing set of links (target word, source word), and the words it links."""

    def __init__(self, links: AbstractSet[Link]) -> None:
        self.links = set(links)
        self.targets = {target for target, _ in links}
        self.sources = {source for _, source in links}

    def add(self, link: Link) -> None:
        self.links.add(link)
        self.targets.add(link[0])
        self.sources.add(link[1])

    def free_words(self, link: Link) -> int:
        """How many of the two words are unlinked."""
        return (link[0] not in self.targets) + (link[1] not in self.sources)

    def grow(self, union: AbstractSet[Link]) -> None:
        """Add neighbors from `union` that link an unlinked word, until there are none."""
        before = -1
        while before < len(self.links):
            before = len(self.links)
            ahead = sorted(self.links)
            while ahead:
                link = heapq.heappop(ahead)
                for down, right in NEIGHBORS:
                    near = (link[0] + down, link[1] + right)
                    if near in union and self.free_words(near):
                        self.add(near)
                        if near > link:  # still ahead in this pass over the matrix; the others wait for the next
                            heapq.heappush(ahead, near)

    def fill(self, links: AbstractSet[Link], both: bool) -> None:
        """Add those of `links` with one unlinked word, or, with `both`, two."""
        for link in sorted(links):
            if self.free_words(link) >= (2 if both else 1):
                self.add(link)
