"""Decoding speed of exported graphs in onnxruntime vs. PyTorch on the CPU: the same beam search, the same sentences.

    python benchmarks/onnx_decoding.py --out benchmarks/results/onnx-decoding-cpu.jsonl

Weights are random and float32; both are timed, turn by turn, only after they found the same translations.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))  # where the package is not installed
from decoding import SPECIALS, Sources, build_model, draw_sources
from marian import SIZES
from points import add_result_options, append_point, describe_machine

from rectiformer.integrations.onnx import OnnxTransformer, write_graphs
from rectiformer.model.transformer import Transformer
from rectiformer.translate.options import Hypothesis, SearchBatch, SearchOptions
from rectiformer.translate.search import search

POSITIONS = 512
Search = Callable[[], list[list[Hypothesis]]]


def build_searches(options: argparse.Namespace, variant: str, sources: Sources, folder: Path) -> dict[str, Search]:
    """The same beam search with the model in PyTorch and in onnxruntime."""
    endless = build_model(SIZES[options.size], variant)
    size = SIZES[options.size]["vocabulary"]
    model = Transformer(endless.config, size, size, bos=SPECIALS.bos).eval()
    model.load_state_dict(endless.state_dict())
    write_graphs(model, folder, POSITIONS)
    graphs = OnnxTransformer(folder, size, size, POSITIONS)
    how = SearchOptions(beam=options.beam, extra_length=1)  # as many tokens as the source has with its eos

    def searching(decoder: Transformer) -> Search:
        return lambda: search(decoder, SearchBatch(sources, how, SPECIALS))

    return {"pytorch": searching(model), "onnxruntime": searching(graphs)}  # type: ignore[arg-type]


def check_agreement(searches: dict[str, Search], length: int) -> None:
    """Refuse to time what finds other translations, or shorter ones than are counted."""
    found = [[best.ids for [best] in run()] for run in searches.values()]
    assert found[0] == found[1], "PyTorch and onnxruntime found different translations"
    assert {len(ids) for ids in found[0]} == {length}, "a sentence ended early"


def time_turns(searches: dict[str, Search], turns: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each and those of all its threads, fastest first; they take turns, to meet the same machine."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in searches}
    for _ in range(turns):
        for name, run in searches.items():
            start, work = time.perf_counter(), time.process_time()
            run()
            seconds[name].append((time.perf_counter() - start, time.process_time() - work))
    return {name: sorted(each) for name, each in seconds.items()}


def measure(variant: str, options: argparse.Namespace, sources: Sources) -> None:
    """Keep and print both points of one variant."""
    with TemporaryDirectory() as folder:
        searches = build_searches(options, variant, sources, Path(folder))
        check_agreement(searches, options.length)
        seconds = time_turns(searches, options.turns)
    medians = {name: each[len(each) // 2] for name, each in seconds.items()}
    least_work = {name: min(work for _, work in each) for name, each in seconds.items()}
    for name, (median, _) in medians.items():
        point = {
            "benchmark": "onnx decoding",
            "contestant": name,
            "variant": variant,
            "size": options.size,
            "sentences": options.sentences,
            "length": options.length,
            "beam": options.beam,
            "precision": "fp32",
            "ms": median * 1e3,
            "ms_least": seconds[name][0][0] * 1e3,
            "ms_most": seconds[name][-1][0] * 1e3,
            "cpu_ms_least": least_work[name] * 1e3,
            "tokens_per_second": options.sentences * options.length / median,
            "ratio": medians["pytorch"][0] / median,
            "cpu_ratio": least_work["pytorch"] / least_work[name],
            "load": os.getloadavg()[0],
            **describe_machine(),
        }
        append_point(options.out, point)
        print(
            f"{variant:14} {name:12} {median * 1e3:9.2f} ms  {point['ratio']:6.2f}x  (work {point['cpu_ratio']:.2f}x)",
            flush=True,
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--sentences", type=int, default=16)
    parser.add_argument("--length", type=int, default=32, help="tokens of every source and of every translation")
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--variants", nargs="+", default=["softmax", "rela-g", "reluformer"], metavar="NAME")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    add_result_options(parser)
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    sources = draw_sources(options.sentences, options.length, SIZES[options.size]["vocabulary"])
    for variant in options.variants:
        measure(variant, options, sources)
        gc.collect()


if __name__ == "__main__":
    main()
