"""Commands of a trained model: translate, score, align."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice, tee
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

import rectiformer
from rectiformer.cli import inputs, options
from rectiformer.cli.options import SAMPLING, SEARCH, app, option
from rectiformer.cli.output import counting, refuse_input, to_json, write_all
from rectiformer.distributed.pulse import Pulse
from rectiformer.distributed.ranks import Ranks, torchrun_store
from rectiformer.errors import ArgumentError, CheckpointError
from rectiformer.files import remove
from rectiformer.measure.alignment import Link, Links, check_heuristic, score_with_intervals, symmetrize, write_links
from rectiformer.model.transformer import sharded_source
from rectiformer.terminal import Terminal, count_lines, counting_bar
from rectiformer.text.documents import DocumentLines, split_documents
from rectiformer.text.lines import is_stream, read_lines, spool, standard_input
from rectiformer.translate import chunks
from rectiformer.translate.align import (
    AlignmentRow,
    Direction,
    align_backward,
    align_direction,
    default_head,
    describe_head,
    ordinal,
    reads_guided,
)
from rectiformer.translate.documents import DocumentChunk, check_request, chunk_documents, translate_document_chunk
from rectiformer.translate.evaluate import score_pairs
from rectiformer.translate.marked import translate_marked_chunk
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.records import to_records
from rectiformer.translate.translator import Translation, Translator

RunOrExport = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder written by `rectiformer train`, or `export --to onnx`.")
]
Alignments = Annotated[
    str,
    option(
        "With --json: add word links by this head, as in 1:average:normal, counted from 1; auto: by that of `align`.",
        metavar="LAYER:HEAD:INDUCTION",
    ),
]
Markup = Annotated[
    bool, option("Keep inline tags, as in HTML: they are placed by word links (--alignments, or auto).", "--markup")
]
Reverse = Annotated[Path | None, option("Run of the other direction, combined by --symmetrize.")]
How = Annotated[
    str, option("How: intersection, union, grow-diag, grow-diag-final or grow-diag-final-and.", "--symmetrize")
]
Intervals = Annotated[bool, option("With --gold: 95 % intervals of precision and recall too.", "--intervals")]


@app.command()
def translate(
    run: RunOrExport,
    file: options.Source = "-",
    out: options.OutFile = None,
    as_json: options.AsJson = False,
    alignments: Alignments = "",
    heads: Annotated[bool, option("With --json: add the weights of all heads.", "--heads")] = False,
    markup: Markup = False,
    bad_utf8: options.BadUtf8 = "error",
    too_long: options.TooLong = "split",
    max_length: Annotated[
        int | None, option("Most subwords per line; default: 1024, or the run's segment if longer.", min=1)
    ] = None,
    beam: options.Beam = 4,
    length_penalty: options.Penalty = 0.6,
    nbest: Annotated[
        int, option("Translations per line; as text: `line ||| text ||| score`.", panel=SEARCH, min=1)
    ] = 1,
    prefix: Annotated[str, option("File whose line n is how translation n must begin.", panel=SEARCH)] = "",
    sample: Annotated[bool, option("Sample instead of beam search.", "--sample", panel=SAMPLING)] = False,
    temperature: Annotated[float, option("Divides the logits.", panel=SAMPLING)] = 1.0,
    top_k: Annotated[int, option("Sample from this many most probable subwords; 0: all.", panel=SAMPLING)] = 0,
    top_p: Annotated[
        float, option("Sample from the most probable subwords that together have this probability.", panel=SAMPLING)
    ] = 1.0,
    seed: Annotated[int, option("Seed of sampling.", panel=SAMPLING)] = 1,
    checkpoint: options.Checkpoint = "best",
    device: options.Device = "auto",
    precision: options.Precision = "fp32",
    batch_tokens: options.BatchTokens = 4096,
    batch_sentences: options.BatchSentences = 0,
    documents: options.Documents = "none",
    segment: options.SegmentLength = None,
    overlap: options.Overlap = 2,
    shard_source: options.ShardSource = False,
) -> None:
    """Translate lines of text.

    Writes one line per input line, in order; warnings go to standard error.

        rectiformer translate runs/tiny input.de --out output.en

    With --markup, each tag of a line comes out once, well formed, around the translation of its words. A run trained
    with training.guided_alignment places them best.

    Processes of torchrun share the lines. Finished parts are kept in a folder next to the output, so the same command
    continues where it was killed:

        torchrun --nproc-per-node 8 -m rectiformer translate runs/tiny input.de --out output.en
    """
    search = SearchOptions(
        beam=beam, length_penalty=length_penalty, nbest=nbest, sample=sample,
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
    )  # fmt: skip
    refuse_parts(as_json, alignments, heads, markup, nbest)
    refuse_input(out, [file, prefix])
    how: dict[str, Any] = {"batch_tokens": batch_tokens, "batch_sentences": batch_sentences, "too_long": too_long}
    if documents != "none":
        lines_only = {"prefix": prefix, "alignments": alignments, "heads": heads, "markup": markup}
        inputs.refuse_line_options(**lines_only, too_long=how.pop("too_long") != "split")
        how |= {"limit": segment, "overlap": overlap}
    at_once = batch_sentences == 1 or (file == "-" and standard_input().isatty())
    forced = inputs.read_text(prefix) if prefix else None
    asked = inputs.parse_head(alignments or inputs.AUTO) if alignments or markup else None
    with inputs.join_ranks(device) as (ranks, own_device):
        with inputs.only_rank0_prints(ranks):
            translator = inputs.open_translator(run, checkpoint, own_device, precision)
            align_by = inputs.find_head(translator, asked)
        translator.max_length = max_length or translator.max_length
        job = Job(file, bad_utf8, search, as_json, at_once, how, documents, forced, align_by, heads, markup)
        run_job(job, translator, ranks, out, shard_source)


def refuse_parts(as_json: bool, alignments: str, heads: bool, markup: bool, nbest: int) -> None:
    """ArgumentError where what is asked for has no place in the output."""
    if (heads or (alignments and not markup)) and not as_json:
        raise ArgumentError("--alignments and --heads are parts of JSON records; add --json")
    if markup and (heads or nbest > 1):
        raise ArgumentError("--markup puts the tags into one translation per line; leave --heads and --nbest out")


@app.command()
def score(
    run: options.RunFolder,
    source: options.Source,
    target: options.Target,
    nbest: Annotated[
        bool, option("TARGET is an n-best list of `translate --nbest`, as text or JSON.", "--nbest")
    ] = False,
    as_json: options.AsJson = False,
    checkpoint: options.Checkpoint = "best",
    device: options.Device = "auto",
    precision: options.Precision = "fp32",
    batch_tokens: options.BatchTokens = 4096,
) -> None:
    """Print the log probability of given translations.

    One line each: the natural logarithm of the probability, a tab, and its mean per subword, end symbol included.

    With --nbest, TARGET is what `translate --nbest N` writes, as text (`line ||| text ||| score`, lines counted from 1)
    or with --json. Every candidate gets a line, in the same order.

        rectiformer translate runs/tiny test.de --nbest 4 --out test.nbest
        rectiformer score runs/other test.de test.nbest --nbest
    """
    numbered = inputs.read_nbest(source, target) if nbest else list(enumerate(inputs.read_pairs(source, target), 1))
    pairs = [pair for _, pair in numbered]
    scores = score_pairs(inputs.open_run_translator(run, checkpoint, device, precision), pairs, batch_tokens)
    texts = []
    for (line, pair), found in zip(numbered, scores, strict=True):
        mean = found.log_probability / len(found.tokens)
        record = {"line": line, "source": pair[0], "target": pair[1], "mean": mean, **asdict(found)}
        texts.append(to_json(record) if as_json else f"{found.log_probability:.6f}\t{mean:.6f}")
    write_all(texts)


@app.command()
def align(
    run: options.RunFolder,
    source: options.Source,
    target: options.Target,
    gold: Annotated[str, option("Gold links, in --format, to score against.")] = "",
    layer: Annotated[str, option("Decoder layer, counted from 1; with --gold also best.")] = "",
    head: Annotated[str, option("Head, counted from 1, or average; with --gold also best.")] = "",
    induction: Annotated[str, option("Which step links a word: normal or shifted; with --gold also best.")] = "",
    tokenized: Annotated[bool, option("Split words at spaces only.", "--tokenized")] = False,
    reverse: Reverse = None,
    how: How = "",
    form: options.LinkFormat = "pharaoh",
    intervals: Intervals = False,
    out: options.OutFile = None,
    table: Annotated[
        bool, option("With --gold: print the errors of all layers and heads, not the links.", "--table")
    ] = False,
    checkpoint: options.Checkpoint = "best",
    device: options.Device = "auto",
    precision: options.Precision = "fp32",
    batch_tokens: options.BatchTokens = 4096,
) -> None:
    """Link the words of sentences to those of their translations.

    Links are read from cross-attention and written one sentence pair per line, as in `0-0 1-2` (--format pharaoh);
    docs/alignment.md has the other formats.

    A run trained with training.guided_alignment has a head for this, which is the default. In other runs the default
    is the last layer, the average of its heads, and the decoder step that predicts a word (--induction normal;
    shifted: the step that reads it), or with --gold whatever has the lowest error.

        rectiformer align runs/de-en test.de test.en --reverse runs/en-de --symmetrize grow-diag-final-and
    """
    if not gold and (table or intervals or "best" in (layer, head, induction)):
        asked = "--intervals" if intervals else "--table and the best layer, head or induction"
        raise ArgumentError(f"{asked} need --gold, the right links")
    if (reverse is None) != (not how):
        raise ArgumentError("--reverse and --symmetrize need each other, as in --symmetrize grow-diag-final-and")
    if how:
        check_heuristic(how)
    refuse_input(out, [source, target, gold])
    pairs, truth = inputs.read_aligned(source, target, gold, form, tokenized)
    chosen: dict[str, Any] = {"layer": inputs.parse_index("--layer", layer), "head": inputs.parse_index("--head", head)}
    settings: dict[str, Any] = {"induction": induction, "tokenized": tokenized, "batch_tokens": batch_tokens}
    ways = []
    for folder, follow in ((run, align_direction), (reverse, align_backward)):
        if folder is not None:
            model = inputs.open_run_translator(folder, checkpoint, device, precision)
            inputs.require_head(model, **chosen, words=("", "best"))
            if reads_guided(model, *chosen.values(), induction):
                Terminal(stderr=True).note(f"{folder} links by {describe_head(*default_head(model))}, trained to do so")
            pairs = pairs if truth is not None else inputs.without_long(model, pairs)
            with counting("aligning") as progress:
                ways.append(follow(model, pairs, truth, **chosen, **settings, progress=progress))
    links = ways[0].links
    if how:
        links = [symmetrize(left, right, how) for left, right in zip(links, ways[1].links, strict=True)]
    if out or not table:
        write_all(write_links(links, form), out)
    if truth is not None:
        report_scores(ways, links, truth, how, table, intervals)


def report_scores(
    ways: list[Direction], links: list[set[Link]], gold: list[Links], how: str, table: bool, intervals: bool
) -> None:
    """The errors of each direction and, where there are two, of both together."""
    report = Terminal(stderr=not table)
    for name, way in zip(("forward, ", "backward, ") if how else ("",), ways, strict=True):
        if way.best is not None:
            if table:
                print_alignments(report, way.rows, way.best)
            head = describe_head(way.best.layer, way.best.head, way.best.induction)
            report.note(f"{name}{head}: {score_with_intervals(way.links, gold).describe(intervals)}")
    if how:
        report.note(f"{how}: {score_with_intervals(links, gold).describe(intervals)}")


def print_alignments(terminal: Terminal, rows: Sequence[AlignmentRow], chosen: AlignmentRow) -> None:
    """Alignment error, precision and recall of every layer, head and induction; what was chosen is bold."""
    columns = ("layer", "head", "induction", "AER", "precision", "recall")
    lines = []
    for row in rows:
        score = row.score
        numbers = (f"{value:.4f}" for value in (score.aer, score.precision, score.recall))
        cells = (ordinal(row.layer), ordinal(row.head), row.induction, *numbers)
        lines.append([Text(cell, style="bold" if row is chosen else "") for cell in cells])
    terminal.table(columns, lines, numbers=columns[3:])


@dataclass(frozen=True)
class Job:
    """A file, and how its lines are translated and written."""

    file: str
    bad_utf8: str
    options: SearchOptions
    as_json: bool
    at_once: bool
    """Whether each line is answered before the next is read."""
    how: dict[str, Any]
    """As in `Translator.translate`; of documents, as in `translate_documents`."""
    documents: str = "none"
    prefixes: list[str] | None = None
    align_by: tuple[Any, Any, str] | None = None
    """Layer and head to align by, from 0, and the induction."""
    heads: bool = False
    markup: bool = False
    """Whether lines have tags, which are placed as `align_by` links words."""

    def cut(
        self, translator: Translator, lines: Iterable[str | None], tell: Callable[[float], None] | None = None
    ) -> Iterator[chunks.Chunk]:
        """What is to be done, a chunk at a time; nothing is translated before a chunk is called.

        `tell` is told how many lines are done, after each batch and each chunk.
        """
        buffer = 1 if self.at_once else 1000
        if self.documents != "none":
            return self.cut_documents(translator, lines, buffer)
        work = partial(self.write_lines, translator, tell=tell or (lambda _: None))
        return (partial(work, chunk) for chunk in chunks.chunk_lines(lines, buffer, self.prefixes))

    def write_lines(
        self, translator: Translator, chunk: chunks.LineChunk, tell: Callable[[float], None]
    ) -> Iterator[str]:
        """A text for each line."""
        before, count = chunk.first_line - 1, len(chunk.lines)

        def tell_share(done: int, total: int) -> None:
            tell(before + count * done / total)

        size, align = 1 if self.at_once else 64, self.align_by
        if self.markup:
            assert align is not None
            found = translate_marked_chunk(
                translator, chunk, self.options, align, warn=inputs.warn, buffer=size, **self.how
            )
            align = None  # the words of a translation with tags are others
        else:
            found = chunks.translate_line_chunk(
                translator, chunk, self.options, warn=inputs.warn, progress=tell_share, **self.how
            )
        if self.as_json:
            yield from map(to_json, to_records(translator, found, align=align, heads=self.heads, buffer=size))
        else:
            yield from (format_candidates(each, self.options.nbest) for each in found)
        tell(before + count)

    def cut_documents(self, translator: Translator, lines: Iterable[str | None], buffer: int) -> Iterator[chunks.Chunk]:
        """The lines of whole documents, a chunk at a time."""
        how = {**self.how, "limit": check_request(translator, self.options, self.how["limit"], self.how["overlap"])}
        unreadable: list[int] = []
        originals, ahead = tee(split_documents(note_unreadable(lines, unreadable), self.documents))

        def work(chunk: DocumentChunk, own: list[DocumentLines], line: int, bad: list[int]) -> Iterator[str]:
            for number in bad:
                inputs.warn(f"line {number}: not UTF-8, so its translation is empty")
            found = translate_document_chunk(translator, chunk, self.options, warn=inputs.warn, **how)
            for original, translation in zip(own, found, strict=True):
                line += len(original.borders)
                if self.as_json:
                    record = {"document": translation.number, "line": line, "sources": translation.sources}
                    record |= {"translations": translation.sentences, "segments": translation.segments}
                    yield to_json(record | {"fallbacks": translation.fallbacks, "warnings": translation.warnings})
                else:
                    yield from (*original.borders, *translation.sentences)
                line += len(original.sentences)

        line = 1
        for chunk in chunk_documents((each.sentences for each in ahead), buffer):
            own = list(islice(originals, len(chunk.documents)))
            yield partial(work, chunk, own, line, unreadable.copy())
            unreadable.clear()
            line += sum(len(each.borders) + len(each.sentences) for each in own)

    def key(self, translator: Translator, file: str) -> str:
        """The same for the same content of the file, weights and options."""
        text = hash_lines(file, self.bad_utf8)
        kept = {**asdict(self), "file": text, "max_length": translator.max_length, "device": translator.device.type}
        kept |= {"rectiformer": rectiformer.__version__, "weights": translator.fingerprint()}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def note_unreadable(lines: Iterable[str | None], numbers: list[int]) -> Iterator[str | None]:
    """The lines; the number of each that is not UTF-8 is added to `numbers`."""
    for number, line in enumerate(lines, 1):
        if line is None:
            numbers.append(number)
        yield line


def hash_lines(file: str, bad_utf8: str) -> str:
    """The same for the same lines, whether they are of a file or of a dataset."""
    found = hashlib.sha256()
    for line in read_lines(file, bad_utf8):
        found.update(json.dumps(line).encode() + b"\n")
    return found.hexdigest()


def format_candidates(translation: Translation, nbest: int) -> str:
    """The translation of a line; with `nbest` > 1 a line for each candidate: number of the line, text, score."""
    if nbest == 1:
        return translation.text
    return "\n".join(f"{translation.line} ||| {each.text} ||| {each.score:.6f}" for each in translation.candidates)


def run_job(job: Job, translator: Translator, ranks: Ranks, out: Path | None, shard_source: bool) -> None:
    """Translate and write, by this process alone or by all ranks."""
    if shard_source:
        run_together(job, translator, ranks, out)
    elif ranks.world_size > 1:
        run_shared(job, translator, ranks, out)
    else:
        if job.file == "-" and standard_input().isatty() and sys.stderr.isatty():
            print("type lines to translate; Ctrl-D ends", file=sys.stderr)
        total = count_lines(job.file, out) if job.documents == "none" else None
        with counting_bar("translating", total) as tell:
            found = job.cut(translator, read_lines(job.file, job.bad_utf8), tell)
            write_all(chain.from_iterable(chunk() for chunk in found), out)


def run_shared(job: Job, translator: Translator, ranks: Ranks, out: Path | None) -> None:
    """Ranks share the chunks through a folder next to `out`; rank 0 writes them in order."""
    path = Path("rectiformer-translate.work") if out is None else out.with_name(f"{out.name}.work")
    with ExitStack() as held:

        def prepare() -> dict[str, Any]:
            held.enter_context(chunks.hold_folder(path))
            file = spool_once(job.file, path)
            chunks.open_job(path, job.key(translator, file), inputs.warn)
            return {"file": file, "chunks": sum(1 for _ in job.cut(translator, read_lines(file, job.bad_utf8)))}

        told = ranks.on_rank0(prepare)
        require_same_weights(ranks, translator)
        folder = chunks.WorkFolder(path, told["chunks"])

        def all_chunks() -> Iterator[chunks.Chunk]:
            return job.cut(translator, read_lines(told["file"], job.bad_utf8))

        if ranks.is_rank0:
            write_all(chunks.gather_chunks(folder, all_chunks), out)
            chunks.finish_job(folder)
        else:
            for _ in chunks.do_chunks(folder, all_chunks):
                pass


def spool_once(file: str, folder: Path) -> str:
    """A file that every process can read: a copy in `folder` where this can be read once only."""
    if not is_stream(file):
        return file
    remove(folder / "input")
    (folder / "input").mkdir()
    return spool(file, folder / "input")


def require_same_weights(ranks: Ranks, translator: Translator) -> None:
    """CheckpointError where some process has loaded others: a training may go on in the folder."""
    weights = ranks.all_gather_object(translator.fingerprint)
    for rank, found in enumerate(weights):
        if found != weights[0]:
            raise CheckpointError(
                f"rank {rank} loaded weights {found[:12]}, but rank 0 {weights[0][:12]}; name a step by --checkpoint"
            )


def run_together(job: Job, translator: Translator, ranks: Ranks, out: Path | None) -> None:
    """All processes translate the same, each a part of every source; rank 0 reads and writes."""
    if ranks.world_size == 1:
        raise ArgumentError("--shard-source has several processes share each source, but this is one; use torchrun")
    require_same_weights(ranks, translator)
    lines = chunks.stream_lines(ranks, read_lines(job.file, job.bad_utf8), 1 if job.at_once else 1000)
    with Pulse(ranks, torchrun_store()), sharded_source(translator.model), ranks.error_guard():
        texts = chain.from_iterable(chunk() for chunk in job.cut(translator, lines))
        if ranks.is_rank0:
            write_all(texts, out)
        else:
            for _ in texts:
                pass
