"""The command that measures what heads do: its test set, its measures, its files and its table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

from rectiformer.analyze.findings import Findings, analyze, analyze_documents
from rectiformer.analyze.html_report import write_report
from rectiformer.analyze.plots import write_figures
from rectiformer.analyze.record import SITES, AttentionRecord, write_record
from rectiformer.analyze.recording import choose_sites, record_documents, record_pairs, sample
from rectiformer.analyze.segments import cut_documents, matching_segments, take
from rectiformer.analyze.summary import DISTANCES, DISTANCES_TITLE, MEASURES, summarize
from rectiformer.cli import inputs
from rectiformer.cli.inputs import warn
from rectiformer.cli.options import AsJson, Checkpoint, Device, Documents, LinkFormat, Precision, RunFolder, app, option
from rectiformer.cli.output import check_outputs, counting, to_json, write_all
from rectiformer.errors import ArgumentError
from rectiformer.measure.alignment import Links
from rectiformer.ops.variants import find_variant
from rectiformer.runs.folder import open_run
from rectiformer.terminal import Terminal
from rectiformer.text.documents import number_rows
from rectiformer.text.grammar import draw_sentences
from rectiformer.text.lines import display_name
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator

WRITTEN, SHOWN = "Files to write", "Examples"

NewFile = Path | None


@app.command("analyze")
def analyze_command(
    run: RunFolder,
    source: Annotated[
        str, option("Sentences, one per line; default: the built-in grammar, if RUN was trained on it.")
    ] = "",
    target: Annotated[str, option("Their translations, line by line; default: the model's own.")] = "",
    gold: Annotated[str, option("Gold word links, in --format, for the alignment error rate.")] = "",
    form: LinkFormat = "pharaoh",
    documents: Documents = "none",
    tokenized: Annotated[bool, option("Split words at spaces only.", "--tokenized")] = False,
    compare: Annotated[Path | None, option("Another run to compare with.", metavar="RUN2")] = None,
    as_json: AsJson = False,
    report: Annotated[NewFile, option("HTML report: one page that works offline.", panel=WRITTEN)] = None,
    figures: Annotated[NewFile, option("Folder for figures for papers, SVG and PDF.", panel=WRITTEN)] = None,
    record: Annotated[NewFile, option("Attention record of the examples: JSON, or .gz.", panel=WRITTEN)] = None,
    out: Annotated[NewFile, option("All measures, as JSON.", panel=WRITTEN)] = None,
    examples: Annotated[int, option("Sentences or segments in report, record, figures.", panel=SHOWN, min=0)] = 20,
    seed: Annotated[int, option("Seed that chooses the sentences.", panel=SHOWN, min=0)] = 1,
    sites: Annotated[
        str, option("Attention sites to show: cross, encoder, decoder, comma-separated; default: all.", panel=SHOWN)
    ] = "",
    layers: Annotated[str, option("Layers to show, counted from 1, comma-separated; default: all.", panel=SHOWN)] = "",
    max_length: Annotated[
        int | None,
        option("Most subwords per sentence or segment; default: 1024, or the run's segment if longer.", min=1),
    ] = None,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    precision: Precision = "fp32",
) -> None:
    """Measure what every head does, and when it attends to nothing.

    Runs a test set through the model under forced decoding and prints the share of exact zeros, the share of queries
    that attend to nothing, how much heads differ and, with --gold, the alignment error rate. --out has all measures.

    Without --target, each model first translates --source. With --compare, --record and --out of the second run get
    names such as found-2.json. With --documents, the model reads segments of whole documents as in training, and the
    table shows how far cross-attention reaches. Processes of torchrun share the work.

        rectiformer analyze runs/rela --compare runs/softmax --source test.de --target test.en --report look.html
    """
    asked = tuple(dict.fromkeys(sites.split(","))) if sites else None
    view = View(asked, parse_layers(layers), examples, seed, tokenized)
    runs = [run] if compare is None else [run, compare]
    per_run = [numbered(path, number) for path in (record, out) if path for number in range(len(runs))]
    check_outputs([report, *per_run], [source, target, gold])
    with inputs.join_ranks(device) as (ranks, own_device), inputs.only_rank0_prints(ranks):
        inputs.refuse_pipes(ranks, source, target, gold)
        if not source:
            require_grammar(runs)
        test = read_test_set(source, target, gold, form, tokenized, seed, documents)
        translators = [inputs.open_run_translator(folder, checkpoint, own_device, precision) for folder in runs]
        for folder, translator in zip(runs, translators, strict=True):
            translator.max_length, translator.ranks = max_length or translator.max_length, ranks
            view.check(translator, folder)
        names = inputs.distinct_names(runs)
        tests = [with_own_translations(test, each) if test.own else test for each in translators]
        cuts = cut_test_set(test, translators, names)
        shown = choose_segments(cuts, examples, seed)
        found, records = [], []
        for number, (name, translator) in enumerate(zip(names, translators, strict=True)):
            found.append(measure(translator, tests[number], cuts[number] if cuts else None, name, tokenized))
            if report or figures or record:
                records.append(view.record(translator, tests[number], shown[number] if shown else None, name))
        if ranks.is_rank0:
            written = write_files(found, records, report, figures, record, out)
            print_findings(found, view.shows, written, as_json)


@dataclass(frozen=True)
class View:
    """Which attentions and sentences are shown."""

    sites: tuple[str, ...] | None
    layers: tuple[int, ...] | None
    examples: int
    seed: int
    tokenized: bool

    def check(self, translator: Translator, run: Path) -> None:
        """ArgumentError where the model lacks what is to be shown."""
        sites, config = self.sites or SITES, translator.model.config
        try:
            choose_sites(translator.model, sites, None)
        except ArgumentError as error:
            raise ArgumentError(f"{run}: {error}") from error
        most = max(config.encoder_layers if site == "encoder" else config.decoder_layers for site in sites)
        for layer in self.layers or ():
            if layer >= most:
                raise ArgumentError(
                    f"{run}: layer {layer + 1} does not exist; layers count from 1, and the encoder has "
                    f"{config.encoder_layers}, the decoder {config.decoder_layers}"
                )
        for site in self.sites or ():
            variant = translator.model.config.variant_at(site)
            if not find_variant(variant).has_weights:
                raise ArgumentError(
                    f"{run}: {site} attention is {variant!r}, which has no weights; ask for other --sites"
                )

    def shows(self, kind: str, layer: int) -> bool:
        return kind in (self.sites or (kind,)) and layer in (self.layers or (layer,))

    def record(self, translator: Translator, test: TestSet, shown: Cut | None, name: str) -> AttentionRecord:
        """What the heads do with a sample of the test set, or with the segments `shown`."""
        sites = self.sites or SITES
        settings: dict[str, Any] = {"name": name, "tokenized": self.tokenized, "translate": True}
        if shown is not None:
            return record_documents(translator, take([test.pairs], shown), sites, self.layers, **settings)
        chosen = sample(self.examples, len(test.pairs), self.seed)
        pairs = [test.pairs[index] for index in chosen]
        gold = None if test.gold is None else [test.gold[index] for index in chosen]
        return record_pairs(translator, pairs, gold, sites, self.layers, **settings, warn=warn)


def parse_layers(text: str) -> tuple[int, ...] | None:
    """Indices, from 0, of layers that people count from 1."""
    if not text:
        return None
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts) or 0 in map(int, parts):
        raise ArgumentError(f"--layers {text!r} is not a list of layers; write their numbers, from 1, as in 1,6")
    return tuple(dict.fromkeys(int(part) - 1 for part in parts))


def measure(translator: Translator, test: TestSet, segments: Cut | None, name: str, tokenized: bool) -> Findings:
    """All findings, with a bar on the way."""
    with counting(f"{name}: measuring", then=f"{name}: aligning and translating") as progress:
        settings: dict[str, Any] = {"name": test.name, "progress": progress, "model_name": name, "warn": warn}
        if segments is not None:
            return analyze_documents(translator, test.documents, segments, **settings)
        return analyze(translator, test.pairs, gold=test.gold, quality=not test.own, tokenized=tokenized, **settings)


def write_files(
    found: list[Findings],
    records: list[AttentionRecord],
    report: NewFile,
    figures: NewFile,
    record: NewFile,
    out: NewFile,
) -> list[Path]:
    """Write the files that are named; their paths."""
    contents = [each.to_json() for each in found]
    written: list[Path] = []
    for number, each in enumerate(found):
        if out:
            written.append(numbered(out, number))
            each.write(written[-1])
        if record:
            written.append(numbered(record, number))
            write_record(records[number], written[-1])
    if report:
        title = f"{' vs. '.join(each.model.name for each in found)}: {found[0].data.name}"
        written.append(write_report(report, records, contents, title))
    if figures:
        write_figures(contents, records, figures)
        written.append(figures)
    return written


def numbered(path: Path, number: int) -> Path:
    """The file of run `number`, from 0: `a.json.gz`, then `a-2.json.gz`."""
    stem, dot, endings = path.name.partition(".")
    return path if number == 0 else path.with_name(f"{stem}-{number + 1}{dot}{endings}")


def print_findings(
    found: list[Findings], shows: Callable[[str, int], bool], written: list[Path], as_json: bool
) -> None:
    """The summary that the report has too; as JSON, everything."""
    terminal = Terminal()
    contents = [each.to_json() for each in found]
    if as_json:
        write_all(map(to_json, contents))
    elif summary := summarize(contents, shows):
        terminal.note(f"{summary.data}\n")
        terminal.table(summary.columns, summary.measures, numbers=MEASURES[2:8])
        if summary.distances:
            terminal.note(f"\n{DISTANCES_TITLE}\n")
            terminal.table(DISTANCES, summary.distances, numbers=DISTANCES[1:])
        if summary.bleu:
            terminal.note(f"\n{summary.bleu}")
    for path in written:
        Terminal(stderr=as_json).note(f"wrote {path}")


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
        inputs.refuse_line_options(gold=gold)
        if not target:
            raise ArgumentError("--documents is about files; name --source and --target, or leave it out")
        found = read_document_pairs(source, target, documents)
        return TestSet(Path(source).name, [pair for each in found for pair in each], None, found)
    if source and not target:
        pairs = [(line, "") for line in inputs.read_text(source)]
        return TestSet(f"{Path(source).name}, own translations", pairs, None, own=True)
    if source:
        return TestSet(Path(source).name, *inputs.read_aligned(source, target, gold, form, tokenized))
    if tokenized:
        raise ArgumentError("--tokenized is about files; name --source and --target, or leave it out")
    drawn = list(draw_sentences(BUILT_IN, seed, "test"))
    links = [Links(pair.sure, pair.possible) for pair in drawn]
    return TestSet(f"built-in grammar, seed {seed}", [(pair.source, pair.target) for pair in drawn], links)


def require_grammar(runs: list[Path]) -> None:
    """ArgumentError for a run that was trained on other text: the built-in grammar says nothing about it."""
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
    sources = [source for source, _ in test.pairs]
    with counting("translating") as progress:
        found = translator.translate(sources, SearchOptions(), warn=warn, progress=progress)
    return replace(test, pairs=[(source, each.text) for source, each in zip(sources, found, strict=True)])


def read_document_pairs(source: str, target: str, documents: str) -> list[list[tuple[str, str]]]:
    """The pairs of every document of two files; as in training, those with a blank side are left out."""
    rows = ((left, right, "") for left, right in inputs.read_pairs(source, target))
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
    if not test.documents:
        return []
    trained = [each for each in translators if each.segment_length]
    if len({each.segment_length for each in trained}) > 1:
        lengths = " and ".join(f"{each.segment_length:,}" for each in trained)
        least = min(each.segment_length for each in trained)
        warn(f"the runs were trained on segments of {lengths} subwords; to be compared, both read those of {least:,}")
    cuts = []
    for name, translator in zip(names, translators, strict=True):
        if not translator.segment_length:
            warn(f"{name} was trained on sentences (data.segment_length = 0), so it reads each one by itself")
        cuts.append(cut_documents(trained if translator.segment_length else [translator], test.documents))
    return cuts


def choose_segments(cuts: list[Cut], count: int, seed: int) -> list[Cut]:
    """A sample of the run with the longest segments, and those of each run that hold the last sentence of these."""
    longest = min(cuts, key=len, default=[])
    chosen = [longest[index] for index in sample(count, len(longest), seed)]
    return [matching_segments(chosen, cut) for cut in cuts]
