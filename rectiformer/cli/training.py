"""Commands up to a trained model: generate, prepare, train."""

import shlex
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from rectiformer.cli.options import ConfigFile, Overrides, RunFolder, app, data, option
from rectiformer.cli.output import open_new, write_line
from rectiformer.config import SITES
from rectiformer.distributed.ranks import is_rank0
from rectiformer.errors import ArgumentError, unknown_name
from rectiformer.measure.alignment import format_links
from rectiformer.runs.folder import adopt_vocabularies, open_run
from rectiformer.terminal import Terminal, with_progress
from rectiformer.text.corpus import Counts
from rectiformer.text.grammar import draw_documents, draw_sentences
from rectiformer.text.prepared import Prepared
from rectiformer.text.prepared import prepare as prepare_data
from rectiformer.toml import load_config, override_config
from rectiformer.train import convert as converting
from rectiformer.train import start
from rectiformer.train.convert import Conversion
from rectiformer.train.heads import HeadComparison
from rectiformer.train.saving import State

MOST_LOST = 8
"""At most so many heads are named."""
HEAD_NUMBERS = ("swapped", "error", "zeros", "null_rate", "agreement", "teacher_keys", "keys")


@data.command()
def generate(
    out: Annotated[str, typer.Argument(metavar="OUT", help="Prefix of the file names.")],
    sentences: Annotated[int, option("Number of sentence pairs.", min=0)] = 0,
    documents: Annotated[int, option("Number of documents, instead; each begins with a line `<d>`.", min=0)] = 0,
    split: Annotated[str, option("train, valid or test; they share no sentence.")] = "train",
    seed: Annotated[int, option("Seed that chooses the pairs.", min=0)] = 1,
) -> None:
    """Write sentence pairs of the built-in German-English grammar, with exact word links.

    OUT.de and OUT.en are the text, OUT.tok.de and OUT.tok.en the same with spaces between all words. Line n of
    OUT.align links the words of line n, counted from 0: `i-j` is a sure link, `ipj` a possible one.
    """
    if bool(sentences) == bool(documents):
        raise ArgumentError(f"--sentences {sentences} and --documents {documents}; ask for some of one of the two")
    alone = ((pair,) for pair in draw_sentences(sentences, seed, split))
    groups = draw_documents(documents, seed, split) if documents else alone
    names = [f"{out}.{ending}" for ending in ("de", "en", "tok.de", "tok.en", "align")]
    with open_new(names) as files:
        for group in with_progress(groups, "drawing", documents or sentences):
            for file in files[: 2 if documents else 0]:
                write_line(file, "<d>")
            for pair in group:
                words = (" ".join(side) for side in (pair.source_words, pair.target_words))
                texts = (pair.source, pair.target, *words, format_links(pair.sure, pair.possible))
                for file, text in zip(files, texts, strict=True):
                    write_line(file, text)
    print(f"wrote {', '.join(names)}")


