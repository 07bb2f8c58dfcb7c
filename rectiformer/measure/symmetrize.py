"""One alignment out of two: what a model of each direction links, combined by Koehn's heuristics."""

from __future__ import annotations

import heapq
from collections.abc import Set as AbstractSet

from rectiformer.errors import ArgumentError, unknown_name
from rectiformer.measure.alignment import Link

HEURISTICS = ("intersection", "union", "grow-diag", "grow-diag-final", "grow-diag-final-and")

# Beside a link first, then diagonal to it.
NEIGHBORS = ((-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1))


def flip(links: AbstractSet[Link]) -> set[Link]:
    """The same links with source and target exchanged."""
    return {(target, source) for source, target in links}


def symmetrize(forward: AbstractSet[Link], backward: AbstractSet[Link], how: str = "grow-diag-final-and") -> set[Link]:
    """Combine two alignments of one sentence pair, both as (source word, target word).

    What a model of the other direction found has to be flipped first. "grow-diag" starts from the intersection and adds
    neighbors out of the union while they link a word that has no link yet; "final" then adds links of either alignment
    of which one word has none, "final-and" those of which both have none (Koehn et al. 2005). Links are added in the
    order of Moses, by target word, then by source word, and forward before backward.

    Args:
        how: one of HEURISTICS.
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
    """Links that grow, as (target word, source word), and the words that have one."""

    def __init__(self, links: AbstractSet[Link]) -> None:
        self.links = set(links)
        self.targets = {target for target, _ in links}
        self.sources = {source for _, source in links}

    def add(self, link: Link) -> None:
        self.links.add(link)
        self.targets.add(link[0])
        self.sources.add(link[1])

    def free_words(self, link: Link) -> int:
        """How many of the two words have no link yet."""
        return (link[0] not in self.targets) + (link[1] not in self.sources)

    def grow(self, union: AbstractSet[Link]) -> None:
        """Add neighbors out of `union` that link a word without a link, until there are none."""
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
                        if near > link:  # still to come in this pass over the matrix; the others are in the next
                            heapq.heappush(ahead, near)

    def fill(self, links: AbstractSet[Link], both: bool) -> None:
        """Add those of `links` of which one word, or with `both` each word, has no link yet."""
        for link in sorted(links):
            if self.free_words(link) >= (2 if both else 1):
                self.add(link)
