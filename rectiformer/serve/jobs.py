"""A request as tasks: which to begin with, which follow from their results, and the answer in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rectiformer.analyze.record import AttentionRecord, Example, ModelCard, to_json
from rectiformer.measure.alignment import Link
from rectiformer.measure.words import word_spans
from rectiformer.serve.tasks import AlignPairs, Task, TranslateLines, TranslateSegments, WatchPairs
from rectiformer.text.documents import Window
from rectiformer.translate.documents import Draft
from rectiformer.translate.lines import Candidate, Translation, finite
from rectiformer.translate.options import SearchOptions


class Job(Protocol):
    """What a request is to the service."""

    sentences: int

    def begin(self) -> list[Task]:
        """The first tasks; none if there is nothing to do."""

    def receive(self, task: Task, result: Any) -> list[Task]:
        """Take a result; the tasks that follow from it."""

    def answer(self) -> dict[str, Any]:
        """What the client gets, once no task is left."""


@dataclass(frozen=True)
class Watching:
    """What is asked for beside translations."""

    align: AlignPairs | None
    """How to link words; None if that is not asked for."""
    card: ModelCard | None
    """The model, for a record of what its heads do; None if that is not asked for."""


class Watched:
    """Sentences with their translations, and what is found out about them."""

    def __init__(self, watching: Watching) -> None:
        self.watching = watching
        self.links: dict[Any, tuple[str, str, set[Link]]] = {}
        self.examples: dict[Any, Example] = {}

    def begin(self, place: Any, source: str, target: str, length: int) -> list[Task]:
        """The tasks for one sentence; `place` sorts it among the others."""
        kinds = [self.watching.align, WatchPairs() if self.watching.card else None]
        return [Task(kind, (source, target), length, place) for kind in kinds if kind is not None]

    def receive(self, task: Task, result: Any) -> None:
        """Keep the result of such a task."""
        if isinstance(task.kind, AlignPairs):
            self.links[task.place] = (*task.content, result)
        else:
            self.examples[task.place] = result

    def alignment(self, place: Any) -> dict[str, Any]:
        """The part of the answer about the words of one sentence; empty if not asked for."""
        if place not in self.links:
            return {}
        source, target, links = self.links[place]
        return {
            "alignment": {
                "source_words": word_spans(source),
                "target_words": word_spans(target),
                "links": sorted(links),
            }
        }

    def record(self) -> dict[str, Any]:
        """The part of the answer about heads; empty if not asked for."""
        if self.watching.card is None:
            return {}
        examples = [self.examples[place] for place in sorted(self.examples)]
        return {"record": to_json(AttentionRecord(self.watching.card, examples))}


class SentencesJob:
    """Sentences, each translated by itself.

    Args:
        lengths: subwords of each.
    """

    def __init__(
        self, lines: Sequence[str], lengths: Sequence[int], options: SearchOptions, watching: Watching
    ) -> None:
        self.lines, self.lengths, self.options = lines, lengths, options
        self.sentences = len(lines)
        self.watched = Watched(watching)
        self.translations: dict[int, Translation] = {}

    def begin(self) -> list[Task]:
        """A task a sentence."""
        kind = TranslateLines(self.options)
        return [
            Task(kind, line, length + 1, place)  # the end counts as a token too
            for place, (line, length) in enumerate(zip(self.lines, self.lengths, strict=True))
        ]

    def receive(self, task: Task, result: Any) -> list[Task]:
        """Keep a translation, and have it watched if asked for; or keep what was seen."""
        if not isinstance(task.kind, TranslateLines):
            self.watched.receive(task, result)
            return []
        self.translations[task.place] = result
        length = max(task.length, len(result.candidates[0].tokens) + 1)
        return self.watched.begin(task.place, task.content, result.text, length)

    def answer(self) -> dict[str, Any]:
        """The translations in the order of the sentences."""
        return {
            "translations": [
                self._translation(self.translations[place]) | self.watched.alignment(place)
                for place in range(self.sentences)
            ]
        } | self.watched.record()

    def _translation(self, found: Translation) -> dict[str, Any]:
        best = found.candidates[0]
        more = {"nbest": [candidate(each) for each in found.candidates]} if self.options.nbest > 1 else {}
        return candidate(best) | more | {"warnings": found.warnings}


def candidate(found: Candidate) -> dict[str, Any]:
    return {"text": found.text, "score": finite(found.score), "ended": found.ended}


class DocumentsJob:
    """Whole documents, in segments of several sentences where the model was trained on such.

    Args:
        ids: subwords of each sentence of each document.
        limit: most subwords of a segment; 0 for sentences by themselves.
    """

    def __init__(
        self,
        documents: Sequence[list[str]],
        ids: Sequence[list[list[int]]],
        options: SearchOptions,
        watching: Watching,
        limit: int,
        overlap: int = 2,
    ) -> None:
        self.options, self.limit, self.overlap = options, limit, overlap
        self.sentences = sum(map(len, documents))
        self.drafts = [Draft(number + 1, 1, *both) for number, both in enumerate(zip(documents, ids, strict=True))]
        self.waiting = [0] * len(documents)  # windows of each document that are not back
        self.watched = Watched(watching)

    def begin(self) -> list[Task]:
        """A task a segment."""
        return [
            task
            for number, draft in enumerate(self.drafts)
            for task in self._tasks(number, draft.cut(self.limit, self.overlap))
        ]

    def receive(self, task: Task, result: Any) -> list[Task]:
        """Place what was written for a segment, or try smaller ones; a document that is done may be watched."""
        if not isinstance(task.kind, TranslateSegments):
            self.watched.receive(task, result)
            return []
        number, window = task.place
        self.waiting[number] -= 1
        smaller = self._tasks(number, self.drafts[number].place(window, result))
        return smaller if self.waiting[number] else self._watch(number)

    def _tasks(self, number: int, windows: Sequence[Window]) -> list[Task]:
        draft, kind = self.drafts[number], TranslateSegments(self.options)
        self.waiting[number] += len(windows)
        segments = [(window, draft.segment(window)) for window in windows]
        return [
            Task(kind, segment, sum(map(len, segment.ids)) + len(segment.ids), (number, window))
            for window, segment in segments
        ]

    def _watch(self, number: int) -> list[Task]:
        draft = self.drafts[number]
        return [
            task
            for index in draft.places
            for task in self.watched.begin(
                (number, index), draft.sources[index], draft.sentences[index], len(draft.ids[index]) + 1
            )
        ]

    def answer(self) -> dict[str, Any]:
        """The documents in their order, a translation for each of their sentences."""
        return {
            "documents": [self._document(number, draft) for number, draft in enumerate(self.drafts)]
        } | self.watched.record()

    def _document(self, number: int, draft: Draft) -> dict[str, Any]:
        done = draft.finish(lambda _: None)
        return {
            "translations": [
                {"text": text} | self.watched.alignment((number, index)) for index, text in enumerate(done.sentences)
            ],
            "segments": done.segments,
            "fallbacks": done.fallbacks,
            "warnings": done.warnings,
        }
