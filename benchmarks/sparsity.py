"""Zeros by shape in a trained model: single cells, pages of keys, tiles of cells.

    python benchmarks/sparsity.py RUN --source test.de --target test.en --out benchmarks/results/sparsity.jsonl

A kernel can skip pages and tiles that are zero throughout, but not single cells. Shares are of all shapes that a query
sees in part, under forced decoding.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))  # where the package is not installed
from points import add_result_options, append_point, describe_machine

from rectiformer.analyze.survey import forced_batches, observing, real_queries, weighing_sites
from rectiformer.studies.measures import SHAPES, ShapeMeter
from rectiformer.text.grammar import draw_sentences
from rectiformer.translate.evaluate import decode_forced
from rectiformer.translate.translator import Translator


def measure(translator: Translator, pairs: list[tuple[str, str]]) -> dict[tuple[str, int], ShapeMeter]:
    """What is zero in each attention of the model."""
    sites = weighing_sites(translator.model)
    meters = {(site.kind, site.layer): ShapeMeter() for site in sites}
    for batch in forced_batches(translator, pairs):
        with translator.inference(), ExitStack() as stack:
            for site in sites:
                update = partial(meters[site.kind, site.layer].update, real=real_queries(site.kind, batch))
                stack.enter_context(observing(site.attention, update))
            decode_forced(translator, batch)
    return meters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--source", type=Path, default=None, help="lines; the built-in grammar unless given")
    parser.add_argument("--target", type=Path, default=None)
    parser.add_argument("--pairs", type=int, default=100, help="pairs to look at")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_result_options(parser)
    options = parser.parse_args()
    if options.source is None:
        pairs = [(pair.source, pair.target) for pair in draw_sentences(options.pairs, 7, "test")]
    else:
        sides = [path.read_text(encoding="utf-8").split("\n") for path in (options.source, options.target)]
        pairs = list(zip(*sides, strict=True))[: options.pairs]
    meters = measure(Translator.from_run(options.run, device=options.device), pairs)
    print(f"{'':12}" + "".join(f"{shape:>13}" for shape in SHAPES))
    for (site, layer), meter in meters.items():
        shares = meter.shares()
        print(f"{site} {layer + 1}".ljust(12) + "".join(f"{share:13.1%}" for share in shares.values()))
        point = {"benchmark": "sparsity", "site": site, "layer": layer, "pairs": len(pairs), **shares}
        append_point(options.out, {**point, **describe_machine(options.device)})


if __name__ == "__main__":
    main()