@data.command()
def prepare(
    out: Annotated[Path, option("Folder to create, for token ids and vocabularies.", "--out")],
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Train subwords and encode the text of a configuration, for `rectiformer train --data`."""
    settings = adopt_vocabularies(load_config(config, overrides or []))
    with Terminal() as terminal:
        prepared = prepare_data(settings, out, terminal.preparing, terminal.note)
    print_prepared(terminal, prepared)


@app.command()
def train(
    out: Annotated[Path, option("Run folder to create or, with --resume, to continue.", "--out", metavar="RUN")],
    config: ConfigFile = None,
    resume: Annotated[bool, option("Continue RUN; without CONFIG, with its own configuration.", "--resume")] = False,
    prepared: Annotated[
        Path | None, option("Folder written by `rectiformer data prepare`; default: prepare RUN/data.", "--data")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Train a translation model.

    Without CONFIG it learns a small built-in German-English language, in minutes on a CPU:

        rectiformer train --out runs/tiny
        echo "Der Hund schläft." | rectiformer translate runs/tiny

    Your own languages are two files, line n of one the translation of line n of the other, and two more to validate on:

        rectiformer train --out runs/mine \\
        --set data.source=train.de --set data.target=train.en \\
        --set data.valid_source=valid.de --set data.valid_target=valid.en

    `rectiformer config` prints every key that CONFIG and --set know, with its default; configs/ has examples.

    Ctrl-C saves and stops; --resume continues with the batches that would have come next.

    Several processes share the work, and end with the same model; training.grad_accumulation must be a multiple of
    their number:

        torchrun --nproc-per-node 2 -m rectiformer train --out runs/tiny --set training.grad_accumulation=2
    """
    if resume and config is None:
        start.require_configured(out)
        settings = override_config(open_run(out).config, overrides or [])
    else:
        settings = load_config(config, overrides or [])
    with Terminal() as terminal:
        state = start.train(settings, out, resume=resume, data=prepared, reporter=terminal)
    if is_rank0():
        terminal.note(training_summary(state, settings.validation.metric, out))


@app.command()
def convert(
    run: RunFolder,
    variant: Annotated[str, option("Attention to convert to; `rectiformer variants` lists the names.", "--variant")],
    out: Annotated[Path, option("Run folder to create or, with --resume, to continue.", "--out", metavar="RUN2")],
    keep_softmax: Annotated[
        list[str] | None,
        option("Site that stays softmax: encoder, decoder or cross; may be repeated.", "--keep-softmax"),
    ] = None,
    resume: Annotated[bool, option("Continue RUN2.", "--resume")] = False,
    prepared: Annotated[
        Path | None, option("Folder written by `rectiformer data prepare` to learn on; default: RUN/data.", "--data")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Convert a trained softmax model to rectified attention.

    RUN2 starts with the weights of RUN. It first learns to imitate RUN's attention, then RUN's predictions:

        rectiformer convert runs/softmax --variant relu-exp --out runs/rectified

    Ctrl-C saves and stops; --resume continues. RUN2 is a run like any other. At the end a table shows what became of
    each attention; RUN2/conversion.json has every head.
    """
    for site in keep_softmax or []:
        if site not in SITES:
            raise ArgumentError(unknown_name("value of --keep-softmax", site, SITES))
    with Terminal() as terminal:
        found = converting.convert(
            run, variant, out, keep_softmax=keep_softmax or (), overrides=overrides or [], resume=resume,
            data=prepared, reporter=terminal,
        )  # fmt: skip
    if is_rank0():
        print_conversion(terminal, found, open_run(out).config.validation.metric, run, out)


def print_conversion(terminal: Terminal, found: Conversion, metric: str, run: Path, out: Path) -> None:
    """A row for each attention, those heads that have lost most, and how to look at both models."""
    columns = ("attention", "layer", "error if swapped", "error", "worst head", "zeros", "null rows", "same top key",
               "softmax keys", "keys")  # fmt: skip
    terminal.table(columns, map(describe_heads, group_heads(found.heads)), numbers=columns[1:])
    terminal.note(
        "\nerror: of each head's output, as a share of the softmax's, for the same inputs; keys: attended to in effect"
    )
    lost = sorted((head for head in found.heads if head.resists), key=lambda head: -head.error)
    if lost:
        named = ", ".join(
            f"{head.kind} {head.layer + 1}.{head.head + 1} ({head.error:.2f})" for head in lost[:MOST_LOST]
        )
        more = f" and {len(lost) - MOST_LOST} more" if len(lost) > MOST_LOST else ""
        terminal.note(f"heads that resisted: {named}{more}")
    if found.resisting:
        all_lost = {head.kind for head in found.heads} == {*found.resisting}  # something has to be converted
        options = "" if all_lost else "".join(f", or --keep-softmax {site}" for site in found.resisting)
        terminal.note(f"attention that lost much: {', '.join(found.resisting)}; try more training.steps{options}")
    terminal.note(training_summary(found.state, metric, out))
    folders = f"{shlex.quote(str(out))} --compare {shlex.quote(str(run))}"
    terminal.note(f"look at both with: rectiformer analyze {folders} --source FILE --target FILE --report look.html")


def group_heads(heads: Sequence[HeadComparison]) -> list[list[HeadComparison]]:
    """Heads by attention."""
    return [list(group) for _, group in groupby(heads, key=lambda head: (head.kind, head.layer))]


def describe_heads(heads: Sequence[HeadComparison]) -> list[str]:
    """What the table says of one attention: means over its heads, and which is worst; all count from 1."""
    worst = max(heads, key=lambda head: head.error)
    mean = {name: fmean(getattr(head, name) for head in heads) for name in HEAD_NUMBERS}
    return [
        heads[0].kind, str(heads[0].layer + 1), f"{mean['swapped']:.2f}", f"{mean['error']:.2f}",
        f"{worst.head + 1} ({worst.error:.2f})", f"{mean['zeros']:.1%}", f"{mean['null_rate']:.1%}",
        f"{mean['agreement']:.1%}", f"{mean['teacher_keys']:.1f}", f"{mean['keys']:.1f}",
    ]  # fmt: skip


def print_prepared(terminal: Terminal, prepared: Prepared) -> None:
    """What became of the text of each split, the sizes of the vocabularies, and the hash of it all."""
    for name, split in prepared.manifest["splits"].items():
        counts = Counts(**split["counts"]).describe()
        terminal.note(
            f"{name}: {counts}; {split['source_tokens']:,} source, {split['target_tokens']:,} target subwords"
        )
    sizes = f"{prepared.source.size:,}"
    if prepared.target is not prepared.source:
        sizes += f" and {prepared.target.size:,}"
    terminal.note(f"vocabulary {sizes}; data hash {prepared.hash[:12]}; written to {prepared.folder}")


METRIC_NAMES = {"bleu": "BLEU", "chrf": "chrF", "loss": "loss"}


def training_summary(state: State, metric: str, folder: Path) -> str:
    """One line: what was best, where the run is, how to translate with it."""
    found = "nothing was validated, so the latest weights are taken as best"
    if state.best is not None:
        found = f"best {METRIC_NAMES[metric]} {abs(state.best):.3f} at step {state.best_step:,}"
    return (
        f"trained {state.step:,} {'step' if state.step == 1 else 'steps'}; {found}; the run is in {folder}; "
        f"translate with: rectiformer translate {shlex.quote(str(folder))} FILE"
    )
