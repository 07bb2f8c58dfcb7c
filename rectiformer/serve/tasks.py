"""What the model is asked to do, a batch of like tasks at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rectiformer.analyze.capture import watch_pairs
from rectiformer.analyze.record import Example
from rectiformer.measure.alignment import Link
from rectiformer.translate.align import align_pairs
from rectiformer.translate.documents import Found, Segment, search_segments
from rectiformer.translate.lines import Translation
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator


class Kind(Protocol):
    """Tasks that can share a batch; equal kinds can."""

    def run(
        self, translator: Translator, contents: Sequence[Any], batch_tokens: int, is_wanted: Callable[[int], bool]
    ) -> Sequence[Any]:
        """What becomes of each content, in order; anything where `is_wanted` said that contents[n] is not any more."""


@dataclass(frozen=True)
class TranslateLines:
    """Sentences, each by itself."""

    options: SearchOptions

    def run(
        self, translator: Translator, contents: Sequence[str], batch_tokens: int, is_wanted: Callable[[int], bool]
    ) -> list[Translation]:
        """Their translations."""
        return translator.translate(
            contents, self.options, batch_tokens=batch_tokens, too_long="error", warn=ignore, is_wanted=is_wanted
        )


@dataclass(frozen=True)
class TranslateSegments:
    """Several sentences of a document together."""

    options: SearchOptions

    def run(
        self, translator: Translator, contents: Sequence[Segment], batch_tokens: int, is_wanted: Callable[[int], bool]
    ) -> list[Found]:
        """What the model wrote for each segment."""
        return search_segments(translator, contents, self.options, batch_tokens, 0, is_wanted=is_wanted)


@dataclass(frozen=True)
class AlignPairs:
    """Sentences and their translations, to be linked word by word."""

    layer: int
    head: int | str
    induction: str

    def run(
        self,
        translator: Translator,
        contents: Sequence[tuple[str, str]],
        batch_tokens: int,
        is_wanted: Callable[[int], bool],
    ) -> list[set[Link]]:
        """Links (source word, target word) of each pair, from one forward pass, which is not interrupted."""
        return align_pairs(
            translator, contents,
            layer=self.layer, head=self.head, induction=self.induction, batch_tokens=batch_tokens,
        )  # fmt: skip


@dataclass(frozen=True)
class WatchPairs:
    """Sentences and their translations, to see what every head does."""

    def run(
        self,
        translator: Translator,
        contents: Sequence[tuple[str, str]],
        batch_tokens: int,
        is_wanted: Callable[[int], bool],
    ) -> list[Example | None]:
        """The examples of an attention record, each from a forward pass of its own."""
        return [watch_pairs(translator, [pair])[0] if is_wanted(index) else None for index, pair in enumerate(contents)]


@dataclass(frozen=True)
class Task:
    """One thing to do."""

    kind: Kind
    content: Any
    length: int
    """Tokens it brings into a batch."""
    place: Any
    """Where its job wants the result."""


def ignore(_: str) -> None:
    """What there is to say of a line is in its translation's warnings too."""
