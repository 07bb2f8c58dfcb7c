"""Heads switched off: their output is zero before the norm and the output projection."""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rectiformer.analyze.record import SiteRecord
from rectiformer.analyze.survey import observing
from rectiformer.errors import ArgumentError
from rectiformer.model.transformer import Site, Transformer


class Head(NamedTuple):
    """One head of a model; layers and heads count from 0."""

    kind: str
    layer: int
    head: int


@contextmanager
def switched_off(model: Transformer, heads: Collection[Head]) -> Iterator[None]:
    """While the model runs inside, these heads contribute nothing; ArgumentError for a head it does not have."""
    check_heads(model, heads)
    with ExitStack() as stack:
        for site in model.sites():
            off = heads_at(heads, site.kind, site.layer)
            if off:
                stack.enter_context(silenced(site, off))
        yield


def check_heads(model: Transformer, heads: Collection[Head]) -> None:
    known = {(site.kind, site.layer): site.attention.num_heads for site in model.sites()}
    for kind, layer, head in heads:
        if head not in range(known.get((kind, layer), 0)):
            config = model.config
            raise ArgumentError(
                f"there is no head {head} of {kind} layer {layer}; the encoder has {config.encoder_layers} layers, the "
                f"decoder {config.decoder_layers}, and each attention {config.num_heads} heads, all counted from 0"
            )


def heads_at(heads: Collection[Head], kind: str, layer: int) -> list[int]:
    """Which heads of this attention are among `heads`."""
    return sorted({each.head for each in heads if (each.kind, each.layer) == (kind, layer)})


@contextmanager
def silenced(site: Site, heads: Sequence[int]) -> Iterator[None]:
    """Replace the output of these heads by zeros before the norm."""

    def mute(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        mixed = inputs[0].unflatten(-1, (site.attention.num_heads, -1))  # [B, M, H, D]
        return (mixed.index_fill(2, torch.tensor(heads, device=mixed.device), 0).flatten(-2),)

    handle = site.attention.norm.register_forward_pre_hook(mute)
    try:
        # A CUDA graph or a fused step would bypass the hook; attention that is observed uses neither.
        with observing(site.attention, lambda _: None):
            yield
    finally:
        handle.remove()


def without_heads(site: SiteRecord, heads: Collection[Head]) -> SiteRecord:
    """The record of a site with the heads that are switched off as null."""
    indices = heads_at(heads, site.kind, site.layer)
    if not indices:
        return site
    off = np.repeat(np.isin(np.arange(site.heads), indices), site.queries)  # [H * M]
    starts = site.row_starts.astype(np.int64)
    counts = starts[1:] - starts[:-1]
    kept = ~np.repeat(off, counts)
    return dataclasses.replace(
        site,
        row_starts=np.concatenate([[0], np.where(off, 0, counts).cumsum()]).astype(site.row_starts.dtype),
        columns=site.columns[kept],
        weights=site.weights[kept],
        mass=np.where(off, 0, site.mass).astype(site.mass.dtype),
        null=np.where(off, site.visible > 0, site.null).astype(site.null.dtype),
    )
