"""Agreement across sentences: how often a word that only an earlier sentence decides was translated correctly.

A dependent word counts once, by the words of the translation of its sentence, whatever their case:

    right    the correct form is among them, and none of the wrong ones
    wrong    a wrong form is among them
    neither  anything else: the word was left out, or translated in another way
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

WORD = re.compile(r"\w+")


class Dependent(Protocol):
    """A word whose translation an earlier sentence decides, such as a `Dependent` of text/grammar."""

    @property
    def kind(self) -> str: ...

    @property
    def correct(self) -> str: ...

    @property
    def wrong(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Agreement:
    """How many dependent words are right, wrong or neither."""

    right: int = 0
    wrong: int = 0
    neither: int = 0

    @property
    def total(self) -> int:
        return self.right + self.wrong + self.neither

    @property
    def share(self) -> float:
        """The share of dependent words that are right; 0 if there are none."""
        return self.right / max(1, self.total)

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(self.right + other.right, self.wrong + other.wrong, self.neither + other.neither)


def judge(hypothesis: str, dependent: Dependent) -> Agreement:
    """Whether one dependent word is right, wrong or neither in the translation of its sentence."""
    words = {word.lower() for word in WORD.findall(hypothesis)}
    if words.intersection(form.lower() for form in dependent.wrong):
        return Agreement(wrong=1)
    return Agreement(right=1) if dependent.correct.lower() in words else Agreement(neither=1)


def count_agreement(hypotheses: Sequence[str], dependents: Sequence[Iterable[Dependent]]) -> dict[str, Agreement]:
    """Agreement of the translations of sentences, by kind of the dependent words in each, and of "all" together."""
    counts = {"all": Agreement()}
    for hypothesis, rows in zip(hypotheses, dependents, strict=True):
        for row in rows:
            found = judge(hypothesis, row)
            for name in ("all", row.kind):
                counts[name] = counts.get(name, Agreement()) + found
    return counts
