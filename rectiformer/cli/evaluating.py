"""The command that measures translations: of lines, of documents, and of what agrees across sentences."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from rectiformer.cli.inputs import (
    DOCUMENTS,
    Documents,
    Overlap,
    SegmentLength,
    joined_documents,
    open_translator,
    read_documents,
    warn,
)
from rectiformer.cli.options import AsJson, BatchTokens, Beam, Checkpoint, Device, Penalty, Precision, app, option
from rectiformer.cli.output import check_outputs, counting, print_scores, to_json, write_all
from rectiformer.errors import ArgumentError, unknown_name
from rectiformer.measure.bleu import METRICS, Score, by_level, check_documents, compare, score
from rectiformer.terminal import Terminal
from rectiformer.translate.evaluate import AgreementEvaluation, evaluate, evaluate_agreement, translate_counted
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator


@app.command("evaluate")
def evaluate_command(
    run: Annotated[Path | None, typer.Argument(metavar="RUN", help="Run to translate --source with.")] = None,
    source: Annotated[str, option("Sentences to translate with RUN.")] = "",
    reference: Annotated[str, option("Right translations.")] = "",
    hypothesis: Annotated[str, option("Translations to score, instead of RUN.")] = "",
    baseline: Annotated[Path | None, option("Another run to compare with, by paired bootstrap.")] = None,
    baseline_hypothesis: Annotated[str, option("Its translations, instead of --baseline.")] = "",
    metrics: Annotated[str, option("Any of bleu, chrf and ter, with commas between.")] = "bleu,chrf",
    samples: Annotated[int, option("Resamples for 95 % intervals; 0 for none, but 1000 to compare.", min=0)] = 0,
    documents: Documents = "none",
    segment: SegmentLength = None,
    overlap: Overlap = 2,
    agreement: Annotated[
        int,
        option("Documents of the built-in grammar to count agreement on, instead of --source.", panel=DOCUMENTS, min=0),
    ] = 0,
    out: Annotated[Path | None, option("File for the translations of RUN, one a line.", "--out")] = None,
    as_json: AsJson = False,
    beam: Beam = 4,
    length_penalty: Penalty = 0.6,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    precision: Precision = "fp32",
    batch_tokens: BatchTokens = 4096,
) -> None:
    """Score translations of a test set.

    RUN translates --source, or --hypothesis is scored as it is; by sacreBLEU, each score with its signature. With
    --documents, s-BLEU is over sentences and d-BLEU over documents, each one line. --out keeps the translations, to be
    scored again by --hypothesis.

        rectiformer evaluate runs/new --baseline runs/old --source test.de --reference test.en
    """
    if out is not None and run is None:
        raise ArgumentError("--out is for the translations of a RUN, and there is none; leave it out")
    check_outputs([out], [source, reference, hypothesis, baseline_hypothesis])
    how = Way(documents, segment, overlap, batch_tokens, SearchOptions(beam=beam, length_penalty=length_penalty))
    names = check_metrics(metrics)

    def open_run(run: Path) -> Translator:
        return open_translator(run, checkpoint, device, precision)

    if agreement:
        if run is None or source or reference or hypothesis or baseline or baseline_hypothesis or out:
            raise ArgumentError("--agreement needs a RUN and no texts: it draws its own from the built-in grammar")
        return print_agreement(how.count_agreement(open_run(run), agreement), as_json)
    if not reference:
        raise ArgumentError("--reference is missing: the right translations, or --agreement for the built-in grammar")
    if (run is None) == (not hypothesis) or (baseline is not None and baseline_hypothesis):
        raise ArgumentError("name one RUN or one --hypothesis, and at most one --baseline or --baseline-hypothesis")
    if (run or baseline) and not source:
        raise ArgumentError("a run needs --source, the sentences to translate")
    references = read_documents(reference, documents)

    def system_of(run: Path | None, file: str) -> list[list[str]]:
        if run is None:
            return read_documents(file, documents)
        return how.translate(open_run(run), read_documents(source, documents), references, as_json)

    systems = {str(run or hypothesis): system_of(run, hypothesis)}
    if out is not None:
        write_all(joined_documents(systems[str(run)], documents), out)
    if other := baseline or baseline_hypothesis:
        systems = {f"{other} (baseline)": system_of(baseline, baseline_hypothesis)} | systems
    return how.print_scores(systems, references, names, samples, as_json)


def check_metrics(text: str) -> list[str]:
    """The names in a list with commas; ArgumentError where one is no metric."""
    names = text.split(",")
    for name in names:
        if name not in METRICS:
            raise ArgumentError(unknown_name("metric", name, METRICS))
    return names


@dataclasses.dataclass(frozen=True)
class Way:
    """How a test set is read, translated and scored."""

    documents: str
    segment: int | None
    overlap: int
    batch_tokens: int
    options: SearchOptions

    def count_agreement(self, translator: Translator, count: int) -> AgreementEvaluation:
        """Agreement on `count` documents of the built-in grammar."""
        with counting("translating documents") as progress:
            return evaluate_agreement(
                translator, count, self.options, limit=self.segment, overlap=self.overlap,
                batch_tokens=self.batch_tokens, warn=lambda _: None, progress=progress,
            )  # fmt: skip

    def translate(
        self, translator: Translator, sources: list[list[str]], references: list[list[str]], as_json: bool
    ) -> list[list[str]]:
        """The translations of a test set; of documents, it is said how many segments fell back."""
        if self.documents == "none":
            lines = (sources[0], references[0])
            with counting("translating") as progress:
                single = evaluate(
                    translator, *lines, self.options, (), batch_tokens=self.batch_tokens, warn=warn, progress=progress
                )
            return [single.hypotheses]
        check_documents("sources", sources, references)
        with counting("translating documents") as progress:
            found = translate_counted(
                translator, sources, self.options, progress, limit=self.segment, overlap=self.overlap,
                batch_tokens=self.batch_tokens, warn=lambda _: None,
            )  # fmt: skip
        Terminal(stderr=as_json).note(
            describe_segments(len(found), sum(each.segments for each in found), sum(each.fallbacks for each in found))
        )
        return [each.sentences for each in found]

    def print_scores(
        self,
        systems: dict[str, list[list[str]]],
        references: list[list[str]],
        names: list[str],
        samples: int,
        as_json: bool,
    ) -> None:
        """Scores by each metric, of documents at both levels; with two systems, the second against the first."""
        if self.documents == "none":
            levels = {"": ({name: lines for name, [lines] in systems.items()}, references[0])}
        else:
            for name, found in systems.items():
                check_documents(f"{name!r}", found, references)
            right, cut = by_level(references), {name: by_level(found) for name, found in systems.items()}
            levels = {level: ({name: found[level] for name, found in cut.items()}, right[level]) for level in right}
        for level, (lines, expected) in levels.items():
            scores = score_level(lines, expected, names, samples)
            named = [(name, dataclasses.replace(found, name=level + found.name), p) for name, found, p in scores]
            print_scores(Terminal(), named, len(expected), as_json)


def score_level(
    systems: dict[str, list[str]], references: list[str], names: list[str], samples: int
) -> list[tuple[str, Score, float | None]]:
    """Name, score and, with two systems, p-value of each system by each metric."""
    if len(systems) > 1:
        tests = [each for name in names for each in compare(systems, references, name, samples or 1000)]
        return [(each.system, each.score, each.p_value) for each in tests]
    [(system, lines)] = systems.items()
    return [(system, found, None) for found in score(lines, references, names, samples=samples).values()]


def describe_segments(documents: int, segments: int, fallbacks: int) -> str:
    """One line on how documents went through the model."""
    return f"{documents:,} documents in {segments:,} segments, {fallbacks:,} of them translated in smaller ones"


def print_agreement(found: AgreementEvaluation, as_json: bool) -> None:
    """One row per type of word that earlier sentences decide, and one for all."""
    if as_json:
        return write_all([to_json(dataclasses.asdict(found))])
    terminal = Terminal()
    columns = ("words", "agreement", "right", "wrong", "neither")
    rows = [
        [name, f"{each.share:.1%}", f"{each.right:,}", f"{each.wrong:,}", f"{each.neither:,}"]
        for name, each in sorted(found.counts.items())
    ]
    terminal.table(columns, rows, numbers=columns[1:])
    terminal.note(describe_segments(found.documents, found.segments, found.fallbacks))
