"""What commands read: runs, lines, pairs and their links, documents, layers and heads."""

import io
import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

from rectiformer.config import DataConfig
from rectiformer.distributed.ranks import Ranks, init_ranks
from rectiformer.errors import ArgumentError, DataError
from rectiformer.integrations.onnx import OnnxTranslator
from rectiformer.measure.alignment import Links, check_links, read_gold
from rectiformer.measure.words import given_spans, word_spans
from rectiformer.terminal import Terminal
from rectiformer.text.corpus import read_two_files
from rectiformer.text.documents import split_documents
from rectiformer.text.lines import display_name, is_stream, read_lines
from rectiformer.translate.align import AVERAGE, cross_sites, default_head, describe_head, ordinal
from rectiformer.translate.evaluate import fits
from rectiformer.translate.translator import Translator, find_device

AUTO = "auto"


def open_translator(run: Path, checkpoint: str, device: str, precision: str) -> Translator:
    """The translator of a run folder, or of one that `rectiformer export --to onnx` wrote."""
    if (run / "export.json").is_file():
        if (checkpoint, precision) != ("best", "fp32") or device not in ("auto", "cpu"):
            raise ArgumentError(
                f"{run} is exported: one set of weights, fp32, for the cpu; leave out what asks for more"
            )
        return OnnxTranslator(run)
    return open_run_translator(run, checkpoint, device, precision)


def open_run_translator(run: Path, checkpoint: str, device: str, precision: str) -> Translator:
    """The translator of a run folder, for what looks inside a model; CheckpointError for an exported one."""
    return Translator.from_run(run, checkpoint, device, precision, notice=warn)


@contextmanager
def join_ranks(device: str) -> Iterator[tuple[Ranks, str]]:
    """The processes that torchrun started, or this one alone, and the device of this one."""
    with init_ranks(lambda: find_device(device)) as (ranks, own):
        yield ranks, str(own) if ranks.world_size > 1 else device


def only_rank0_prints(ranks: Ranks) -> AbstractContextManager[object]:
    """Warnings and bars of rank 0 alone, where all processes would have the same; errors still show."""
    return nullcontext() if ranks.is_rank0 else redirect_stderr(io.StringIO())


def refuse_pipes(ranks: Ranks, *files: str) -> None:
    """ArgumentError where several processes would have to read what can be read once."""
    for file in files:
        if ranks.world_size > 1 and file and is_stream(file):
            raise ArgumentError(
                f"{ranks.world_size} processes cannot all read {display_name(file)}; write it to a file first"
            )


def read_text(file: str) -> list[str]:
    """All lines of a file; DataError where one is not UTF-8."""
    return [line or "" for line in read_lines(file)]


def read_pairs(source: str, target: str) -> list[tuple[str, str]]:
    """Lines of two files, side by side; DataError where one has more."""
    return [(left or "", right or "") for left, right, _ in read_two_files(source, target, DataConfig())]


def read_nbest(source: str, target: str) -> list[tuple[int, tuple[str, str]]]:
    """Every candidate of an n-best list with its source line, and the number of that line, from 1."""
    sources = read_text(source)
    found = []
    for row, text in enumerate(read_text(target), 1):
        where = f"{display_name(target)}:{row}"
        for line, candidate in parse_candidates(text, where):
            if not 1 <= line <= len(sources):
                raise DataError(f"{where}: line {line} of {display_name(source)}, which has lines 1 to {len(sources)}")
            found.append((line, (sources[line - 1], candidate)))
    return found


def parse_candidates(text: str, where: str) -> list[tuple[int, str]]:
    """Source line and text of what one line of an n-best list holds: one candidate, or as JSON all of a source."""
    try:
        if text.startswith("{"):
            record = json.loads(text)
            return [(int(record["line"]), str(each["translation"])) for each in record["nbest"]]
        line, _, rest = text.partition(" ||| ")
        candidate, bars, _ = rest.rpartition(" ||| ")
        if bars:
            return [(int(line), candidate)]
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise DataError(f"{where}: not `line ||| text ||| score`, nor a JSON record of `translate --json --nbest`")


def read_aligned(
    source: str, target: str, gold: str, form: str, tokenized: bool
) -> tuple[list[tuple[str, str]], list[Links] | None]:
    """Sentence pairs and, if there is a file of them, their gold links, which lie inside."""
    pairs = read_pairs(source, target)
    if not gold:
        return pairs, None
    gold_links = read_gold(read_text(gold), gold, form, len(pairs))
    spans = given_spans if tokenized else word_spans
    for line, (links, (left, right)) in enumerate(zip(gold_links, pairs, strict=False), 1):
        check_links(links, len(spans(left)), len(spans(right)), f"{gold}: pair {line}")
    return pairs, gold_links


