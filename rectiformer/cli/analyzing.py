"""Commands that look into a model: analyze, explore."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rectiformer.cli.inputs import LinkFormat, open_translator, read_aligned, warn
from rectiformer.cli.options import AsJson, Checkpoint, Device, Precision, RunFolder, app, option
from rectiformer.cli.results import Outputs, print_findings, write_files
from rectiformer.errors import ArgumentError

if TYPE_CHECKING:
    from rectiformer.analyze.findings import Findings, SiteFindings
    from rectiformer.analyze.record import AttentionRecord
    from rectiformer.measure.alignment import Links
    from rectiformer.translate.translator import Translator

WRITTEN, SHOWN = "Files to write", "Examples"
BUILT_IN = 300
"""Sentences of the built-in grammar, where no files are given."""

NewFile = Path | None
SecondRun = Annotated[Path | None, typer.Argument(metavar="RUN2", help="Another run, to compare.")]


@app.command("analyze")
def analyze_command(
    run: RunFolder,
    source: Annotated[str, option("Sentences, one a line; without them, the built-in grammar's.")] = "",
    target: Annotated[str, option("Their translations, line by line.")] = "",
    gold: Annotated[str, option("Right word links, in the format of --format, for the alignment error.")] = "",
    form: LinkFormat = "pharaoh",
    tokenized: Annotated[bool, option("Words are what stands between spaces.", "--tokenized")] = False,
    beside: Annotated[Path | None, option("Another run, to compare.")] = None,
    as_json: AsJson = False,
    report: Annotated[NewFile, option("One HTML page to explore, offline.", panel=WRITTEN)] = None,
    figures: Annotated[NewFile, option("Folder of figures for papers, SVG and PDF.", panel=WRITTEN)] = None,
    record: Annotated[NewFile, option("Attention record of the examples; .gz too.", panel=WRITTEN)] = None,
    out: Annotated[NewFile, option("All measures, as JSON.", panel=WRITTEN)] = None,
    examples: Annotated[int, option("Sentences in report, record and figures.", panel=SHOWN, min=0)] = 20,
    seed: Annotated[int, option("Decides which sentences.", panel=SHOWN, min=0)] = 1,
    kinds: Annotated[str, option("Any of cross, encoder and decoder, with commas between.", panel=SHOWN)] = "",
    layers: Annotated[str, option("Their layers, from 0, with commas between; all unless given.", panel=SHOWN)] = "",
    longest: Annotated[int, option("Most subwords of a sentence or document.", min=1)] = 1024,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    precision: Precision = "fp32",
) -> None:
    """Measure what every head does, and when it attends to nothing.

    Over a test set, under forced decoding: shares of zeros and of queries that attend to nothing, how much heads
    differ, and with links the alignment error. --out has more. A second run's files end in -2.

        rectiformer analyze runs/rela --beside runs/softmax --source test.de --target test.en --report look.html
    """
    view = View(parse_kinds(kinds), parse_layers(layers), examples, seed, tokenized)
    check_outputs([report, record, out], [source, target, gold])
    test = read_test_set(source, target, gold, form, tokenized, seed)
    runs = [run] if beside is None else [run, beside]
    translators = [open_translator(folder, checkpoint, device, precision) for folder in runs]
    for folder, translator in zip(runs, translators, strict=True):
        translator.longest = longest
        view.check(translator, folder)
    found, records = [], []
    for name, translator in zip(distinct_names(runs), translators, strict=True):
        found.append(measure(translator, test, name, tokenized))
        if report or figures or record:
            records.append(view.record(translator, test, name))
    written = write_files(found, records, Outputs(report, figures, record, out))
    print_findings(found, view.shows, written, as_json)


@app.command()
def explore(
    run: RunFolder,
    beside: SecondRun = None,
    port: Annotated[int, option("Port to listen on; 0 takes a free one.", min=0, max=65535)] = 0,
    no_browser: Annotated[bool, option("Only say the address.", "--no-browser")] = False,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    precision: Precision = "fp32",
) -> None:
    """Type a sentence and see every head, live, in the browser.

    Force a target, switch heads off, compare two runs. The page is served to this machine only, until Ctrl-C.

        rectiformer explore runs/rela runs/softmax
    """
    from rectiformer.explore.answers import Answerer
    from rectiformer.terminal import Terminal

    try:
        from rectiformer.explore.server import listen, open_browser, serve
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "uvicorn"):
            raise
        raise ArgumentError(f'explore needs {error.name}; pip install "rectiformer[serve]"') from error
    runs = [run] if beside is None else [run, beside]
    names = distinct_names(runs)
    models = [
        Answerer(open_translator(folder, checkpoint, device, precision), name)
        for folder, name in zip(runs, names, strict=True)
    ]
    listening = listen(port)
    address = f"http://{listening.getsockname()[0]}:{listening.getsockname()[1]}/"
    Terminal().note(f"exploring {' beside '.join(names)} at {address} (Ctrl-C ends it)")
    if not no_browser:
        open_browser(address)
    serve(models, listening)


@dataclass(frozen=True)
class TestSet:
    """Sentence pairs, their gold links if there are any, and what they are called."""

    name: str
    pairs: list[tuple[str, str]]
    gold: list[Links] | None


@dataclass(frozen=True)
class View:
    """Which attentions and sentences are shown."""

    kinds: tuple[str, ...] | None
    layers: tuple[int, ...] | None
    examples: int
    seed: int
    tokenized: bool

    def check(self, translator: Translator, run: Path) -> None:
        """ArgumentError where the model lacks what is to be shown."""
        from rectiformer.analyze.capture import choose_sites
        from rectiformer.analyze.record import KINDS
        from rectiformer.ops.variants import find_variant

        try:
            choose_sites(translator.model, self.kinds or KINDS, self.layers)
        except ArgumentError as error:
            raise ArgumentError(f"{run}: {error}") from error
        for kind in self.kinds or ():
            variant = translator.model.config.variant_of(kind)
            if not find_variant(variant).has_weights:
                raise ArgumentError(
                    f"{run}: {kind} attention is {variant!r}, which has no weights; ask for other --kinds"
                )

    def shows(self, site: SiteFindings) -> bool:
        return site.kind in (self.kinds or (site.kind,)) and site.layer in (self.layers or (site.layer,))

    def record(self, translator: Translator, test: TestSet, name: str) -> AttentionRecord:
        """What the heads do with a sample of the test set."""
        from rectiformer.analyze.examples import record_examples, sample
        from rectiformer.analyze.record import KINDS

        chosen = sample(self.examples, len(test.pairs), self.seed)
        return record_examples(
            translator,
            [test.pairs[index] for index in chosen],
            None if test.gold is None else [test.gold[index] for index in chosen],
            self.kinds or KINDS,
            self.layers,
            name=name,
            tokenized=self.tokenized,
            warn=warn,
        )


def parse_kinds(text: str) -> tuple[str, ...] | None:
    """Kinds with commas between; whether they exist is for `View.check` to say."""
    return tuple(dict.fromkeys(text.split(","))) if text else None


def parse_layers(text: str) -> tuple[int, ...] | None:
    if not text:
        return None
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ArgumentError(f"--layers {text!r} is not a list of layers; write their numbers, from 0, as in 0,5")
    return tuple(dict.fromkeys(map(int, parts)))


def check_outputs(files: list[Path | None], inputs: list[str]) -> None:
    """ArgumentError, before any work, where a file cannot be written or would take the place of another."""
    taken = {Path(name).resolve() for name in inputs if name}
    for path in files:
        if path is None:
            continue
        if not path.parent.is_dir() or path.is_dir():
            reason = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise ArgumentError(f"cannot write {path}: {reason}; name another file")
        if path.resolve() in taken:
            raise ArgumentError(f"{path} is named twice, or is also read; it is untouched; name another file")
        taken.add(path.resolve())


def read_test_set(source: str, target: str, gold: str, form: str, tokenized: bool, seed: int) -> TestSet:
    """The files that are named or, where none is, unseen sentences of the built-in grammar."""
    if bool(source) != bool(target) or (gold and not source):
        given = [name for name, file in (("--source", source), ("--target", target), ("--gold", gold)) if file]
        raise ArgumentError(f"{' and '.join(given)} alone; name --source and --target, or neither for built-in text")
    if source:
        return TestSet(Path(source).name, *read_aligned(source, target, gold, form, tokenized))
    if tokenized:
        raise ArgumentError("--tokenized is about files; name --source and --target, or leave it out")
    from rectiformer.measure.alignment import Links
    from rectiformer.text.grammar import draw_sentences

    drawn = list(draw_sentences(BUILT_IN, seed, "test"))
    links = [Links(pair.sure, pair.possible) for pair in drawn]
    return TestSet(f"built-in grammar, seed {seed}", [(pair.source, pair.target) for pair in drawn], links)


def distinct_names(runs: list[Path]) -> list[str]:
    """What to call the runs: their folders' names, or their paths where those are the same."""
    names = [folder.resolve().name for folder in runs]
    return names if len(set(names)) == len(names) else [str(folder) for folder in runs]


def measure(translator: Translator, test: TestSet, name: str, tokenized: bool) -> Findings:
    """All findings, with a bar on the way."""
    from rectiformer.analyze.findings import analyze

    with watching(name) as progress:
        return analyze(
            translator, test.pairs, gold=test.gold, name=test.name, progress=progress, model_name=name,
            tokenized=tokenized, warn=warn,
        )  # fmt: skip


@contextmanager
def watching(name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error while sentences are measured, then a word on what comes after them."""
    from rectiformer.terminal import Terminal

    with Terminal(stderr=True) as terminal, ExitStack() as stack:
        begun = False

        def progress(done: int, total: int) -> None:
            nonlocal begun
            if not begun:
                terminal.begin(0, total)
                begun = True
            terminal.advance(done)
            if done == total:
                terminal.end()
                if terminal.console.is_terminal:
                    stack.enter_context(terminal.console.status(f"{name}: aligning and translating"))

        yield progress
