"""The command that measures translations: of lines, of documents, and of what agrees across sentences."""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from rectiformer.cli import options
from rectiformer.cli.inputs import cut_alike, cut_documents, open_translator, put_back, read_text, warn
from rectiformer.cli.options import DOCUMENTS, app, option
from rectiformer.cli.output import check_outputs, counting, to_json, write_all
from rectiformer.errors import ArgumentError, unknown_name
from rectiformer.measure.bleu import METRICS, Score, by_level, check_documents, check_lines, compare, score
from rectiformer.terminal import Terminal
from rectiformer.translate.evaluate import evaluate_agreement, translate_counted
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator


@app.command("evaluate")
def evaluate_command(
    run: Annotated[Path | None, typer.Argument(metavar="RUN", help="Run to translate --source with.")] = None,
    source: Annotated[str, option("Sentences to translate with RUN.")] = "",
    reference: Annotated[str, option("Reference translations.")] = "",
    hypothesis: Annotated[str, option("Translations to score, instead of those of RUN.")] = "",
    baseline: Annotated[Path | None, option("Another run to compare with, by paired bootstrap.")] = None,
    baseline_hypothesis: Annotated[str, option("Translations to compare with, instead of those of a run.")] = "",
    metrics: Annotated[str, option("Any of bleu, chrf and ter, comma-separated.")] = "bleu,chrf",
    samples: Annotated[int, option("Bootstrap samples for 95 % intervals; 0: none, 1000 with a baseline.", min=0)] = 0,
    documents: options.Documents = "none",
    segment: options.SegmentLength = None,
    overlap: options.Overlap = 2,
    agreement: Annotated[
        int, option("Instead, count agreement on this many documents of the built-in grammar.", panel=DOCUMENTS, min=0)
    ] = 0,
    out: Annotated[Path | None, option("File for the translations of RUN, line by line as --source.", "--out")] = None,
    as_json: options.AsJson = False,
    beam: options.Beam = 4,
    length_penalty: options.Penalty = 0.6,
    checkpoint: options.Checkpoint = "best",
    device: options.Device = "auto",
    precision: options.Precision = "fp32",
    batch_tokens: options.BatchTokens = 4096,
) -> None:
    """Score translations of a test set.

    RUN translates --source, or --hypothesis is scored as it is. Scores are sacreBLEU's, with their signatures. With
    --documents each is given twice: over sentences (s-BLEU) and over documents, every document joined into one line
    (d-BLEU). --out keeps the translations, which --hypothesis can score again.

        rectiformer evaluate runs/new --baseline runs/old --source test.de --reference test.en
    """
    if out is not None and run is None:
        raise ArgumentError("--out is for the translations of a RUN, and there is none; leave it out")
    check_outputs([out], [source, reference, hypothesis, baseline_hypothesis])
    names = check_metrics(metrics)
    search = SearchOptions(beam=beam, length_penalty=length_penalty)
    segments = {"limit": segment, "overlap": overlap, "batch_tokens": batch_tokens}
    open_run = partial(open_translator, checkpoint=checkpoint, device=device, precision=precision)
    if agreement:
        if run is None or source or reference or hypothesis or baseline or baseline_hypothesis or out:
            raise ArgumentError("--agreement needs a RUN and no texts: it draws its own from the built-in grammar")
        return print_agreement(open_run(run), agreement, search, segments, as_json)
    if not reference:
        raise ArgumentError("--reference is missing: the right translations, or --agreement for the built-in grammar")
    if (run is None) == (not hypothesis) or (baseline is not None and baseline_hypothesis):
        raise ArgumentError("name one RUN or one --hypothesis, and at most one --baseline or --baseline-hypothesis")
    if (run or baseline) and not source:
        raise ArgumentError("a run needs --source, the sentences to translate")
    right, original = read_text(reference), read_text(source) if run or baseline else []
    references = cut_documents(right, documents)

    def system_of(run: Path | None, file: str) -> list[list[str]]:
        if run is None:
            return cut_alike(read_text(file), right, documents)
        translator, sources = open_run(run), cut_documents(original, documents)
        if documents != "none":
            return translate_documents(translator, sources, references, search, segments, as_json)
        return [translate_lines(translator, sources[0], references[0], search, batch_tokens)]

    systems = {str(run or hypothesis): system_of(run, hypothesis)}
    if out is not None:
        write_all(put_back(systems[str(run)], original, documents), out)
    if other := baseline or baseline_hypothesis:
        systems = {f"{other} (baseline)": system_of(baseline, baseline_hypothesis)} | systems
    return print_levels(systems, references, documents, names, samples, as_json)


def check_metrics(text: str) -> list[str]:
    """The names in a list with commas; ArgumentError where one is no metric."""
    names = text.split(",")
    for name in names:
        if name not in METRICS:
            raise ArgumentError(unknown_name("metric", name, METRICS))
    return names


