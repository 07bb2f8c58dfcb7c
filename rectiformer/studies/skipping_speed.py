"""What leaving out zeros gains on the queries and keys of a trained model: on a GPU, exactly, in milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from rectiformer.analyze.survey import observing, weighing_sites
from rectiformer.model.observation import Observation
from rectiformer.ops.cached import decode_attention
from rectiformer.ops.dispatch import attention
from rectiformer.ops.occupancy import attention_by_tiles, tile_map
from rectiformer.ops.pages import page_bounds
from rectiformer.ops.variants import find_variant
from rectiformer.text.batches import Batch
from rectiformer.translate.score import decode_forced
from rectiformer.translate.translator import Translator

REPEATS = 20
SPEEDS = ("prefill", "prefill by tiles", "decode", "decode without values of zeros", "decode by pages")


def measure_skipping(translator: Translator, batch: Batch) -> dict[str, dict[str, float]]:
    """Milliseconds of each of `SPEEDS`, by kind of attention, in its first layer; none where there is no GPU.

    The map of tiles and the bounds of pages are given, so these are the most that can be gained.
    """
    with translator.inference():
        seen = observe_first(translator, batch)
        if translator.device.type != "cuda":
            return {}
        return {
            kind: {name: round(milliseconds(work), 5) for name, work in ways(call).items()}
            for kind, call in seen.items()
        }


def observe_first(translator: Translator, batch: Batch) -> dict[str, Observation]:
    """What attention of each kind does in the first layer with a batch."""
    seen: dict[str, Observation] = {}
    with ExitStack() as stack:
        for site in weighing_sites(translator.model):
            if site.layer == 0 and find_variant(site.attention.variant).rectified:
                stack.enter_context(observing(site, partial(seen.__setitem__, site.kind)))
        decode_forced(translator, batch)
    return seen


def ways(seen: Observation) -> dict[str, Callable[[], Tensor]]:
    """The ways to do one call again: its prefill as it was, and its last query as if it were decoded by itself."""
    q, keys, variant, how = seen.q.contiguous(), seen.k.contiguous(), seen.variant, dict(seen.call)
    values = torch.randn_like(keys)
    tiles = tile_map(q, keys, variant, **how)
    last, bounds, lengths = q[:, :, -1:].contiguous(), page_bounds(keys), seen.visible()[:, 0, -1].int().expand(len(q))
    options = {name: how[name] for name in find_variant(variant).options if name in how}
    decode = partial(decode_attention, last, keys, values, variant, lengths=lengths.contiguous(), **options)
    found: tuple[Callable[[], Tensor], ...] = (
        lambda: attention(q, keys, values, variant, **how),
        lambda: attention_by_tiles(q, keys, values, tiles, variant, **how),
        lambda: decode(skip=False),
        lambda: decode(skip=True),
        lambda: decode(bounds=bounds),
    )
    return dict(zip(SPEEDS, found, strict=True))


def milliseconds(work: Callable[[], Tensor]) -> float:
    """Of one of many in a row, replayed as one graph so that the host does not count."""
    for _ in range(3):
        work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / REPEATS
