"""What `analyze` looks at: sentence pairs or documents, of files or of the built-in grammar, and how runs read them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from rectiformer.cli.documents import refuse_line_options
from rectiformer.cli.inputs import read_aligned, read_pairs, read_text, warn
from rectiformer.cli.progress import counting
from rectiformer.errors import ArgumentError

if TYPE_CHECKING:
    from rectiformer.measure.alignment import Links
    from rectiformer.translate.translator import Translator

BUILT_IN = 300
"""Sentences of the built-in grammar, where no files are given."""

Cut = list[tuple[int, int]]
"""First and last, exclusive, of the sentences of each segment, counted through all documents."""


@dataclass(frozen=True)
class TestSet:
    """Sentence pairs, their gold links if there are any, and what they are called."""

    name: str
    pairs: list[tuple[str, str]]
    gold: list[Links] | None
    documents: list[list[tuple[str, str]]] = field(default_factory=list)
    """The same pairs, where they are to be read in documents."""
    own: bool = False
    """Whether the targets are to be each model's own translations."""


def read_test_set(
    source: str, target: str, gold: str, form: str, tokenized: bool, seed: int, documents: str
) -> TestSet:
    """The files that are named or, where none is, unseen sentences of the built-in grammar."""
    if (target and not source) or (gold and not target):
        given = [name for name, file in (("--source", source), ("--target", target), ("--gold", gold)) if file]
        raise ArgumentError(f"{' and '.join(given)} alone; name --source and --target, or neither for built-in text")
    if documents != "none":
        refuse_line_options(gold=gold)
        if not target:
            raise ArgumentError("--documents is about files; name --source and --target, or leave it out")
        found = read_document_pairs(source, target, documents)
        return TestSet(Path(source).name, [pair for each in found for pair in each], None, found)
    if source and not target:
        pairs = [(line, "") for line in read_text(source)]
        return TestSet(f"{Path(source).name}, own translations", pairs, None, own=True)
    if source:
        return TestSet(Path(source).name, *read_aligned(source, target, gold, form, tokenized))
    if tokenized:
        raise ArgumentError("--tokenized is about files; name --source and --target, or leave it out")
    from rectiformer.measure.alignment import Links
    from rectiformer.text.grammar import draw_sentences

    drawn = list(draw_sentences(BUILT_IN, seed, "test"))
    links = [Links(pair.sure, pair.possible) for pair in drawn]
    return TestSet(f"built-in grammar, seed {seed}", [(pair.source, pair.target) for pair in drawn], links)


def require_grammar(runs: list[Path]) -> None:
    """ArgumentError for a run that was trained on other text: the built-in grammar says nothing about it."""
    from rectiformer.runs.folder import open_run

    for run in runs:
        data = open_run(run).config.data
        if data.source or data.stream:
            text = ", ".join(data.source) or "standard input"
            raise ArgumentError(
                f"{run} was trained on {text}, not on the built-in grammar; name sentences of your own by --source, "
                "and their translations by --target"
            )


def with_own_translations(test: TestSet, translator: Translator) -> TestSet:
    """The test set with what a model makes of its sources as targets."""
    from rectiformer.translate.options import SearchOptions

    sources = [source for source, _ in test.pairs]
    with counting("translating") as progress:
        found = translator.translate(sources, SearchOptions(), warn=warn, progress=progress)
    return replace(test, pairs=[(source, each.text) for source, each in zip(sources, found, strict=True)])


def read_document_pairs(source: str, target: str, documents: str) -> list[list[tuple[str, str]]]:
    """The pairs of every document of two files; as in training, those with a blank side are left out."""
    from rectiformer.text.documents import number_rows
    from rectiformer.text.lines import display_name

    rows = ((left, right, "") for left, right in read_pairs(source, target))
    numbered = number_rows(rows, documents, (display_name(source), display_name(target)))
    found, blank = [], 0
    for _, document in groupby(numbered, key=itemgetter(0)):
        pairs = [(left or "", right or "") for _, (left, right, _) in document]
        kept = [pair for pair in pairs if all(text.strip() for text in pair)]
        found += [kept] if kept else []
        blank += len(pairs) - len(kept)
    if blank:
        warn(f"{blank:,} sentence pairs have a blank side; they are left out")
    return found


def cut_test_set(test: TestSet, translators: list[Translator], names: list[str]) -> list[Cut]:
    """The segments that each run reads at once; nothing where sentences are no documents.

    Runs of documents read the same ones, so that they can be compared; a run of sentences reads each by itself.
    """
    from rectiformer.analyze.segments import cut_documents

    if not test.documents:
        return []
    trained = [each for each in translators if each.segment]
    if len({each.segment for each in trained}) > 1:
        lengths = " and ".join(f"{each.segment:,}" for each in trained)
        least = min(each.segment for each in trained)
        warn(f"the runs were trained on segments of {lengths} subwords; to be compared, both read those of {least:,}")
    cuts = []
    for name, translator in zip(names, translators, strict=True):
        if not translator.segment:
            warn(f"{name} was trained on sentences (data.segment_length = 0), so it reads each one by itself")
        cuts.append(cut_documents(trained if translator.segment else [translator], test.documents))
    return cuts


def choose_segments(cuts: list[Cut], count: int, seed: int) -> list[Cut]:
    """A sample of the run with the longest segments, and those of each run that hold the last sentence of these."""
    from rectiformer.analyze.documents import matching_segments
    from rectiformer.analyze.examples import sample

    longest = min(cuts, key=len, default=[])
    chosen = [longest[index] for index in sample(count, len(longest), seed)]
    return [matching_segments(chosen, cut) for cut in cuts]
