"""Rows of a translator's shapes: packed sentences, and one decoding step over cached keys."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from kernel_errors import cached_errors, packed_errors
from kernel_peers import packed, sdpa
from kernel_setup import Bench, Row, Trial, enter
from kernel_timing import Attend, Work, both_work
from torch import Tensor

from rectiformer import attention_varlen
from rectiformer.ops.decode import decode_attention

HIDDEN = 1.6449  # standard deviations below 0 at which 5 % of normal scores are above it
Layers = list[tuple[Tensor, Tensor, Tensor]]


def short_bounds(bench: Bench, seed: int, sequences: int | None = None) -> Tensor:
    """Where sequences of random lengths begin and end: as many as hold the tokens, or as many as asked for."""
    least, most = bench.scale.short_lengths
    count = sequences or round(bench.scale.short_tokens / ((least + most) / 2))
    lengths = torch.randint(least, most + 1, (count,), generator=torch.Generator().manual_seed(seed))
    return torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).to(bench.device, torch.int32)


def short_rows(bench: Bench) -> Iterator[Row]:
    """Packed sentences, as the device runs them and as Python launches them."""
    for attention, launch in product(("self", "causal", "cross"), ("graph", "python")):
        yield Row("short", {"attention": attention, "launch": launch}, partial(short_trial, bench, attention, launch))


def short_trial(bench: Bench, attention: str, launch: str) -> Trial:
    scale, causal = bench.scale, attention == "causal"
    heads, size, most = scale.short_heads, scale.sizes[0], scale.short_lengths[1]
    bounds_q = short_bounds(bench, seed=1)
    bounds_k = short_bounds(bench, seed=2, sequences=len(bounds_q) - 1) if attention == "cross" else bounds_q
    totals = [int(bounds[-1]) for bounds in (bounds_q, bounds_k, bounds_k, bounds_q)]
    tensors = [bench.draw(total, heads, size, seed=seed) for seed, total in enumerate(totals)]
    padded = [bench.draw(len(bounds_q) - 1, heads, most, size, seed=seed) for seed in range(4)]
    real = torch.arange(most, device=bench.device) < bounds_k.diff()[:, None]
    mask = real[:, None, None]
    mask = mask & torch.ones(most, most, dtype=torch.bool, device=bench.device).tril() if causal else mask

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_varlen(
            q, k, v, bounds_q, bounds_k, causal=causal, max_seqlen_q=most, max_seqlen_k=most, backend=bench.backend
        )

    entered = enter(
        both_work, tensors, ours=lambda: ours, varlen=lambda: packed(bounds_q, bounds_k, (most, most), causal)
    )
    entered |= enter(both_work, padded, padded_sdpa=lambda: sdpa("sdpa", attn_mask=mask))
    entered |= enter(both_work, padded, padded_cudnn=lambda: sdpa("cudnn", attn_mask=mask))
    if causal:  # what lies after a sentence is hidden from it anyway
        entered |= enter(both_work, padded, padded_unmasked=lambda: sdpa("sdpa", is_causal=True))
    facts = {"sequences": len(bounds_q) - 1, "tokens": totals[0], "key_tokens": totals[1]}
    return Trial(
        entered,
        bench.captured if launch == "graph" else bench.eagerly,
        checks={"ours": lambda: packed_errors(ours, tensors, (bounds_q, bounds_k), causal)},
        facts=facts,
    )


def decode_rows(bench: Bench) -> Iterator[Row]:
    """One decoding step of a model's layers, as a CUDA graph runs it."""
    scale = bench.scale
    for heads, (sentences, beam), keys in product(scale.decode_heads, scale.decode_rows, scale.decode_keys):
        case = {"heads": heads[0], "key_heads": heads[1], "size": heads[2], "rows": sentences * beam, "beam": beam}
        yield Row("decode", case | {"keys": keys}, partial(decode_trial, bench, heads, sentences, beam, keys))


def draw_layers(bench: Bench, heads: tuple[int, int, int], rows: int, keys: int, lean: float) -> Layers:
    """One query a row and its cache, for every layer of a model: what one layer reads the GPU's cache may not keep.

    Queries and keys lean apart along one direction, by `lean` each: products have mean -lean^2.
    """
    H, K, D = heads
    layers = []
    for seed in range(0, 3 * bench.scale.layers, 3):
        shapes = (rows, H, 1, D), (rows, K, keys, D), (rows, K, keys, D)
        q, k, v = (bench.draw(*shape, seed=seed + index).detach() for index, shape in enumerate(shapes))
        q[..., 0] += lean
        k[..., 0] -= lean
        layers.append((q, k, v))
    return layers


def draw_ancestors(sentences: int, beam: int, keys: int, device: str) -> Tensor | None:
    """Which cache row holds each position of a hypothesis: any of its sentence, which is as scattered as can be."""
    if beam == 1:
        return None
    chosen = torch.randint(beam, (sentences, beam, keys), generator=torch.Generator().manual_seed(1))
    rows = torch.arange(sentences)[:, None, None] * beam + chosen
    return rows.flatten(0, 1).to(device, torch.int32)


def decode_trial(bench: Bench, heads: tuple[int, int, int], sentences: int, beam: int, keys: int) -> Trial:
    """Ours with half of the scores positive, and with one in twenty; SDPA gets a beam's cache already in order."""
    H, K, D = heads
    # Along the leaning direction products have mean -c^2 and variance D + 2 c^2: 0 lies HIDDEN deviations above.
    lean = (HIDDEN**2 + (HIDDEN**4 + HIDDEN**2 * D) ** 0.5) ** 0.5
    layers, sparse = (draw_layers(bench, heads, sentences * beam, keys, c) for c in (0.0, lean))
    ancestors = draw_ancestors(sentences, beam, keys, bench.device)
    lengths = torch.tensor([keys], device=bench.device)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return decode_attention(q, k, v, key_lengths=lengths, ancestors=ancestors)

    grouped = {"enable_gqa": True} if H != K else {}
    entered = enter(decode_work, layers, ours=lambda: ours) | enter(decode_work, sparse, ours_sparse=lambda: ours)
    for name in ("sdpa", "cudnn", "flash"):
        entered |= enter(decode_work, layers, **{name: partial(sdpa, name, **grouped)})
    scores = sparse[0][0][:, :: H // K] @ sparse[0][1].mT
    return Trial(
        entered,
        lambda work: bench.captured(work) / len(layers),
        checks={
            "ours": lambda: cached_errors(ours, *layers[0], ancestors),
            "ours sparse": lambda: cached_errors(ours, *sparse[0], ancestors),
        },
        facts={"sparsity": (scores <= 0).float().mean().item(), "layers": len(layers)},
    )


def decode_work(attend: Attend, layers: Layers) -> Work:
    def work() -> None:
        with torch.no_grad():
            for q, k, v in layers:
                attend(q, k, v)

    return work
