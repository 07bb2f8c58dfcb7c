"""Zeros by shape in a trained model: single cells, pages of keys, tiles of cells, whole rows.

    python benchmarks/sparsity.py RUN --source test.de --target test.en --out benchmarks/results/sparsity.jsonl

What a kernel can leave out are pages and tiles that are zero as a whole, not cells. Pairs are decoded as given, one at
a time and without padding; shares are means over pairs, weighted by what each of them sees.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))  # where the package is not installed
from points import append_point, describe_machine

from rectiformer.analyze.survey import weighing_sites
from rectiformer.model.observation import Observation
from rectiformer.ops.occupancy import sparsity_by_shape
from rectiformer.ops.variants import find_variant
from rectiformer.text.batches import collate
from rectiformer.text.grammar import draw_sentences
from rectiformer.translate.score import EncodedPairs, decode_forced, symbols_of
from rectiformer.translate.translator import Translator

Sums = dict[tuple[str, int, str], list[float]]


def add(sums: Sums, kind: str, layer: int, seen: Observation) -> None:
    """Add the shares of one call, weighted by its visible cells."""
    weight = float(seen.visible().sum())
    for shape, share in sparsity_by_shape(seen.q, seen.k, seen.variant, **seen.call).items():
        held = sums[kind, layer, shape]
        held[0] += share * weight
        held[1] += weight


def measure(translator: Translator, pairs: list[tuple[str, str]]) -> Sums:
    """Shares of zeros by kind, layer and shape."""
    sums: Sums = defaultdict(lambda: [0.0, 0.0])
    sites = [site for site in weighing_sites(translator.model) if find_variant(site.attention.variant).rectified]
    for site in sites:
        site.attention.observer = partial(add, sums, site.kind, site.layer)
    encoded, symbols = EncodedPairs(translator, pairs), symbols_of(translator)
    with translator.inference():
        for index in range(len(pairs)):
            decode_forced(translator, collate(encoded, torch.tensor([index]).numpy(), symbols))
    return sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--source", type=Path, default=None, help="lines; the built-in grammar unless given")
    parser.add_argument("--target", type=Path, default=None)
    parser.add_argument("--pairs", type=int, default=100, help="pairs to look at")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=None, help="JSON lines to append to")
    options = parser.parse_args()
    if options.source is None:
        pairs = [(pair.source, pair.target) for pair in draw_sentences(options.pairs, 7, "test")]
    else:
        sides = [path.read_text(encoding="utf-8").split("\n") for path in (options.source, options.target)]
        pairs = list(zip(*sides, strict=True))[: options.pairs]
    sums = measure(Translator.from_run(options.run, device=options.device), pairs)
    shapes = list(dict.fromkeys(shape for _, _, shape in sums))
    print(f"{'':12}" + "".join(f"{shape:>13}" for shape in shapes))
    for kind, layer in dict.fromkeys((kind, layer) for kind, layer, _ in sums):
        shares = {shape: sums[kind, layer, shape][0] / sums[kind, layer, shape][1] for shape in shapes}
        print(f"{kind + ' ' + str(layer + 1):12}" + "".join(f"{share:13.1%}" for share in shares.values()))
        point = {"benchmark": "sparsity", "kind": kind, "layer": layer, "pairs": len(pairs), **shares}
        append_point(options.out, {**point, **describe_machine(options.device)})


if __name__ == "__main__":
    main()
