"""One question of the page and its answer: a sentence, the heads to leave out, and what the model then does."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from rectiformer.analyze.capture import model_card, watch_pairs
from rectiformer.analyze.record import AttentionRecord, to_json
from rectiformer.errors import ArgumentError
from rectiformer.explore.switching import Head, switched_off, without_heads
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator

LONGEST = 20_000
"""Most characters of a text; live.js says the same."""
SUBWORDS = 512
"""Most subwords of a side: a softmax record of more would not fit a browser."""
MOST_OFF = 10_000


@dataclass(frozen=True)
class Question:
    """What the page asks of a model."""

    source: str
    target: str | None
    """What the heads are to be watched writing; the model's own translation if None."""
    off: frozenset[Head]
    model: int

    @classmethod
    def from_json(cls, content: Any) -> Question:
        """The question in a request; ArgumentError, in one line, where it is none."""
        if not isinstance(content, dict):
            raise ArgumentError("the request is no JSON object; send {source, target, off, model}")
        target, model = content.get("target"), content.get("model", 0)
        if type(model) is not int:
            raise ArgumentError(f"model is {show(model)}; it is the number of a model, from 0")
        return cls(
            check_text("source", content.get("source")),
            None if target is None else check_text("target", target),
            parse_heads(content.get("off", [])),
            model,
        )


def check_text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ArgumentError(f"{name} is {show(value)}; it needs some text")
    if len(value) > LONGEST:
        raise ArgumentError(f"{name} has {len(value):,} characters, but at most {LONGEST:,} are read; shorten it")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ArgumentError(f"{name} has half of a surrogate pair, which is no character; remove it")
    return value


def parse_heads(value: Any) -> frozenset[Head]:
    if not isinstance(value, list) or len(value) > MOST_OFF:
        raise ArgumentError(f"off is {show(value)}; it is a list of at most {MOST_OFF:,} [kind, layer, head]")
    for each in value:
        if not isinstance(each, list) or [type(part) for part in each] != [str, int, int]:
            raise ArgumentError(f"off has {show(each)}; each head is [kind, layer, head]")
    return frozenset(Head(*each) for each in value)


def show(value: Any) -> str:
    """The start of a value, on one line, whatever it holds."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


class Answerer:
    """A model that answers.

    Args:
        name: of the model, for the record.
    """

    def __init__(self, translator: Translator, name: str) -> None:
        self.translator = translator
        self.card = model_card(translator.model, name)

    def answer(self, question: Question) -> dict[str, Any]:
        """The model's own translation, its score, and the record of the heads while they write it or the target."""
        self.check_lengths(question)
        with switched_off(self.translator.model, question.off):
            (own,) = self.translator.translate([question.source], SearchOptions(), too_long="error")
            target = own.text if question.target is None else question.target
            (example,) = watch_pairs(self.translator, [(question.source, target)])
        example = dataclasses.replace(
            example,
            forced=question.target is not None,
            translation=own.text,
            sites=[without_heads(site, question.off) for site in example.sites],
        )
        record = to_json(AttentionRecord(self.card, [example]))
        return {"translation": own.text, "score": own.candidates[0].score, "record": record}

    def check_lengths(self, question: Question) -> None:
        sides = (("source", self.translator.source), ("target", self.translator.target))
        for (name, vocabulary), text in zip(sides, (question.source, question.target), strict=True):
            subwords = len(vocabulary.encode(text or ""))
            if subwords > SUBWORDS:
                raise ArgumentError(f"{name} has {subwords:,} subwords, but at most {SUBWORDS} are shown; shorten it")
