"""Guided alignment from nothing but parallel text: BLEU and AER with and without it, on Europarl's words, in one call.

    python benchmarks/guided.py --data data --seed 1 --out benchmarks/results/guided.jsonl

1. Two models are trained, one for each direction.
2. The head of each that links words is found without gold links: those two whose links agree most.
3. Their links of the training text, symmetrized, are what a third model learns: the first one's recipe and seed, with
   `training.guided_alignment`.
4. The first and the third are measured: BLEU on the test set; AER on two sets of links. Of the third it is that of its
   guided head alone, of the first that of the chosen head and of the best of all heads.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))  # where the package is not installed
from points import add_result_options, append_point, describe_machine

from rectiformer.measure.alignment import Link, flip, score_with_intervals, symmetrize, write_links
from rectiformer.studies import recipes
from rectiformer.studies.corpora import (
    BICICI,
    SILVER,
    Row,
    find_corpus,
    gold_pairs,
    held_out_pairs,
    write_rewritten,
)
from rectiformer.studies.plan import Scale
from rectiformer.translate.align import WordLinker, align_direction, align_pairs, cross_attention, default_head
from rectiformer.translate.evaluate import evaluate
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator

CORPUS, FOLDER, SHARDS = "europarl-en-de-words", "europarl-doc-ende", 4
HEADS_FROM = 300
"""Pairs by which heads are chosen."""
Aligner = tuple[int, int | str, str]
STARTED = time.perf_counter()


def say(text: str) -> None:
    print(f"{time.perf_counter() - STARTED:5.0f} s  {text}", flush=True)


def write_words(data: Path, work: Path) -> None:
    """All training and validation files as lowercase words with spaces between."""
    names = [f"train.{shard}.{side}.xz" for shard in range(SHARDS) for side in ("en", "de")]
    paths = [str(data / FOLDER / name) for name in [*names, "valid.en.xz", "valid.de.xz"]]
    with get_context("spawn").Pool(len(paths)) as pool:
        pool.map(partial(write_rewritten, form="words", folder=work), paths)


def settings_of(options: argparse.Namespace, source: str, target: str) -> list[str]:
    """The recipe of the study `translation-quality` in post-norm, for one direction."""
    work = options.work
    files = [[str(work / f"train.{shard}.{side}") for shard in range(SHARDS)] for side in (source, target)]
    names = recipes.data(
        source=files[0], target=files[1], valid_source=str(work / f"valid.{source}"),
        valid_target=str(work / f"valid.{target}"),
    )  # fmt: skip
    row = Row(variant=options.variant, norm="post", peak=recipes.choice_of("europarl", "post", options.variant).chosen)
    own = [*recipes.attention_settings(row.variant), *row.settings, f"training.seed={options.seed}"]
    return [*find_corpus("small", CORPUS).settings, *names, *own, *(options.set or [])]


def start_training(folder: Path, settings: Sequence[str]) -> subprocess.Popen[bytes]:
    """A training in a process of its own, which says what it does in FOLDER.log."""
    command = [sys.executable, "-m", "rectiformer", "train", "--out", str(folder)]
    for setting in settings:
        command += ["--set", setting]
    with folder.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def finish(*trainings: subprocess.Popen[bytes]) -> None:
    for training in trainings:
        if training.wait():
            sys.exit(f"failed: {' '.join(map(str, training.args))}")  # type: ignore[arg-type]


def read_lines(*paths: Path) -> list[str]:
    return [line for path in paths for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def find_heads(runs: Sequence[Translator], pairs: Sequence[tuple[str, str]]) -> tuple[list[Aligner], float]:
    """The head of each direction whose links have the highest F1 against each other's, and that F1."""
    found: list[dict[Aligner, list[set[Link]]]] = []
    for run, own in zip(runs, (pairs, [(target, source) for source, target in pairs]), strict=True):
        config = run.model.config
        heads = product(range(config.decoder_layers), (*range(config.num_heads), "average"), ("normal", "shifted"))
        linkers = [WordLinker(pair, tokenized=True) for pair in cross_attention(run, own)]
        found.append({head: [linker.links(*head) for linker in linkers] for head in heads})
    best: tuple[float, list[Aligner]] = (-1.0, [])
    for (first, forward), (second, backward) in product(found[0].items(), found[1].items()):
        both = [(left, flip(right)) for left, right in zip(forward, backward, strict=True)]
        total = sum(len(left) + len(right) for left, right in both)
        best = max(best, (2 * sum(len(left & right) for left, right in both) / max(1, total), [first, second]))
    return best[1], best[0]


def align_part(
    part: list[tuple[str, str]], folders: Sequence[Path], heads: Sequence[Aligner], device: str
) -> list[str]:
    """The lines of a links file for some pairs, from both directions."""
    both = []
    for folder, (layer, head, induction), turned in zip(folders, heads, (False, True), strict=True):
        run = Translator.from_run(folder, device=device, precision="bf16" if device == "cuda" else "fp32")
        run.max_length = 1 << 20
        own = [(target, source) for source, target in part] if turned else part
        links = align_pairs(run, own, layer=layer, head=head, induction=induction, tokenized=True, batch_tokens=16_384)
        both.append([flip(each) for each in links] if turned else links)
    return list(write_links(symmetrize(*each, "grow-diag") for each in zip(*both, strict=True)))


