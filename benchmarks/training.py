"""Training speed: our trainer with every variant vs. Hugging Face MarianMT of the same shape, batch and precision.

    python benchmarks/training.py --out benchmarks/results/training.jsonl

One update is forward, backward and Adam on 384 sentences of 32 tokens per side. Contestants take turns in one process;
a point is the median over turns. Points are appended as they come, so a stopped run loses nothing.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))  # where the package is not installed
from kernel_timing import seconds_of
from marian import SIZES, marian_config, our_config
from points import add_result_options, append_point, describe_machine

from rectiformer import VARIANTS
from rectiformer.config import Config, TrainingConfig
from rectiformer.model.transformer import Transformer
from rectiformer.studies.efficiency import without_kernels
from rectiformer.text.batches import Batch
from rectiformer.train.update import Updater


def draw_batch(sentences: int, length: int, vocabulary: int) -> Batch:
    """Random full sentences: no padding, so that nobody computes more than is counted."""
    generator = torch.Generator().manual_seed(1)
    source, target = (torch.randint(4, vocabulary, (sentences, length), generator=generator) for _ in range(2))
    start = torch.full((sentences, 1), 2)
    lengths = torch.full((sentences,), length)
    shifted = torch.cat([start, target[:, :-1]], 1)
    return Batch(np.arange(sentences), source, lengths, shifted, target, lengths, sentences * length, full=True)


def our_update(size: dict[str, int], variant: str, batch: Batch, device: str, precision: str) -> Callable[[], None]:
    model_config = our_config(size, variant)
    config = Config(
        model=model_config, training=TrainingConfig(precision=precision, compile="yes" if device == "cuda" else "no")
    )
    torch.manual_seed(1)
    model = Transformer(model_config, size["vocabulary"], size["vocabulary"]).to(device)
    updater = Updater(model, config, torch.device(device))
    steps = iter(range(1, 1_000_000))
    return lambda: updater.update(next(steps), [batch])


def marian_update(
    size: dict[str, int], compiled: bool, batch: Batch, device: str, precision: str
) -> Callable[[], None]:
    from transformers import MarianMTModel

    config = marian_config(size, dropout=0.1, attention_dropout=0.1, activation_dropout=0.1)
    torch.manual_seed(1)
    model = MarianMTModel(config).to(device).train()
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), fused=True)
    source, shifted, target = (t.to(device) for t in (batch.source, batch.target_input, batch.target))

    def update() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            loss = forward(input_ids=source, decoder_input_ids=shifted, labels=target).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def measure(name: str, build: Callable[[], Callable[[], None]], options: argparse.Namespace, batch: Batch) -> None:
    start = time.perf_counter()
    try:
        update = build()
        for _ in range(3):
            update()
        seconds_of(update, 2, options.device)
        ready = time.perf_counter() - start
        turns = sorted(seconds_of(update, options.repeats, options.device) for _ in range(options.turns))
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
        return
    finally:
        update = None
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
        torch._dynamo.reset()
    median = turns[len(turns) // 2]
    point = {
        "benchmark": "training",
        "contestant": name,
        "size": options.size,
        "sentences": options.sentences,
        "length": options.length,
        "precision": options.precision,
        "ms": median * 1e3,
        "ms_least": turns[0] * 1e3,
        "ms_most": turns[-1] * 1e3,
        "tokens_per_second": batch.tokens / median,
        "ready_seconds": ready,
        **describe_machine(options.device),
    }
    append_point(options.out, point)
    print(f"{name:20} {median * 1e3:8.2f} ms  {batch.tokens / median / 1e3:8.1f}k target tokens/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--sentences", type=int, default=384)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument(
        "--plain", nargs="*", choices=VARIANTS, default=[], metavar="NAME", help="again, without kernels"
    )
    parser.add_argument("--peers", nargs="*", default=["marian-eager", "marian-compiled"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_result_options(parser)
    options = parser.parse_args()
    size = SIZES[options.size]
    batch = draw_batch(options.sentences, options.length, size["vocabulary"])
    for peer in options.peers:
        compiled = peer == "marian-compiled"
        measure(
            peer, lambda c=compiled: marian_update(size, c, batch, options.device, options.precision), options, batch
        )

    def build(variant: str) -> Callable[[], Callable[[], None]]:
        return lambda: our_update(size, variant, batch, options.device, options.precision)

    for variant in options.variants:
        measure(variant, build(variant), options, batch)
    with without_kernels():
        for variant in options.plain:
            measure(f"{variant} plain", build(variant), options, batch)


if __name__ == "__main__":
    main()
