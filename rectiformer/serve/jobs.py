"""A request as tasks: which to begin with, which follow from their results, and the answer in the end.

Tasks of equal operations share a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rectiformer.analyze.record import AttentionRecord, Example, ModelCard, to_json
from rectiformer.analyze.recording import capture_examples
from rectiformer.measure.alignment import Link
from rectiformer.measure.words import word_spans
from rectiformer.text.documents import Window
from rectiformer.translate.align import align_pairs
from rectiformer.translate.documents import Draft, Found, Segment, search_segments
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.records import finite
from rectiformer.translate.translator import Candidate, Translation, Translator

Pair = tuple[str, str]
Wanted = Callable[[int], bool]
"""Whether somebody still waits for the result of task n of a batch."""


class Operation(Protocol):
    """What the model does with a batch of tasks; equal operations can share one."""

    def run(
        self, translator: Translator, contents: Sequence[Any], batch_tokens: int, is_wanted: Wanted
    ) -> Sequence[Any]:
        """The result of each content, in order; arbitrary where `is_wanted(n)` is no longer true."""


@dataclass(frozen=True)
class TranslateLines:
    """Sentences, each by itself."""

    options: SearchOptions

    def run(
        self, translator: Translator, contents: Sequence[str], batch_tokens: int, is_wanted: Wanted
    ) -> list[Translation]:
        return translator.translate(
            contents, self.options, batch_tokens=batch_tokens, too_long="error", warn=ignore, is_wanted=is_wanted
        )


@dataclass(frozen=True)
class TranslateSegments:
    """Several sentences of a document together."""

    options: SearchOptions

    def run(
        self, translator: Translator, contents: Sequence[Segment], batch_tokens: int, is_wanted: Wanted
    ) -> list[Found]:
        """What the model generated for each segment."""
        return search_segments(translator, contents, self.options, batch_tokens, 0, is_wanted=is_wanted)


@dataclass(frozen=True)
class AlignPairs:
    """Sentences and their translations, to be linked word by word."""

    layer: int
    head: int | str
    induction: str

    def run(
        self, translator: Translator, contents: Sequence[Pair], batch_tokens: int, is_wanted: Wanted
    ) -> list[set[Link]]:
        """Links (source word, target word) of each pair, from one forward pass, which is not interrupted."""
        return align_pairs(
            translator, contents,
            layer=self.layer, head=self.head, induction=self.induction, batch_tokens=batch_tokens,
        )  # fmt: skip


@dataclass(frozen=True)
class RecordPairs:
    """Sentences and their translations, to record what every head does."""

    def run(
        self, translator: Translator, contents: Sequence[Pair], batch_tokens: int, is_wanted: Wanted
    ) -> list[Example | None]:
        """The examples of an attention record, each from a forward pass of its own."""
        return [
            capture_examples(translator, [pair])[0] if is_wanted(index) else None for index, pair in enumerate(contents)
        ]


@dataclass(frozen=True)
class Task:
    """One piece of work for the model."""

    operation: Operation
    content: Any
    length: int
    """Tokens it adds to a batch."""
    key: Any
    """Identifies the result to its job."""


def ignore(_: str) -> None:
    """Warnings about a line are in its translation, too."""


class Job(Protocol):
    """A request, as the service sees it."""

    sentences: int

    def begin(self) -> list[Task]:
        """The first tasks; none if there is nothing to do."""

    def receive(self, task: Task, result: Any) -> list[Task]:
        """Store a result; return the tasks that follow from it."""

    def answer(self) -> dict[str, Any]:
        """The response, once no task is left."""


class Extras:
    """Word links and attention of translated sentences, as far as a request asks for them.

    Args:
        align: how to link words; None if that is not asked for.
        card: the model, for a record of what its heads do; None if that is not asked for.
    """

    def __init__(self, align: AlignPairs | None, card: ModelCard | None) -> None:
        self.align, self.card = align, card
        self.links: dict[Any, tuple[str, str, set[Link]]] = {}
        self.examples: dict[Any, Example] = {}

    def begin(self, key: Any, source: str, target: str, length: int) -> list[Task]:
        """The tasks for one sentence; `key` sorts it among the others."""
        operations = [self.align, RecordPairs() if self.card else None]
        return [Task(each, (source, target), length, key) for each in operations if each is not None]

    def receive(self, task: Task, result: Any) -> None:
        if isinstance(task.operation, AlignPairs):
            self.links[task.key] = (*task.content, result)
        else:
            self.examples[task.key] = result

    def alignment(self, key: Any) -> dict[str, Any]:
        """The part of the answer about the words of one sentence; empty if not asked for."""
        if key not in self.links:
            return {}
        source, target, links = self.links[key]
        return {
            "alignment": {
                "source_words": word_spans(source),
                "target_words": word_spans(target),
                "links": sorted(links),
            }
        }

    def record(self) -> dict[str, Any]:
        """The part of the answer about heads; empty if not asked for."""
        if self.card is None:
            return {}
        examples = [self.examples[key] for key in sorted(self.examples)]
        return {"record": to_json(AttentionRecord(self.card, examples))}


class SentencesJob:
    """Sentences, each translated by itself.

    Args:
        lengths: subwords of each.
    """

    def __init__(self, lines: Sequence[str], lengths: Sequence[int], options: SearchOptions, extras: Extras) -> None:
        self.lines, self.lengths, self.options = lines, lengths, options
        self.sentences = len(lines)
        self.extras = extras
        self.translations: dict[int, Translation] = {}

    def begin(self) -> list[Task]:
        operation = TranslateLines(self.options)
        return [
            Task(operation, line, length + 1, index)  # the end counts as a token too
            for index, (line, length) in enumerate(zip(self.lines, self.lengths, strict=True))
        ]

    def receive(self, task: Task, result: Any) -> list[Task]:
        """Store a translation and begin its extras, or store one of those."""
        if not isinstance(task.operation, TranslateLines):
            self.extras.receive(task, result)
            return []
        self.translations[task.key] = result
        length = max(task.length, len(result.candidates[0].tokens) + 1)
        return self.extras.begin(task.key, task.content, result.text, length)

    def answer(self) -> dict[str, Any]:
        return {
            "translations": [
                self._translation(self.translations[index]) | self.extras.alignment(index)
                for index in range(self.sentences)
            ]
        } | self.extras.record()

    def _translation(self, found: Translation) -> dict[str, Any]:
        best = found.candidates[0]
        more = {"nbest": [candidate(each) for each in found.candidates]} if self.options.nbest > 1 else {}
        return candidate(best) | more | {"warnings": found.warnings}


def candidate(found: Candidate) -> dict[str, Any]:
    return {"text": found.text, "score": finite(found.score), "ended": found.ended}


class DocumentsJob:
    """Whole documents, in segments of several sentences if the model was trained on them.

    Args:
        ids: subwords of each sentence of each document.
        limit: most subwords of a segment; 0 for sentences by themselves.
    """

    def __init__(
        self,
        documents: Sequence[list[str]],
        ids: Sequence[list[list[int]]],
        options: SearchOptions,
        extras: Extras,
        limit: int,
        overlap: int = 2,
    ) -> None:
        self.options, self.limit, self.overlap = options, limit, overlap
        self.sentences = sum(map(len, documents))
        self.drafts = [Draft(number + 1, 1, *both) for number, both in enumerate(zip(documents, ids, strict=True))]
        self.waiting = [0] * len(documents)  # windows of each document that are not back
        self.extras = extras

    def begin(self) -> list[Task]:
        return [
            task
            for number, draft in enumerate(self.drafts)
            for task in self._tasks(number, draft.cut(self.limit, self.overlap))
        ]

    def receive(self, task: Task, result: Any) -> list[Task]:
        """Store a segment's translation, or retry smaller segments; begin the extras of a finished document."""
        if not isinstance(task.operation, TranslateSegments):
            self.extras.receive(task, result)
            return []
        number, window = task.key
        self.waiting[number] -= 1
        smaller = self._tasks(number, self.drafts[number].take(window, result))
        return smaller if self.waiting[number] else self._begin_extras(number)

    def _tasks(self, number: int, windows: Sequence[Window]) -> list[Task]:
        draft, operation = self.drafts[number], TranslateSegments(self.options)
        self.waiting[number] += len(windows)
        segments = [(window, draft.segment(window)) for window in windows]
        return [
            Task(operation, segment, sum(map(len, segment.ids)) + len(segment.ids), (number, window))
            for window, segment in segments
        ]

    def _begin_extras(self, number: int) -> list[Task]:
        draft = self.drafts[number]
        return [
            task
            for index in draft.non_blank
            for task in self.extras.begin(
                (number, index), draft.sources[index], draft.sentences[index], len(draft.ids[index]) + 1
            )
        ]

    def answer(self) -> dict[str, Any]:
        """The documents in order, one translation per sentence."""
        return {
            "documents": [self._document(number, draft) for number, draft in enumerate(self.drafts)]
        } | self.extras.record()

    def _document(self, number: int, draft: Draft) -> dict[str, Any]:
        done = draft.finish(lambda _: None)
        return {
            "translations": [
                {"text": text} | self.extras.alignment((number, index)) for index, text in enumerate(done.sentences)
            ],
            "segments": done.segments,
            "fallbacks": done.fallbacks,
            "warnings": done.warnings,
        }
