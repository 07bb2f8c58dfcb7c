"""Efficiency: how fast every variant trains and decodes compared with softmax, and how fast it trains by length."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import starmap
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rectiformer.config import Config
from rectiformer.model.transformer import Transformer
from rectiformer.ops import gpu
from rectiformer.studies.corpora import EVERY
from rectiformer.studies.plan import Scale, Study, Task, Training, configure, seeded
from rectiformer.studies.recipes import (
    BASE_SIZE,
    GRAMMAR_DOCUMENTS,
    MODERN,
    checkpoint,
    data,
    training,
    validation,
)
from rectiformer.studies.results import Results, Table
from rectiformer.text.batches import Batch
from rectiformer.train.update import Updater
from rectiformer.translate.options import SearchBatch, SearchOptions, Specials
from rectiformer.translate.search import search
from rectiformer.translate.translator import cast_weights, find_device

SPECIALS = Specials(pad=0, unk=1, bos=2, eos=3)
BEAM = 4


@dataclass(frozen=True)
class Load:
    """The random sentences that are timed."""

    vocabulary: int
    length: int
    """Tokens of every sentence."""
    sentences: int
    """Sentences per update."""
    decoded: int
    """Sentences per beam search."""
    repeats: int
    """Calls in a row that are timed as one turn."""
    turns: int


LOADS = {
    "smoke": Load(vocabulary=50, length=6, sentences=4, decoded=2, repeats=1, turns=1),
    "small": Load(vocabulary=8000, length=32, sentences=384, decoded=128, repeats=5, turns=3),
    "paper": Load(vocabulary=32_000, length=32, sentences=768, decoded=32, repeats=10, turns=5),
}
TIMED = {"smoke": ("softmax", "rela-g"), "small": EVERY, "paper": EVERY}
LENGTHS = (128, 256, 512, 1024, 2048)
BY_LENGTH = ("softmax", "rela-g", "reluformer", "sparsemax", "entmax15")
"""The variants whose updates are timed at every length."""
UPDATE_TOKENS = {"smoke": 64, "small": 16_384, "paper": 16_384}
"""Subwords of such an update on each side, whatever the length."""
UNUSED = (
    *data(segment_length=64),
    *training(batch_tokens=1024, steps=10, compile="capture"),
    *validation(every=10),
    *checkpoint(every=10),
)
"""Every study trains something; here it is a model of the built-in grammar that nothing reads. Compiling would take a
minute for each of two dozen timed models."""
ON_A_GPU = (*MODERN, *training(device="auto", ema=0.99))
PAPER = {
    "softmax": ("1.00x", "1.00x"),
    "sparsemax": ("0.26x", "0.54x"),
    "entmax15": ("0.27x", "0.49x"),
    "rela-g": ("0.93x", "0.98x"),
}
"""Training and decoding relative to softmax [S]."""
KERNELS = {"fused": "our kernels", "plain": "torch's own operators, as in the paper"}


class EndlessTransformer(Transformer):
    """A model that never ends a sentence, so that all hypotheses are equally long."""

    def logits(self, states: Tensor) -> Tensor:
        logits = super().logits(states)
        logits.select(-1, SPECIALS.eos).fill_(-torch.inf)
        return logits


def trainings(scale: Scale) -> list[Training]:
    """One process in which everything is timed: nothing else may run on the GPU meanwhile."""
    more = () if scale.name == "smoke" else ON_A_GPU
    return seeded("alone", (1,), configure(GRAMMAR_DOCUMENTS, scale, *UNUSED, *more))


def measure(task: Task) -> dict[str, Any]:
    """Milliseconds of an update and of a beam search for each variant, and of updates by length."""
    config, device = task.training.config, find_device(task.training.config.training.device)
    timed = replace(config, model=replace(config.model, positions="sequence"))  # random words have no separators
    load = LOADS[task.scale.name]
    if task.scale.name != "smoke":
        sized = configure(BASE_SIZE, Scale("smoke"), f"model.norm={config.model.norm}").model
        timed = replace(config, model=sized, training=replace(config.training, grad_accumulation=1))
    # With attention dropout softmax has no kernel for more than 128 keys, and documents are trained without it.
    documents = replace(timed, model=replace(timed.model, attention_dropout=0.0))
    lengths = [length // 64 for length in LENGTHS] if task.scale.name == "smoke" else LENGTHS
    tokens = UPDATE_TOKENS[task.scale.name]
    by_length = [replace(load, length=length, sentences=tokens // length) for length in lengths]
    return {
        "speed": measure_speed(timed, TIMED[task.scale.name], load, device),
        "updates": measure_updates(documents, by_length, device),
    }


def measure_speed(config: Config, variants: Sequence[str], load: Load, device: torch.device) -> dict[str, Any]:
    """Milliseconds of an update and of a beam search for each variant, with and without our kernels."""
    found: dict[str, Any] = {}
    for variant in variants:
        own = replace(config, model=replace(config.model, variant=variant))
        for kernels in ("fused", "plain") if device.type == "cuda" else ("plain",):
            with without_kernels() if kernels == "plain" else nullcontext():
                found[f"{variant} {kernels}"] = {
                    "update": milliseconds(build_update(own, load, device), load, device),
                    "decoding": milliseconds(build_decoding(own, load, device), load, device),
                }
    return found


def measure_updates(config: Config, loads: Sequence[Load], device: torch.device) -> dict[str, dict[str, float]]:
    """Milliseconds of an update for each variant and length."""
    found: dict[str, dict[str, float]] = {}
    for variant in BY_LENGTH:
        own = replace(config, model=replace(config.model, variant=variant))
        found[variant] = {
            str(load.length): milliseconds(build_update(own, load, device), load, device) for load in loads
        }
    return found


@contextmanager
def without_kernels() -> Iterator[None]:
    """Take no fused kernel, as where Triton is not installed."""
    installed, gpu.TRITON = gpu.TRITON, False
    try:
        yield
    finally:
        gpu.TRITON = installed


def build_update(config: Config, load: Load, device: torch.device) -> Callable[[], object]:
    """One update on full sentences of random words."""
    torch.manual_seed(1)
    model = Transformer(config.model, load.vocabulary, load.vocabulary, bos=SPECIALS.bos).to(device)
    updater, batch = Updater(model, config, device), draw_batch(load)
    steps = iter(range(1, 1_000_000))
    return lambda: updater.update(next(steps), [batch])


def draw_batch(load: Load) -> Batch:
    """Random words without padding, so that every variant computes the same number of tokens."""
    shape = (load.sentences, load.length)
    source, target = (torch.randint(4, load.vocabulary, shape) for _ in range(2))
    lengths = torch.full(shape[:1], load.length)
    shifted = torch.cat([torch.full((load.sentences, 1), SPECIALS.bos), target[:, :-1]], 1)
    return Batch(np.arange(load.sentences), source, lengths, shifted, target, lengths, target.numel(), full=True)


def build_decoding(config: Config, load: Load, device: torch.device) -> Callable[[], object]:
    """Beam search for sources of random words; each translation is as long as its source."""
    torch.manual_seed(1)
    model = EndlessTransformer(config.model, load.vocabulary, load.vocabulary, bos=SPECIALS.bos).to(device).eval()
    if device.type == "cuda":
        cast_weights(model, torch.bfloat16)
    ids = torch.randint(4, load.vocabulary, (load.decoded, load.length - 1))
    sources = [[*row, SPECIALS.eos] for row in ids.tolist()]
    options = SearchOptions(beam=BEAM, extra_length=1)
    return lambda: search(model, SearchBatch(sources, options, SPECIALS))


def milliseconds(work: Callable[[], object], load: Load, device: torch.device) -> float:
    """Time of one call: the median over turns, after some calls to warm up."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(min(3, load.repeats)):
        work()
    turns = []
    for _ in range(load.turns):
        wait()
        start = time.perf_counter()
        for _ in range(load.repeats):
            work()
        wait()
        turns.append((time.perf_counter() - start) / load.repeats)
    return round(1e3 * median(turns), 4)