def parse_index(name: str, text: str) -> int | str:
    """The index, from 0, of a layer or head that an option counts from 1; a word such as "best" stays one."""
    if not (text.isascii() and text.isdigit()):
        return text
    if int(text) == 0:
        raise ArgumentError(f"{name} {text}: layers and heads are counted from 1; the first is 1")
    return int(text) - 1


def parse_head(text: str) -> tuple[Any, Any, str] | str:
    """Indices of LAYER and HEAD, and the INDUCTION, of LAYER:HEAD:INDUCTION, or "auto"; see `find_head`."""
    if text == AUTO:
        return AUTO
    parts = text.split(":")
    if len(parts) != 3:
        raise ArgumentError(
            f"--alignments {text!r} is not of the form LAYER:HEAD:INDUCTION, such as 1:average:normal, nor auto"
        )
    return parse_index("--alignments", parts[0]), parse_index("--alignments", parts[1]), parts[2]


def find_head(translator: Translator, asked: tuple[Any, Any, str] | str | None) -> tuple[Any, Any, str] | None:
    """What `parse_head` found, "auto" being the head that this model links words by; said where it was trained to."""
    if asked is None:
        return None
    cross_sites(translator.model)
    if not isinstance(asked, str):
        require_head(translator, *asked[:2])
        return asked
    if translator.guided is not None:
        Terminal(stderr=True).note(f"words are linked by {describe_head(*translator.guided)}, trained to do so")
    return default_head(translator)


def require_head(translator: Translator, layer: int | str, head: int | str, words: tuple[str, ...] = ()) -> None:
    """ArgumentError, in numbers from 1, for an index that the decoder lacks and for a word that is none of these."""
    sites = cross_sites(translator.model)
    layers, heads = len(sites), sites[0].attention.num_heads
    if layer not in words and layer not in range(layers):
        raise ArgumentError(f"layer {ordinal(layer)} does not exist; the decoder has layers 1 to {layers}")
    if head not in (*words, AVERAGE) and head not in range(heads):
        raise ArgumentError(f"head {ordinal(head)} does not exist; there are heads 1 to {heads} and {AVERAGE}")


def without_long(translator: Translator, pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The pairs, empty ones where a side is too long to go through the model, with a warning."""
    found = []
    for number, pair in enumerate(pairs, 1):
        short = 4 * max(map(len, pair)) < translator.max_length  # a character takes four subwords at most, as bytes
        if short or fits(translator, pair):
            found.append(pair)
            continue
        warn(f"pair {number}: a side has more than {translator.max_length} subwords, so its words are not linked")
        found.append(("", ""))
    return found


def warn(text: str) -> None:
    print(f"rectiformer: warning: {text}", file=sys.stderr)


def refuse_line_options(**given: Any) -> None:
    """ArgumentError where an option was given that is about single lines."""
    for name, value in given.items():
        if value:
            raise ArgumentError(f"--{name.replace('_', '-')} is about single lines; leave it or --documents out")


def cut_documents(lines: list[str], documents: str) -> list[list[str]]:
    """The sentences of every document that has any; without documents, all lines as one."""
    if documents == "none":
        return [lines]
    return [found.sentences for found in split_documents(lines, documents) if found.sentences]


def cut_alike(lines: list[str], others: list[str], documents: str) -> list[list[str]]:
    """`cut_documents` of translations whose references are `others`, line by line.

    A line that is blank here only is an empty translation; where the lines do not fit, every blank one is a border.
    """
    if documents != "blank" or len(lines) != len(others):
        return cut_documents(lines, documents)
    pairs = list(zip(lines, others, strict=True))
    if any(line.strip() and not other.strip() for line, other in pairs):
        return cut_documents(lines, documents)
    groups = groupby(pairs, key=lambda pair: not pair[1].strip())
    return [[line for line, _ in group] for border, group in groups if not border]


def put_back(found: list[list[str]], lines: list[str], documents: str) -> Iterator[str]:
    """The lines, with translations in the place of their sentences and borders as they are."""
    translations = chain.from_iterable(found)
    for document in split_documents(lines, documents):
        yield from (*document.borders, *islice(translations, len(document.sentences)))


def distinct_names(runs: list[Path]) -> list[str]:
    """What to call the runs: their folders' names, or their paths where those are the same."""
    names = [folder.resolve().name for folder in runs]
    return names if len(set(names)) == len(names) else [str(folder) for folder in runs]