def translate_lines(
    translator: Translator, sources: list[str], references: list[str], search: SearchOptions, batch_tokens: int
) -> list[str]:
    """The translations of a test set of single lines."""
    check_lines("sources", sources, references)
    with counting("translating") as progress:
        found = translator.translate(sources, search, batch_tokens=batch_tokens, warn=warn, progress=progress)
    return [each.text for each in found]


def translate_documents(
    translator: Translator,
    sources: list[list[str]],
    references: list[list[str]],
    search: SearchOptions,
    segments: dict[str, Any],
    as_json: bool,
) -> list[list[str]]:
    """The translations of a test set of documents; it is said how many segments fell back."""
    check_documents("sources", sources, references)
    with counting("translating documents") as progress:
        found = translate_counted(translator, sources, search, progress, **segments, warn=lambda _: None)
    Terminal(stderr=as_json).note(
        describe_segments(len(found), sum(each.segments for each in found), sum(each.fallbacks for each in found))
    )
    return [each.sentences for each in found]


def print_levels(
    systems: dict[str, list[list[str]]],
    references: list[list[str]],
    documents: str,
    names: list[str],
    samples: int,
    as_json: bool,
) -> None:
    """Scores by each metric, of documents at both levels; with two systems, the second against the first."""
    if documents == "none":
        levels = {"": ({name: lines for name, [lines] in systems.items()}, references[0])}
    else:
        for name, found in systems.items():
            check_documents(f"{name!r}", found, references)
        right, cut = by_level(references), {name: by_level(found) for name, found in systems.items()}
        levels = {level: ({name: found[level] for name, found in cut.items()}, right[level]) for level in right}
    for level, (lines, expected) in levels.items():
        scores = score_level(lines, expected, names, samples)
        named = [(name, replace(found, name=level + found.name), p_value) for name, found, p_value in scores]
        print_scores(named, len(expected), as_json)


def score_level(
    systems: dict[str, list[str]], references: list[str], names: list[str], samples: int
) -> list[tuple[str, Score, float | None]]:
    """Name, score and, with two systems, p-value of each system by each metric."""
    if len(systems) > 1:
        tests = [each for name in names for each in compare(systems, references, name, samples or 1000)]
        return [(each.system, each.score, each.p_value) for each in tests]
    [(system, lines)] = systems.items()
    return [(system, found, None) for found in score(lines, references, names, samples=samples).values()]


def print_scores(scores: list[tuple[str, Score, float | None]], lines: int, as_json: bool) -> None:
    """Scores of systems, each with its p-value against the first system if there are several."""
    if as_json:
        return write_all(
            to_json({"system": system, **asdict(found), "p_value": p_value, "lines": lines})
            for system, found, p_value in scores
        )
    terminal = Terminal()
    compared = len({system for system, _, _ in scores}) > 1
    measured = any(found.low is not None for _, found, _ in scores)
    columns = [*["system"] * compared, "metric", "score", *["95 % interval"] * measured, *["p"] * compared]
    rows = []
    for system, found, p_value in scores:
        interval = "" if found.low is None else f"{found.low:.2f} to {found.high:.2f}"
        chance = "" if p_value is None else f"{p_value:.4f}"
        row = [*[system] * compared, found.name, f"{found.value:.2f}", *[interval] * measured, *[chance] * compared]
        rows.append(row)
    terminal.table(columns, rows, numbers=("score", "p"))
    for name, signature in {found.name: found.signature for _, found, _ in scores}.items():
        terminal.note(f"{name} is {signature}")
    empty = max(found.empty for _, found, _ in scores)
    blank = f", at most {empty:,} of them empty" if empty else ""
    return terminal.note(f"rectiformer {scores[0][1].version}; {lines:,} lines{blank}")


def describe_segments(documents: int, segments: int, fallbacks: int) -> str:
    """One line on how documents went through the model."""
    return f"{documents:,} documents in {segments:,} segments, {fallbacks:,} of them translated in smaller ones"


def print_agreement(
    translator: Translator, count: int, search: SearchOptions, segments: dict[str, Any], as_json: bool
) -> None:
    """On documents of the built-in grammar, one row per type of word that earlier sentences decide, and one for all."""
    with counting("translating documents") as progress:
        found = evaluate_agreement(translator, count, search, **segments, warn=lambda _: None, progress=progress)
    if as_json:
        return write_all([to_json(asdict(found))])
    terminal = Terminal()
    columns = ("words", "agreement", "right", "wrong", "neither")
    rows = [
        [name, f"{each.share:.1%}", f"{each.right:,}", f"{each.wrong:,}", f"{each.neither:,}"]
        for name, each in sorted(found.counts.items())
    ]
    terminal.table(columns, rows, numbers=columns[1:])
    return terminal.note(describe_segments(found.documents, found.segments, found.fallbacks))
