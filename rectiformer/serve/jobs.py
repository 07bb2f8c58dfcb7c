"""A request as tasks: which to begin with, which follow from their results, and the answer in the end.

Tasks of equal operations share a batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rectiformer.analyze.record import AttentionRecord, Example, ModelCard, to_json
from rectiformer.analyze.recording import capture_examples
from rectiformer.measure.alignment import Link
from rectiformer.measure.words import word_spans
from rectiformer.text.documents import Window
from rectiformer.translate.align import align_pairs
from rectiformer.translate.documents import Draft, Found, Segment, search_segments
from rectiformer.translate.marked import describe_losses
from rectiformer.translate.markup import MarkedText
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.placement import place_tags
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
            contents, self.options, batch_tokens=batch_tokens, too_long="error", is_wanted=is_wanted,
            warn=lambda _: None,  # warnings about a line are in its translation, too
        )  # fmt: skip


@dataclass(frozen=True)
class TranslateSegments:
    """Several sentences of a document together."""

    options: SearchOptions

    def run(
        self, translator: Translator, contents: Sequence[Segment], batch_tokens: int, is_wanted: Wanted
    ) -> list[Found]:
        """What the model generated for each segment."""
        return search_segments(translator, contents, self.options, batch_tokens=batch_tokens, is_wanted=is_wanted)


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


@dataclass(eq=False)
class Job(ABC):
    """A request: translations, then word links and attention of the translated sentences if it asks for them."""

    options: SearchOptions
    align: AlignPairs | None
    """How to link words; None if that is not asked for."""
    card: ModelCard | None
    """The model, for a record of what its heads do; None if that is not asked for."""
    links: dict[Any, tuple[str, str, set[Link]]] = field(init=False, default_factory=dict)
    examples: dict[Any, Example] = field(init=False, default_factory=dict)

    @property
    @abstractmethod
    def sentences(self) -> int:
        """How many there are."""

    @abstractmethod
    def begin(self) -> list[Task]:
        """The first tasks, which translate; none if there is nothing to do."""

    @abstractmethod
    def receive_translation(self, task: Task, result: Any) -> list[Task]:
        """Store a translation; return the tasks that follow from it."""

    @abstractmethod
    def translated(self) -> dict[str, Any]:
        """The part of the answer about translations."""

    def receive(self, task: Task, result: Any) -> list[Task]:
        """Store a result; return the tasks that follow from it."""
        if isinstance(task.operation, AlignPairs):
            self.links[task.key] = (*task.content, result)
        elif isinstance(task.operation, RecordPairs):
            self.examples[task.key] = result
        else:
            return self.receive_translation(task, result)
        return []

    def begin_extras(self, key: Any, source: str, target: str, length: int) -> list[Task]:
        """The tasks for one translated sentence; `key` sorts it among the others."""
        operations = [self.align, RecordPairs() if self.card else None]
        return [Task(each, (source, target), length, key) for each in operations if each is not None]

    def alignment(self, key: Any) -> dict[str, Any]:
        """The part of the answer about the words of one sentence; empty if not asked for."""
        if key not in self.links:
            return {}
        source, target, links = self.links[key]
        spans = {"source_words": word_spans(source), "target_words": word_spans(target)}
        return {"alignment": {**spans, "links": sorted(links)}}

    def answer(self) -> dict[str, Any]:
        """The response, once no task is left."""
        if self.card is None:
            return self.translated()
        examples = [self.examples[key] for key in sorted(self.examples)]
        return {**self.translated(), "record": to_json(AttentionRecord(self.card, examples))}


@dataclass(eq=False)
class SentencesJob(Job):
    """Sentences, each translated by itself."""

    lines: Sequence[str]
    lengths: Sequence[int]
    """Subwords of each."""
    translations: dict[int, Translation] = field(init=False, default_factory=dict)

    @property
    def sentences(self) -> int:
        return len(self.lines)

    def begin(self) -> list[Task]:
        operation = TranslateLines(self.options)
        return [
            Task(operation, line, length + 1, index)  # the end counts as a token too
            for index, (line, length) in enumerate(zip(self.lines, self.lengths, strict=True))
        ]

    def receive_translation(self, task: Task, result: Translation) -> list[Task]:
        self.translations[task.key] = result
        length = max(task.length, len(result.candidates[0].tokens) + 1)
        return self.begin_extras(task.key, task.content, result.text, length)

    def translated(self) -> dict[str, Any]:
        return {"translations": [self.sentence(index) for index in range(self.sentences)]}

    def sentence(self, index: int) -> dict[str, Any]:
        """The part of the answer about one sentence."""
        return self._translation(self.translations[index]) | self.alignment(index)

    def _translation(self, found: Translation) -> dict[str, Any]:
        best = found.candidates[0]
        more = {"nbest": [candidate(each) for each in found.candidates]} if self.options.nbest > 1 else {}
        return candidate(best) | more | {"warnings": found.warnings}


@dataclass(eq=False)
class MarkedJob(SentencesJob):
    """Sentences with tags, which are placed by word links; `lines` are without them."""

    marked: Sequence[MarkedText]
    shows_links: bool
    """Whether the answer has the links of the words too."""

    def sentence(self, index: int) -> dict[str, Any]:
        found, (_, translation, links) = self._translation(self.translations[index]), self.links[index]
        found["text"] = place_tags(self.marked[index], translation, links)
        found["warnings"] = [*found["warnings"], *describe_losses(self.marked[index])]
        return found | (self.alignment(index) if self.shows_links else {})


def candidate(found: Candidate) -> dict[str, Any]:
    return {"text": found.text, "score": finite(found.score), "ended": found.ended}


@dataclass(eq=False)
class DocumentsJob(Job):
    """Whole documents, in segments of several sentences if the model was trained on them."""

    documents: Sequence[list[str]]
    ids: Sequence[list[list[int]]]
    """Subwords of each sentence of each document."""
    limit: int
    """Most subwords of a segment; 0 for sentences by themselves."""
    overlap: int
    """Sentences by which segments overlap."""

    def __post_init__(self) -> None:
        both = zip(self.documents, self.ids, strict=True)
        self.drafts = [Draft(number, 1, sources, ids) for number, (sources, ids) in enumerate(both, 1)]
        self.waiting = [0] * len(self.drafts)  # windows of each document that are not back

    @property
    def sentences(self) -> int:
        return sum(map(len, self.documents))

    def begin(self) -> list[Task]:
        return [
            task
            for number, draft in enumerate(self.drafts)
            for task in self._tasks(number, draft.cut(self.limit, self.overlap))
        ]

    def receive_translation(self, task: Task, result: Found) -> list[Task]:
        """Store a segment's translation, or retry smaller segments; begin the extras of a finished document."""
        number, window = task.key
        draft = self.drafts[number]
        self.waiting[number] -= 1
        smaller = self._tasks(number, draft.take(window, result))
        if self.waiting[number]:
            return smaller
        return [
            extra
            for index in draft.non_blank
            for extra in self.begin_extras(
                (number, index), draft.sources[index], draft.sentences[index], len(draft.ids[index]) + 1
            )
        ]

    def _tasks(self, number: int, windows: Sequence[Window]) -> list[Task]:
        draft, operation = self.drafts[number], TranslateSegments(self.options)
        self.waiting[number] += len(windows)
        segments = [(window, draft.segment(window)) for window in windows]
        return [
            Task(operation, segment, sum(map(len, segment.ids)) + len(segment.ids), (number, window))
            for window, segment in segments
        ]

    def translated(self) -> dict[str, Any]:
        """The documents in order, one translation per sentence."""
        return {"documents": [self._document(number, draft) for number, draft in enumerate(self.drafts)]}

    def _document(self, number: int, draft: Draft) -> dict[str, Any]:
        done = draft.finish(lambda _: None)
        return {
            "translations": [
                {"text": text} | self.alignment((number, index)) for index, text in enumerate(done.sentences)
            ],
            "segments": done.segments,
            "fallbacks": done.fallbacks,
            "warnings": done.warnings,
        }
