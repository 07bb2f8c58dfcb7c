"""Hugging Face models with `attn_implementation="rectified"` vs. "sdpa", eager: training steps and cached generation.

    python benchmarks/huggingface.py --commit $(git describe --always) --out benchmarks/results/huggingface.jsonl

Llama-like decoder and BERT-like encoder of 8 layers, hidden size 1,024, 16 heads (the decoder: 4 of keys), random
weights, bf16 on a GPU. A step is forward, backward and fused AdamW; generation adds 64 tokens to a prompt, greedily.
Contestants take turns in one process; a point is the median over rounds, many and short ones, as the speed of a host
varies over seconds by a third. Points are appended as they come; a run that is started again leaves out those its file
has of the same commit and device. All rows are meant to fit into 90 s on an H200. `huggingface_training.py` has a
larger model.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))  # where the package is not installed
from kernel_report import Mark, Point
from kernel_setup import Row, Trial
from kernel_timing import Work, seconds_of
from running import add_options, describe_run, measure_rows
from turns import measure_in_turns, write_table

from rectiformer.integrations.transformers import register

CONTESTANTS = {"ours": "rectified", "sdpa": "sdpa"}
BARS = {"short": 0.97, "long": 1.0}
ROUNDS = 11


@dataclass(frozen=True)
class Scale:
    """How large models and texts are."""

    layers: int = 8
    hidden_size: int = 1024
    heads: int = 16
    key_heads: int = 4
    ffn_size: int = 4096
    vocabulary: int = 32_000
    new_tokens: int = 64
    lengths: tuple[tuple[str, int], ...] = (("short", 512), ("long", 8192))
    batches: tuple[tuple[str, int], ...] = (("short", 8), ("long", 2))


FULL = Scale()
TINY = Scale(2, 64, 4, 2, 128, 100, 4, (("short", 16), ("long", 32)), (("short", 2), ("long", 1)))


def build_model(kind: str, implementation: str, scale: Scale, positions: int, device: str) -> Any:
    """A random model with one of the attentions."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BertConfig, LlamaConfig

    sizes: dict[str, Any] = {
        "vocab_size": scale.vocabulary,
        "hidden_size": scale.hidden_size,
        "intermediate_size": scale.ffn_size,
        "num_hidden_layers": scale.layers,
        "num_attention_heads": scale.heads,
        "max_position_embeddings": positions,
        "pad_token_id": 0,
    }
    if kind == "llama":  # no token ends a text, so that all generations are of one length
        config = LlamaConfig(num_key_value_heads=scale.key_heads, bos_token_id=1, eos_token_id=None, **sizes)
    else:
        config = BertConfig(**sizes)
    family = AutoModelForCausalLM if kind == "llama" else AutoModelForMaskedLM
    torch.manual_seed(1)
    with torch.device(device):
        model = family.from_config(config, attn_implementation=implementation)
    return model.to(torch.bfloat16 if device == "cuda" else torch.float32)


def draw_text(scale: Scale, batch: int, length: int, device: str) -> dict[str, torch.Tensor]:
    """Random tokens and, as from a tokenizer, a mask, which hides none of them."""
    ids = torch.randint(3, scale.vocabulary, (batch, length), generator=torch.Generator().manual_seed(1)).to(device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def training_step(model: Any, text: dict[str, torch.Tensor], losses: list[float]) -> Work:
    """One step; its first loss is kept, to tell a reader that contestants differ in their attention."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        loss = model(**text, labels=text["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not losses:
            losses.append(loss.item())

    return step


def generation(model: Any, text: dict[str, torch.Tensor], new_tokens: int) -> Work:
    model.eval()
    return lambda: model.generate(**text, max_new_tokens=new_tokens, do_sample=False, use_cache=True)


def rows_of(kind: str, task: str, scale: Scale, device: str, milliseconds: float) -> Iterator[Row]:
    for (text, length), (_, batch) in zip(scale.lengths, scale.batches, strict=True):
        case = {"model": kind, "task": task, "text": text, "length": length, "batch": batch}
        yield Row(task, case, partial(build_trial, case, scale, device, milliseconds))


def build_trial(case: Point, scale: Scale, device: str, milliseconds: float) -> Trial:
    text = draw_text(scale, case["batch"], case["length"], device)
    positions = case["length"] + scale.new_tokens
    losses: dict[str, list[float]] = {name: [] for name in CONTESTANTS if case["task"] == "train"}

    def prepare(name: str) -> Work:
        model = build_model(case["model"], CONTESTANTS[name], scale, positions, device)
        if case["task"] == "generate":
            return generation(model, text, scale.new_tokens)
        return training_step(model, text, losses[name])

    def meter(work: Work) -> float:
        once = seconds_of(work, 1, device)
        repeats = round(milliseconds / ROUNDS / 1e3 / once) - 1
        return (seconds_of(work, repeats, device) if repeats > 0 else once) * 1e3

    facts = {"losses": losses, "layers": scale.layers, "hidden_size": scale.hidden_size, "heads": scale.heads}
    return Trial({name: partial(prepare, name) for name in CONTESTANTS}, meter, facts=facts)


SECTIONS: dict[str, Callable[..., Iterator[Row]]] = {
    "llama": partial(rows_of, "llama", "train"),
    "bert": partial(rows_of, "bert", "train"),
    "generate": partial(rows_of, "llama", "generate"),
}


def judge(point: Point) -> Iterator[Mark]:
    yield from (Mark(name, ratio, BARS[point["case"]["text"]]) for name, ratio in point.get("ratios", {}).items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, SECTIONS, milliseconds=2000, seconds=120)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    register()
    gc.freeze()  # what was imported need not be looked at after every row
    scale = TINY if options.tiny else FULL
    rows = [row for name in options.sections for row in SECTIONS[name](scale, options.device, options.milliseconds)]
    setting = describe_run("hugging face", options.device, ("triton", "transformers"))
    measure = partial(measure_in_turns, rounds=ROUNDS, warm_ups=2)
    points = measure_rows(rows, measure, setting, options, end, {"train": 12, "generate": 18})
    print(write_table(points, judge))


if __name__ == "__main__":
    main()
