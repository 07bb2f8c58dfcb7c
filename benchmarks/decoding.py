"""Decoding speed: our beam search with every variant vs. Hugging Face MarianMT of the same shape and CTranslate2.

    python benchmarks/decoding.py --out benchmarks/results/decoding.jsonl

One batch of random sources; every translation has exactly --length tokens, whoever generates it. Weights are bfloat16
on a GPU and float32 on the CPU. CTranslate2 has the weights of our softmax model, and is timed only after both engines
found the same translations. A point is the median over turns; points are appended as they come.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))  # where the package is not installed
import ctranslate
from kernel_timing import seconds_of
from marian import SIZES, marian_config, our_config
from points import add_result_options, append_point, describe_machine

from rectiformer import VARIANTS
from rectiformer.model.transformer import Transformer
from rectiformer.studies.efficiency import without_kernels
from rectiformer.translate.options import SearchBatch, SearchOptions, Specials
from rectiformer.translate.search import search
from rectiformer.translate.translator import cast_weights

SPECIALS = Specials(pad=0, unk=1, bos=2, eos=3)
PEERS = {"cpu": ["marian-generate", "ctranslate2"], "cuda": ["marian-generate", "marian-generate-compiled"]}
Sources = list[list[int]]


class EndlessTransformer(Transformer):
    """A model that never ends a sentence, so that the length limit does."""

    def logits(self, states: Tensor) -> Tensor:
        logits = super().logits(states)
        logits.select(-1, SPECIALS.eos).fill_(-torch.inf)
        return logits


def draw_sources(sentences: int, length: int, vocabulary: int) -> Sources:
    """Random full sources: no padding, so that no engine computes more than is counted."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, vocabulary, (sentences, length - 1), generator=generator)
    return [[*row, SPECIALS.eos] for row in ids.tolist()]


def build_model(size: dict[str, int], variant: str) -> EndlessTransformer:
    """A random model that is sure of its choices, none of which is a special token; no bias or gain is at 0 or 1."""
    config = our_config(size, variant, tie_embeddings="none")
    torch.manual_seed(1)
    model = EndlessTransformer(config, size["vocabulary"], size["vocabulary"], bos=SPECIALS.bos).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        model.output.mul_(4)
        model.decoder[-1].around_memory.norm.bias[0] = -10  # a direction in which all states lie far out,
        model.output[:4] = 0
        model.output[:4, 0] = 10  # and that speaks against the special tokens
    return model


def our_beam_search(options: argparse.Namespace, sources: Sources, variant: str) -> Callable[[], object]:
    model = build_model(SIZES[options.size], variant).to(options.device)
    if options.device == "cuda":
        cast_weights(model, torch.bfloat16)
    how = SearchOptions(beam=options.beam, extra_length=1)  # as many tokens as the source has with its eos
    return lambda: search(model, SearchBatch(sources, how, SPECIALS))


def marian_generate(options: argparse.Namespace, sources: Sources, compiled: bool) -> Callable[[], object]:
    """`compiled` holds keys and values in a cache of fixed size, for which `generate` compiles the decoder itself."""
    from transformers import MarianMTModel

    config = marian_config(SIZES[options.size], forced_eos_token_id=None)
    torch.manual_seed(1)
    model = MarianMTModel(config).to(options.device, torch.bfloat16 if options.device == "cuda" else None).eval()
    ids = torch.tensor(sources, device=options.device)
    how = {"num_beams": options.beam, "do_sample": False, "cache_implementation": "static" if compiled else None}

    def generate() -> object:
        found = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=options.length,
            max_new_tokens=options.length,
            **how,
        )
        assert found.shape == (len(sources), 1 + options.length), "generate stopped early"
        return found.tolist()

    return generate


def ctranslate2_translate(options: argparse.Namespace, sources: Sources, stack: ExitStack) -> Callable[[], object]:
    model = build_model(SIZES[options.size], "softmax")
    translator = stack.enter_context(ctranslate.exported(model, SPECIALS))
    for beam in (1, options.beam):
        check_agreement(model, translator, sources[:6], beam)
    return lambda: ctranslate.translate(translator, sources, options.beam, options.length)


