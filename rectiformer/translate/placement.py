"""Where the tags of a line go in its translation.

The tags are a tree, whose root is the line (translate/markup.py). Every source word belongs to one element of the tree,
and every target word to that of the source words it is linked to. An element takes the stretch that has most of its own
words and least of others, inside its parent and apart from its siblings; words without links join it where nothing
speaks for another. An element without a linked word stands where its neighbors in the source are. So whatever the links
say, tags are nested as they were.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice, zip_longest
from typing import NamedTuple

from rectiformer.measure.alignment import Link
from rectiformer.measure.words import Span, word_spans
from rectiformer.translate.markup import Element, MarkedText, escape

Stretch = tuple[int, int]
"""Words from the first up to, but not including, the second."""
UNLINKED, TAKEN, OTHER = -1, -2, 0
"""What a word belongs to where it is not a child: nothing, a sibling already placed, or another element."""


class Words(NamedTuple):
    """First and last source word of an element, and how many it has."""

    first: int
    last: int
    number: int


def place_tags(marked: MarkedText, translation: str, links: AbstractSet[Link]) -> str:
    """The translation with the tags of `marked`, by links of words of its text and words of the translation."""
    if len(marked.elements) == 1:
        return escape(translation)
    return "".join(render(Placement(marked, translation, links), translation))


class Placement:
    """Every element of a line has a stretch of the translation's words."""

    def __init__(self, marked: MarkedText, translation: str, links: AbstractSet[Link]) -> None:
        self.elements, self.words = marked.elements, word_spans(translation)
        source = word_spans(marked.text)
        self.starts = [start for start, _ in source]
        owners = find_owners(source, marked.pieces, marked.elements[0])
        self.targets: list[list[int]] = [[] for _ in source]
        votes: list[Counter[int]] = [Counter() for _ in self.words]
        for i, j in sorted(links):
            if i < len(source) and j < len(self.words):
                self.targets[i].append(j)
                votes[j][owners[i].index] += 1
        self.linked = [word for word, found in enumerate(self.targets) if found]
        self.owners = [favorite(each) for each in votes]
        """By word, the element it belongs to."""
        self.own = count_words(marked.elements, owners)
        self.stretches: list[Stretch] = [(0, 0)] * len(self.elements)
        self.stretches[0] = (0, len(self.words))
        for element in self.elements:  # a parent comes before its children
            self.place_children(element)

    def place_children(self, element: Element) -> None:
        """Give each child a stretch inside that of `element`."""
        start, stop = self.stretches[element.index]
        rest = element.children
        if start == stop:
            for child in rest:
                self.stretches[child.index] = (start, start)
            return
        taken: list[Stretch] = []
        labels: list[int] = []
        whole = self.own[element.index]
        covering = next((child for child in rest if whole and self.own[child.index] == whole), None)
        if covering is not None:  # what is about all words of its parent is about all of the translation too
            self.stretches[covering.index] = (start, stop)
            taken.append((start, stop))
            rest = [child for child in rest if child is not covering]
        elif rest:
            labels = self.label(element, start, stop)
            rest = self.place_linked(element, labels, start, taken)
        bounds: dict[tuple[int, Words | None], tuple[int, int]] = {}
        for child in rest:
            key = (child.start, self.own[child.index])
            if key not in bounds:
                bounds[key] = self.find_bounds(child, start, stop)
            self.stretches[child.index] = self.place_unlinked(child, bounds[key], labels, start, stop, taken)

    def label(self, element: Element, start: int, stop: int) -> list[int]:
        """For each word of a stretch the child of `element` that it belongs to, OTHER, or UNLINKED."""
        firsts = [child.index for child in element.children]
        return [
            firsts[bisect_right(firsts, owner) - 1]
            if element.index < owner <= element.last
            else (UNLINKED if owner == UNLINKED else OTHER)
            for owner in self.owners[start:stop]
        ]

    def place_linked(self, element: Element, labels: list[int], start: int, taken: list[Stretch]) -> list[Element]:
        """Place the children that words belong to, those with the clearest stretch first; the children that are left.

        Args:
            labels: of the words from `start` on; those given away become TAKEN.
            taken: the stretches that are given away, in order.
        """
        members: dict[int, list[int]] = {}
        for index, label in enumerate(labels):
            if label > OTHER:
                members.setdefault(label, []).append(index)
        score = {child: best_stretch(labels, child, own)[0] for child, own in members.items()}
        placed = set()
        for child in sorted(members, key=lambda child: (-score[child], child)):
            found, left, right = best_stretch(labels, child, members[child])
            if not found:
                continue
            own, around = self.own[child], self.own[element.index]
            assert own is not None  # some source word made it a label
            assert around is not None
            if own.first == around.first:
                while left and labels[left - 1] == UNLINKED:
                    left -= 1
            if own.last == around.last:
                while right < len(labels) and labels[right] == UNLINKED:
                    right += 1
            labels[left:right] = [TAKEN] * (right - left)
            self.stretches[child] = (start + left, start + right)
            insort(taken, self.stretches[child])
            placed.add(child)
        return [child for child in element.children if child.index not in placed]

    def find_bounds(self, child: Element, start: int, stop: int) -> tuple[int, int]:
        """Where the source words around an element end and begin in a stretch; -1 where no such word is linked."""
        own = self.own[child.index]
        begun = bisect_left(self.starts, child.start)  # words, one that the tag is inside of included
        before, after = (own.first, own.last + 1) if own else (begun, begun)
        nearer = reversed(self.linked[: bisect_left(self.linked, before)])
        left = next((found[-1] + 1 for word in nearer if (found := self.inside(word, start, stop))), -1)
        farther = islice(self.linked, bisect_left(self.linked, after), None)
        right = next((found[0] for word in farther if (found := self.inside(word, start, stop))), -1)
        return left, right

    def inside(self, word: int, start: int, stop: int) -> list[int]:
        """The words of a stretch that a source word is linked to."""
        targets = self.targets[word]
        return targets[bisect_left(targets, start) : bisect_left(targets, stop)]

    def place_unlinked(
        self,
        child: Element,
        bounds: tuple[int, int],
        labels: list[int],
        start: int,
        stop: int,
        taken: list[Stretch],
    ) -> Stretch:
        """A stretch for an element that no word belongs to: words without links where its own would be, or empty."""
        left, right = bounds
        if self.own[child.index] and labels:
            first, last = (start if left < 0 else left), (stop if right < 0 else right)
            if first < last and all(labels[word - start] == UNLINKED for word in range(first, last)):
                labels[first - start : last - start] = [TAKEN] * (last - first)
                insort(taken, (first, last))
                return first, last
        attached = left if child.follows else right
        gap = max(left, right, start) if min(left, right) < 0 else attached
        around = bisect_left(taken, (gap, gap)) - 1
        if around >= 0 and taken[around][0] < gap < taken[around][1]:  # not in the midst of a sibling
            first, last = taken[around]
            gap = first if gap - first < last - gap else last
        return gap, gap


