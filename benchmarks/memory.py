"""Device memory of a training step against its length: rectified attention with ReLUFormer's penalties, and peers.

    python benchmarks/memory.py --out benchmarks/results/memory.jsonl

The step is forward, backward and Adam on one sentence of N source and N target tokens, without CUDA graphs, so that
the allocator reports the peak of a step beyond weights and optimizer. Then every variant takes one step at the longest
length: a finite loss, or a line that says what went wrong.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))  # where the package is not installed
from points import add_result_options, append_point, describe_machine
from training import draw_batch

from rectiformer import VARIANTS
from rectiformer.config import Config, ModelConfig, TrainingConfig
from rectiformer.model.transformer import Transformer
from rectiformer.ops.variants import find_variant
from rectiformer.train.update import Updater

VOCABULARY = 8000
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
ALL_VARIANTS_AT = 4096
CONTESTANTS = {
    "softmax": ("softmax", False),
    "rela-g": ("rela-g", False),
    "reluformer": ("reluformer", False),
    "reluformer, penalties": ("reluformer", True),
}
"""Name: variant, and whether penalties are on."""


def build(variant: str, penalized: bool, device: str) -> Updater:
    model_config = ModelConfig(
        variant=variant,
        hidden_size=512,
        num_heads=8,
        encoder_layers=2,
        decoder_layers=2,
        ffn_size=2048,
        attention_dropout=0.0,
    )
    weight = 0.1 if penalized else 0.0
    training = TrainingConfig(precision="bf16", compile="no", mass_penalty=weight, entropy_penalty=weight)
    torch.manual_seed(1)
    model = Transformer(model_config, VOCABULARY, VOCABULARY).to(device)
    return Updater(model, Config(model=model_config, training=training), torch.device(device))


def step(updater: Updater, length: int) -> tuple[float, int]:
    """Loss of the second step of this shape, and its peak bytes beyond what stays."""
    batch = draw_batch(1, length, VOCABULARY)
    updater.update(1, [batch])
    updater.read()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    updater.update(2, [batch])
    torch.cuda.synchronize()
    return updater.read().smoothed, torch.cuda.max_memory_allocated() - before


def measure(name: str, length: int, updater: Updater, options: argparse.Namespace) -> None:
    point: dict[str, object] = {"benchmark": "memory", "contestant": name, "length": length}
    try:
        loss, held = step(updater, length)
        point |= {"loss": loss, "mib": held / 2**20}
        print(f"{name:36s} {length:6d} tokens {held / 2**20:10.1f} MiB  loss {loss:.3f}", flush=True)
    except torch.OutOfMemoryError as error:
        point["failed"] = str(error).split(". ")[0]
        print(f"{name:36s} {length:6d} tokens: {point['failed']}", flush=True)
    append_point(options.out, point | describe_machine("cuda"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS, help="none: only all variants at one length")
    add_result_options(parser)
    options = parser.parse_args()
    for name, (variant, penalized) in CONTESTANTS.items():
        updater = build(variant, penalized, "cuda")
        for length in options.lengths:
            measure(name, length, updater, options)
        del updater
        gc.collect()
    for variant in VARIANTS:
        penalized = find_variant(variant).rectified and find_variant(variant).has_weights
        measure(f"{variant} at {ALL_VARIANTS_AT}", ALL_VARIANTS_AT, build(variant, penalized, "cuda"), options)


if __name__ == "__main__":
    main()