def write_all_links(options: argparse.Namespace, folders: Sequence[Path], heads: Sequence[Aligner]) -> list[Path]:
    """A links file for each training file: of the first `--linked` those found, of the others empty lines."""
    files = [[read_lines(options.work / f"train.{shard}.{side}") for side in ("en", "de")] for shard in range(SHARDS)]
    pairs = [pair for sides in files[: options.linked] for pair in zip(*sides, strict=True)]
    order = sorted(range(len(pairs)), key=lambda index: len(pairs[index][0]))  # batches of like lengths
    shares = [order[worker :: options.workers] for worker in range(options.workers)]
    work = partial(align_part, folders=folders, heads=heads, device=options.device)
    with get_context("spawn").Pool(options.workers) as pool:
        found = pool.map(work, [[pairs[index] for index in share] for share in shares], chunksize=1)
    lines = [""] * sum(len(sides[0]) for sides in files)
    for share, written in zip(shares, found, strict=True):
        for index, line in zip(share, written, strict=True):
            lines[index] = line
    paths = [options.work / f"train.{shard}.links" for shard in range(SHARDS)]
    for path, sides in zip(paths, files, strict=True):
        path.write_text("".join(line + "\n" for line in lines[: len(sides[0])]), encoding="utf-8")
        del lines[: len(sides[0])]
    return paths


def measure(options: argparse.Namespace, name: str, run: Translator, head: Aligner) -> None:
    """Append BLEU, and the AER of `head` and of the best head on the set itself."""
    scale = Scale("small", options.data)
    tests = held_out_pairs(scale, find_corpus("small", CORPUS))[: options.tests]
    sources, references = zip(*tests, strict=True)
    bleu = (
        evaluate(run, sources, references, SearchOptions(beam=4), ("bleu",), batch_tokens=16_384).scores["bleu"].value
    )
    point: dict[str, Any] = {"name": name, "variant": options.variant, "seed": options.seed, "bleu": bleu}
    layer, of, induction = head
    for gold in (BICICI, SILVER):
        pairs, links = gold_pairs(scale, gold)
        own = align_pairs(run, pairs, layer=layer, head=of, induction=induction, tokenized=True)
        scored = score_with_intervals(own, links)
        best = align_direction(run, pairs, links, layer="best", tokenized=True).best
        assert best is not None
        point |= {gold.name: [scored.aer, *scored.intervals["aer"]], f"{gold.name}, best head": best.score.aer}
    say(f"{name}: {point}")
    append_point(options.out, {**point, "head": list(head), "set": options.set, **describe_machine(options.device)})


def measure_both(options: argparse.Namespace, runs: Sequence[Translator], heads: Sequence[Aligner]) -> None:
    """Append the AER of both directions together, by which the links were made."""
    for gold in (BICICI, SILVER):
        pairs, links = gold_pairs(Scale("small", options.data), gold)
        turned = [(target, source) for source, target in pairs]
        forward, backward = (
            align_pairs(run, own, layer=head[0], head=head[1], induction=head[2], tokenized=True)
            for run, own, head in zip(runs, (pairs, turned), heads, strict=True)
        )
        both = [symmetrize(left, flip(right), "grow-diag") for left, right in zip(forward, backward, strict=True)]
        say(f"links of both, {gold.name}: {score_with_intervals(both, links).describe()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, required=True, help="folder of europarl-doc-ende and of the links to score by"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("guided-work"), help="folder to make for text, links and runs"
    )
    parser.add_argument("--variant", default="rela-g")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--weight", type=float, default=0.05, help="training.guided_alignment")
    parser.add_argument("--linked", type=int, default=SHARDS, help="of how many training files the words are linked")
    parser.add_argument("--workers", type=int, default=12, help="processes that link words")
    parser.add_argument("--tests", type=int, help="most test sentences to translate")
    parser.add_argument(
        "--set", action="append", metavar="SECTION.KEY=VALUE", help="change the recipe of all trainings"
    )
    parser.add_argument("--device", default="cuda")
    add_result_options(parser, Path("benchmarks/results/guided.jsonl"))
    options = parser.parse_args()
    options.work.mkdir(parents=True)
    write_words(options.data, options.work)
    say("text is words")
    forward, backward, guided = (options.work / name for name in ("en-de", "de-en", "guided"))
    trainings = [
        start_training(forward, settings_of(options, "en", "de")),
        start_training(backward, settings_of(options, "de", "en")),
    ]
    finish(*trainings)
    say("both directions are trained")
    runs = [Translator.from_run(folder, device=options.device) for folder in (forward, backward)]
    valid = list(zip(*(read_lines(options.work / f"valid.{side}") for side in ("en", "de")), strict=True))
    heads, agreement = find_heads(runs, [pair for pair in valid if "<d>" not in pair][:HEADS_FROM])
    say(f"layers and heads from 0, {heads}, agree by an F1 of {agreement:.3f}")
    measure_both(options, runs, heads)
    links = write_all_links(options, (forward, backward), heads)
    say("training text is linked")
    own = [f"data.links={[str(path) for path in links]}", "data.link_words=spaces"]
    own += [f"vocabulary.source_model={forward / 'source.model'}"]  # the same subwords, without choosing them again
    training = start_training(
        guided, [*settings_of(options, "en", "de"), *own, f"training.guided_alignment={options.weight}"]
    )
    measure(options, "plain", runs[0], heads[0])  # while the other one trains
    finish(training)
    say("the guided model is trained")
    run = Translator.from_run(guided, device=options.device)
    measure(options, "guided", run, default_head(run))


if __name__ == "__main__":
    main()