def check_agreement(model: Transformer, translator: object, sources: Sources, beam: int) -> None:
    """Refuse a CTranslate2 model that finds other translations, or other scores beyond rounding, than ours."""
    how = SearchOptions(beam=beam, extra_length=1, length_penalty=0, max_repeats=0)
    ours = [found[0] for found in search(model, SearchBatch(sources, how, SPECIALS))]
    theirs = ctranslate.translate(translator, sources, beam, len(sources[0]), length_penalty=0)
    for hypothesis, (ids, score) in zip(ours, theirs, strict=True):
        assert hypothesis.ids == ids, f"beam {beam}: we found {hypothesis.ids}, CTranslate2 {ids}"
        assert abs(hypothesis.score - score) < 1e-3, f"beam {beam}: our score is {hypothesis.score}, theirs {score}"


def build(name: str, options: argparse.Namespace, sources: Sources, stack: ExitStack) -> Callable[[], object]:
    """The work of a contestant: one batch."""
    if name == "ctranslate2":
        return ctranslate2_translate(options, sources, stack)
    if name.startswith("marian-generate"):
        return marian_generate(options, sources, name.endswith("-compiled"))
    return our_beam_search(options, sources, name)


def time_turns(name: str, options: argparse.Namespace, sources: Sources) -> tuple[float, list[float]]:
    """Seconds until a contestant is warm, and those of one batch in each turn, fastest first."""
    start = time.perf_counter()
    with ExitStack() as stack:
        work = build(name, options, sources, stack)
        seconds_of(work, 2, options.device)
        ready = time.perf_counter() - start
        return ready, sorted(seconds_of(work, options.repeats, options.device) for _ in range(options.turns))


def measure(
    name: str, options: argparse.Namespace, sources: Sources, baseline: float | None, how: str = ""
) -> float | None:
    """Keep and print one point vs. the `baseline` in tokens per second; None, with the reason printed, if it failed."""
    try:
        ready, turns = time_turns(name, options, sources)
    except Exception as error:
        print(f"{name}: left out: {type(error).__name__}: {str(error).partition(chr(10))[0]}", flush=True)
        return None
    finally:
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
        torch._dynamo.reset()
    median = turns[len(turns) // 2]
    speed = options.sentences * options.length / median
    ratio = None if baseline is None else speed / baseline
    point = {
        "benchmark": "decoding",
        "contestant": name + how,
        "size": options.size,
        "sentences": options.sentences,
        "length": options.length,
        "beam": options.beam,
        "precision": "bf16" if options.device == "cuda" else "fp32",
        "ms": median * 1e3,
        "ms_least": turns[0] * 1e3,
        "ms_most": turns[-1] * 1e3,
        "tokens_per_second": speed,
        "ratio": ratio,
        "ready_seconds": ready,
        **describe_machine(options.device),
    }
    append_point(options.out, point)
    versus = "" if ratio is None else f"  {ratio:6.2f}x"
    print(f"{name + how:26} {median * 1e3:9.2f} ms  {speed / 1e3:8.2f}k tokens/s{versus}", flush=True)
    return speed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--sentences", type=int, default=None, help="128 on a GPU, 32 on the CPU")
    parser.add_argument("--length", type=int, default=32, help="tokens of every source and of every translation")
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument(
        "--plain", nargs="*", choices=VARIANTS, default=[], metavar="NAME", help="again, without kernels"
    )
    parser.add_argument("--peers", nargs="*", choices=[*PEERS["cuda"], "ctranslate2"], default=None)
    parser.add_argument("--repeats", type=int, default=3, help="batches in a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--device", choices=PEERS, default="cuda" if torch.cuda.is_available() else "cpu")
    add_result_options(parser)
    options = parser.parse_args()
    if options.sentences is None:
        options.sentences = 128 if options.device == "cuda" else 32
    if options.peers is None:
        options.peers = PEERS[options.device]
    return options


def main() -> None:
    options = parse()
    sources = draw_sources(options.sentences, options.length, SIZES[options.size]["vocabulary"])
    variants = sorted(options.variants, key=lambda variant: variant != "softmax")
    baseline: float | None = None  # the first peer that could be measured
    for name in options.peers:
        speed = measure(name, options, sources, baseline)
        baseline = speed if baseline is None else baseline
    for name in variants:
        measure(name, options, sources, baseline)
    with without_kernels():
        for name in options.plain:
            measure(name, options, sources, baseline, " plain")


if __name__ == "__main__":
    main()
