"""Commands that look into a model: analyze, explore."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rectiformer.cli.documents import Documents
from rectiformer.cli.inputs import LinkFormat, join_ranks, only_first_speaks, open_run_translator, refuse_pipes, warn
from rectiformer.cli.options import AsJson, Checkpoint, Device, Precision, RunFolder, app, option
from rectiformer.cli.results import Outputs, print_findings, write_files
from rectiformer.cli.test_sets import (
    Cut,
    TestSet,
    choose_segments,
    cut_test_set,
    read_test_set,
    require_grammar,
    with_own_translations,
)
from rectiformer.cli.writing import check_outputs
from rectiformer.errors import ArgumentError

if TYPE_CHECKING:
    from rectiformer.analyze.findings import Findings, SiteFindings
    from rectiformer.analyze.record import AttentionRecord
    from rectiformer.translate.translator import Translator

WRITTEN, SHOWN = "Files to write", "Examples"

NewFile = Path | None
SecondRun = Annotated[Path | None, typer.Argument(metavar="RUN2", help="Another run, to compare.")]


@app.command("analyze")
def analyze_command(
    run: RunFolder,
    source: Annotated[str, option("Sentences, one a line; default: the built-in grammar's, for a RUN of it.")] = "",
    target: Annotated[str, option("Their translations, line by line; default: the model's own.")] = "",
    gold: Annotated[str, option("Right word links, in the format of --format, for the alignment error.")] = "",
    form: LinkFormat = "pharaoh",
    documents: Documents = "none",
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
    layers: Annotated[str, option("Their layers, from 1, with commas between; all unless given.", panel=SHOWN)] = "",
    longest: Annotated[
        int | None, option("Most subwords of a sentence or document; 1024 or a run's segment, unless given.", min=1)
    ] = None,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    precision: Precision = "fp32",
) -> None:
    """Measure what every head does, and when it attends to nothing.

    Over a test set, under forced decoding: shares of zeros and of queries that attend to nothing, how much heads
    differ, and with links the alignment error. --source alone is translated first, and each model decodes its own
    translations. --out has more. A second run's files end in -2. With --documents, runs
    read segments of whole documents as in training, and it is shown how far attention to the source reaches. Processes
    of torchrun share the work and add up what they saw.

        rectiformer analyze runs/rela --beside runs/softmax --source test.de --target test.en --report look.html
    """
    view = View(parse_kinds(kinds), parse_layers(layers), examples, seed, tokenized)
    check_outputs([report, record, out], [source, target, gold])
    runs = [run] if beside is None else [run, beside]
    with join_ranks(device) as (team, own_device), only_first_speaks(team):
        refuse_pipes(team, source, target, gold)
        if not source:
            require_grammar(runs)
        test = read_test_set(source, target, gold, form, tokenized, seed, documents)
        translators = [open_run_translator(folder, checkpoint, own_device, precision) for folder in runs]
        for folder, translator in zip(runs, translators, strict=True):
            translator.longest, translator.team = longest or translator.longest, team
            view.check(translator, folder)
        names = distinct_names(runs)
        tests = [with_own_translations(test, each) if test.own else test for each in translators]
        cuts = cut_test_set(test, translators, names)
        shown = choose_segments(cuts, examples, seed)
        found, records = [], []
        for number, (name, translator) in enumerate(zip(names, translators, strict=True)):
            found.append(measure(translator, tests[number], cuts[number] if cuts else None, name, tokenized))
            if report or figures or record:
                records.append(view.record(translator, tests[number], shown[number] if shown else None, name))
        if team.leads:
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
    It needs `pip install "rectiformer[serve]"`.

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
        Answerer(open_run_translator(folder, checkpoint, device, precision), name)
        for folder, name in zip(runs, names, strict=True)
    ]
    listening = listen(port)
    address = f"http://{listening.getsockname()[0]}:{listening.getsockname()[1]}/"
    Terminal().note(f"exploring {' beside '.join(names)} at {address} (Ctrl-C ends it)")
    if not no_browser:
        open_browser(address)
    serve(models, listening)


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

        kinds, config = self.kinds or KINDS, translator.model.config
        try:
            choose_sites(translator.model, kinds, None)
        except ArgumentError as error:
            raise ArgumentError(f"{run}: {error}") from error
        most = max(config.encoder_layers if kind == "encoder" else config.decoder_layers for kind in kinds)
        for layer in self.layers or ():
            if layer >= most:
                raise ArgumentError(
                    f"{run}: layer {layer + 1} does not exist; layers count from 1, and the encoder has "
                    f"{config.encoder_layers}, the decoder {config.decoder_layers}"
                )
        for kind in self.kinds or ():
            variant = translator.model.config.variant_of(kind)
            if not find_variant(variant).has_weights:
                raise ArgumentError(
                    f"{run}: {kind} attention is {variant!r}, which has no weights; ask for other --kinds"
                )

    def shows(self, site: SiteFindings) -> bool:
        return site.kind in (self.kinds or (site.kind,)) and site.layer in (self.layers or (site.layer,))

    def record(self, translator: Translator, test: TestSet, shown: Cut | None, name: str) -> AttentionRecord:
        """What the heads do with a sample of the test set, or with the segments `shown`."""
        from rectiformer.analyze.documents import record_segments, take
        from rectiformer.analyze.examples import record_examples, sample
        from rectiformer.analyze.record import KINDS

        if shown is not None:
            segments = take([test.pairs], shown)
            return record_segments(
                translator, segments, self.kinds or KINDS, self.layers, name=name, tokenized=self.tokenized
            )
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
    """Indices, from 0, of layers that people count from 1."""
    if not text:
        return None
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts) or 0 in map(int, parts):
        raise ArgumentError(f"--layers {text!r} is not a list of layers; write their numbers, from 1, as in 1,6")
    return tuple(dict.fromkeys(int(part) - 1 for part in parts))


def distinct_names(runs: list[Path]) -> list[str]:
    """What to call the runs: their folders' names, or their paths where those are the same."""
    names = [folder.resolve().name for folder in runs]
    return names if len(set(names)) == len(names) else [str(folder) for folder in runs]


def measure(translator: Translator, test: TestSet, segments: Cut | None, name: str, tokenized: bool) -> Findings:
    """All findings, with a bar on the way."""
    from rectiformer.analyze.documents import analyze_documents
    from rectiformer.analyze.findings import analyze

    with watching(name) as progress:
        if segments is not None:
            return analyze_documents(
                translator, test.documents, segments, name=test.name, progress=progress, model_name=name, warn=warn
            )
        return analyze(
            translator, test.pairs, gold=test.gold, name=test.name, quality=not test.own, progress=progress,
            model_name=name, tokenized=tokenized, warn=warn,
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