def favorite(votes: Counter[int]) -> int:
    """The element with most votes, the inner one of equals."""
    return max(votes, key=lambda index: (votes[index], index), default=UNLINKED)


def find_owners(words: Sequence[Span], pieces: Sequence[tuple[int, int, Element]], root: Element) -> list[Element]:
    """The element of each source word: the innermost that it touches; of several, that of most of its characters."""
    found, first = [], 0
    for start, end in words:
        while first < len(pieces) and pieces[first][1] <= start:
            first += 1
        touched: Counter[Element] = Counter()
        for index in range(first, len(pieces)):
            left, right, element = pieces[index]
            if left >= end:
                break
            touched[element] += min(end, right) - max(start, left)
        ordered = sorted(touched, key=lambda element: element.index)
        inner = [each for each, after in zip_longest(ordered, ordered[1:]) if after is None or not each.holds(after)]
        found.append(max(inner, key=touched.__getitem__, default=root))
    return found


def count_words(elements: Sequence[Element], owners: Sequence[Element]) -> list[Words | None]:
    """The source words of each element, those of inner ones included; None where it has none."""
    found: list[Words | None] = [None] * len(elements)

    def add(index: int, first: int, last: int, number: int) -> None:
        had = found[index] or Words(first, last, 0)
        found[index] = Words(min(had.first, first), max(had.last, last), had.number + number)

    for word, owner in enumerate(owners):
        add(owner.index, word, word, 1)
    for element in reversed(elements):
        if element.parent is not None and (inner := found[element.index]) is not None:
            add(element.parent.index, *inner)
    return found


def best_stretch(labels: Sequence[int], child: int, members: Sequence[int]) -> tuple[int, int, int]:
    """Score, start and end of the stretch of words with most of `child` and least of others, the longest of equals.

    Args:
        members: the words labelled so, in order.
    """
    best = (0, 0, 0)
    begin, score = -1, 0
    for word in range(members[0], members[-1] + 1):
        label = labels[word]
        if label == TAKEN:
            begin = -1
        elif label == child:
            if begin < 0 or score < 0:
                begin, score = word, 0
            score += 1
            if (score, word + 1 - begin) > (best[0], best[2] - best[1]):
                best = (score, begin, word + 1)
        elif label != UNLINKED:
            score -= 1
    return best


def render(placement: Placement, translation: str) -> Iterator[str]:
    """The pieces of the translation and the tags, in order."""
    stack = [render_element(placement.elements[0], placement, translation)]
    while stack:  # and not by recursion: there may be thousands of elements one in the other
        piece = next(stack[-1], None)
        if piece is None:
            stack.pop()
        elif isinstance(piece, Element):
            stack.append(render_element(piece, placement, translation))
        else:
            yield piece


def render_element(element: Element, placement: Placement, translation: str) -> Iterator[str | Element]:
    """The tags of an element, its words with what is between them, and its children where they go."""
    words, stretches = placement.words, placement.stretches
    start, stop = stretches[element.index]
    position = words[start][0] if element.parent and start < stop else 0
    """The character up to which the translation was given."""
    last = words[stop - 1][1] if element.parent and start < stop else len(translation)
    if element.parent and start == stop:
        position = last
    yield element.opening
    for child in sorted(element.children, key=lambda child: (*stretches[child.index], child.index)):
        first, end = stretches[child.index]
        if start < stop:
            stands_after = first > start and ((child.follows and first == end) or first == stop)
            reach = words[first - 1][1] if stands_after else words[first][0] if first < stop else last
            if reach > position:
                yield escape(translation[position:reach])
                position = reach
        yield child
        if end > first:
            position = words[end - 1][1]
    if last > position:
        yield escape(translation[position:last])
    yield element.closing
