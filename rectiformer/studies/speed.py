"""Speed of updates and of beam search with every kind of attention, with and without our kernels, one after another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rectiformer.config import Config
from rectiformer.model.transformer import Transformer
from rectiformer.ops import add_norm, fused_norm, launching
from rectiformer.text.batches import Batch
from rectiformer.train.update import Updater
from rectiformer.translate.device import hold_weights
from rectiformer.translate.options import SearchOptions, Specials
from rectiformer.translate.search import search

SPECIALS = Specials(pad=0, unk=1, bos=2, eos=3)
BEAM = 4


@dataclass(frozen=True)
class Load:
    """What is timed."""

    vocabulary: int
    length: int
    """Tokens of every sentence."""
    sentences: int
    """In an update."""
    searched: int
    """In a search."""
    repeats: int
    turns: int


class EndlessTransformer(Transformer):
    """A model that never ends a sentence, so that all searches are equally long."""

    def logits(self, states: Tensor) -> Tensor:
        logits = super().logits(states)
        logits.select(-1, SPECIALS.eos).fill_(-torch.inf)
        return logits


@contextmanager
def without_kernels() -> Iterator[None]:
    """While open, no fused kernel is taken, as where Triton is not installed."""
    modules: Sequence[Any] = (launching, fused_norm, add_norm)
    before = [module.TRITON for module in modules]
    for module in modules:
        module.TRITON = False
    try:
        yield
    finally:
        for module, had in zip(modules, before, strict=True):
            module.TRITON = had


def measure_speed(config: Config, variants: Sequence[str], load: Load, device: torch.device) -> dict[str, Any]:
    """Milliseconds of an update and of a search for each kind of attention: medians over turns."""
    found: dict[str, Any] = {}
    for variant in variants:
        for kernels in ("fused", "plain") if device.type == "cuda" else ("plain",):
            with ExitStack() as stack:
                if kernels == "plain":
                    stack.enter_context(without_kernels())
                own = replace(config, model=replace(config.model, variant=variant))
                works = {"update": build_update(own, load, device), "search": build_search(own, load, device)}
                found[f"{variant} {kernels}"] = {
                    name: round(1e3 * seconds_of(work, load, device), 4) for name, work in works.items()
                }
    return found


def measure_updates(
    config: Config, variants: Sequence[str], loads: Mapping[int, Load], device: torch.device
) -> dict[str, dict[str, float]]:
    """Milliseconds of an update for each kind of attention and length."""
    found: dict[str, dict[str, float]] = {}
    for variant in variants:
        own = replace(config, model=replace(config.model, variant=variant))
        found[variant] = {
            str(length): round(1e3 * seconds_of(build_update(own, load, device), load, device), 4)
            for length, load in loads.items()
        }
    return found


def build_update(config: Config, load: Load, device: torch.device) -> Callable[[], object]:
    """One update on full sentences of random words."""
    torch.manual_seed(1)
    model = Transformer(config.model, load.vocabulary, load.vocabulary, start=SPECIALS.bos).to(device)
    updater, batch = Updater(model, config, device), draw_batch(load)
    steps = iter(range(1, 1_000_000))
    return lambda: updater.update(next(steps), [batch])


def draw_batch(load: Load) -> Batch:
    """No padding, so that nobody computes more than is counted."""
    shape = (load.sentences, load.length)
    source, target = (torch.randint(4, load.vocabulary, shape) for _ in range(2))
    lengths = torch.full(shape[:1], load.length)
    shifted = torch.cat([torch.full((load.sentences, 1), SPECIALS.bos), target[:, :-1]], 1)
    return Batch(np.arange(load.sentences), source, lengths, shifted, target, lengths, target.numel(), full=True)


def build_search(config: Config, load: Load, device: torch.device) -> Callable[[], object]:
    """A beam search over sources of random words, each as long as its source."""
    torch.manual_seed(1)
    model = EndlessTransformer(config.model, load.vocabulary, load.vocabulary, start=SPECIALS.bos).to(device).eval()
    if device.type == "cuda":
        hold_weights(model, torch.bfloat16)
    ids = torch.randint(4, load.vocabulary, (load.searched, load.length - 1))
    sources = [[*row, SPECIALS.eos] for row in ids.tolist()]
    options = SearchOptions(beam=BEAM, extra_length=1)
    return lambda: search(model, sources, options, SPECIALS)


def seconds_of(work: Callable[[], object], load: Load, device: torch.device) -> float:
    """The median over turns of the seconds of one, from some in a row; the first are not counted."""
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
    return median(turns)
