"""Score the word alignments of a run, and of its reverse, compared with those of eflomal if it is installed.

eflomal learns from the text it aligns, so give it what the run was trained on: --train-source and --train-target.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from points import add_result_options, append_point, describe_machine

from rectiformer.cli.inputs import read_pairs, read_text
from rectiformer.measure.alignment import (
    FORMATS,
    HEURISTICS,
    Link,
    Links,
    parse_links,
    read_gold,
    score_with_intervals,
    symmetrize,
)
from rectiformer.measure.words import given_spans, word_spans
from rectiformer.translate.align import align_backward, align_direction
from rectiformer.translate.translator import Translator

Pairs = Sequence[tuple[str, str]]
Found = dict[str, list[set[Link]]]


def both_ways(name: str, forward: list[set[Link]], backward: list[set[Link]], heuristics: Sequence[str]) -> Found:
    """Two directions and their symmetrizations; all links are (source, target)."""
    together = {
        f"{name}, {how}": [symmetrize(*links, how) for links in zip(forward, backward, strict=True)]
        for how in heuristics
    }
    return {f"{name}, forward": forward, f"{name}, backward": backward, **together}


def align_runs(options: argparse.Namespace, pairs: Pairs, gold: list[Links]) -> Found:
    """Links of the run, by the layer, head and induction that match gold best, and of the reverse run if given."""
    run = Translator.from_run(options.run, device=options.device)
    forward = align_direction(run, pairs, gold, tokenized=options.tokenized).links
    if options.reverse is None:
        return {f"{options.run.name}, forward": forward}
    reverse = Translator.from_run(options.reverse, device=options.device)
    backward = align_backward(reverse, pairs, gold, tokenized=options.tokenized).links
    return both_ways(options.run.name, forward, backward, options.symmetrize)


def align_by_eflomal(options: argparse.Namespace, pairs: Pairs, train: Pairs) -> Found:
    """Links that eflomal finds in the pairs after learning from them and from `train`, without gold."""
    from eflomal import Aligner

    sides = [[split_words(line, options.tokenized) for line in side] for side in zip(*train, *pairs, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder, name)) for name in ("forward", "backward")]
        Aligner().align(sides[0], sides[1], links_filename_fwd=files[0], links_filename_rev=files[1])
        forward, backward = ([set(parse_links(line, file).sure) for line in read_text(file)] for file in files)
    return both_ways("eflomal", forward[len(train) :], backward[len(train) :], options.symmetrize)


def split_words(line: str, tokenized: bool) -> str:
    """The words that links count, with single spaces between them and none inside."""
    spans = given_spans(line) if tokenized else word_spans(line)
    return " ".join(re.sub(r"\s", "_", line[start:end]) for start, end in spans) + "\n"


def score_all(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """A point for each alignment."""
    pairs = read_pairs(options.source, options.target)
    gold = read_gold(read_text(options.gold), options.gold, options.format, len(pairs))
    found = align_runs(options, pairs, gold)
    if find_spec("eflomal") is None:
        print("eflomal is not installed and left out; pip install eflomal")
    else:
        train = read_pairs(options.train_source, options.train_target) if options.train_source else []
        found |= align_by_eflomal(options, pairs, train)
    for name, links in found.items():
        scored = score_with_intervals(links, gold)
        print(f"{name}: {scored.describe()}")
        rates = {rate: [getattr(scored, rate), *scored.intervals[rate]] for rate in ("aer", "precision", "recall")}
        yield {"name": name, "sentences": len(pairs), **rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--gold", required=True, help="gold links of the pairs")
    parser.add_argument("--format", choices=FORMATS, default="pharaoh", help="of --gold")
    parser.add_argument("--tokenized", action="store_true", help="words are separated by spaces")
    parser.add_argument("--reverse", type=Path, help="run of the other direction")
    parser.add_argument("--symmetrize", nargs="+", choices=HEURISTICS, default=["grow-diag-final-and"])
    parser.add_argument("--train-source", default="", help="more text for eflomal to learn from")
    parser.add_argument("--train-target", default="", help="its translations")
    parser.add_argument("--device", default="cpu")
    add_result_options(parser)
    options = parser.parse_args()
    if bool(options.train_source) != bool(options.train_target):
        parser.error("--train-source and --train-target need each other")
    machine = describe_machine(options.device)
    for point in score_all(options):
        append_point(options.out, {**point, **machine})


if __name__ == "__main__":
    main()