def tables(results: Results) -> list[Table]:
    return [table for entry in results.finished for table in tables_of(entry.measures)]


def tables_of(measures: dict[str, Any]) -> list[Table]:
    kernels = [(measures["speed"], each) for each in KERNELS if f"softmax {each}" in measures["speed"]]
    return [*starmap(speed_table, kernels), lengths_table(measures["updates"])]


def speed_table(speed: dict[str, dict[str, float]], kernels: str) -> Table:
    """Each variant relative to softmax with the same kernels; those of which the paper has numbers come first."""
    papers = PAPER if kernels == "plain" else {}
    variants = [name.partition(" ")[0] for name in speed if name.endswith(f" {kernels}")]
    rows = []
    for variant in sorted(variants, key=lambda variant: variant not in papers):
        found, base = (speed[f"{each} {kernels}"] for each in (variant, "softmax"))
        ratios = [f"{base[what] / found[what]:.2f}x" for what in ("update", "decoding")]
        shown = [f"{ratio} ({paper})" for ratio, paper in zip(ratios, papers.get(variant, ()), strict=False)] or ratios
        rows.append((variant, *shown, *(f"{found[what]:.1f}" for what in ("update", "decoding"))))
    columns = ("variant", "training", "decoding", "ms per update", "ms per beam search")
    brackets = ", in brackets the paper's" if papers else ""
    note = f"Speed relative to softmax{brackets}; above 1 is faster. Transformer-base, random text and weights; beam 4."
    return Table(f"Speed vs. softmax: {KERNELS[kernels]}", columns, rows, (note,))


def lengths_table(updates: dict[str, dict[str, float]]) -> Table:
    """Milliseconds of an update at each length, and how much faster than softmax that is."""
    base = updates["softmax"]
    rows = [
        (variant, *(f"{ms:.1f} ({base[length] / ms:.2f}x)" for length, ms in found.items()))
        for variant, found in updates.items()
    ]
    note = (
        "In brackets the speed relative to softmax, above 1 is faster. An update has the same number of subwords at "
        "every length; with our kernels where the variant has any."
    )
    columns = ("variant", *(f"{int(length):,} subwords" for length in base))
    return Table("Milliseconds per update by segment length", columns, rows, (note,))


EFFICIENCY = Study(
    name="efficiency",
    title="Efficiency",
    question="How fast are training and decoding compared with softmax?",
    paper="Zhang et al. 2021, WMT14 En-De, TensorFlow 1.13, relative to softmax: training 0.26x sparsemax, 0.27x "
    "1.5-entmax, 0.93x ReLA; decoding 0.54x, 0.49x, 0.98x [S].",
    trainings=trainings,
    measure=measure,
    tables=tables,
    alone=True,
)
