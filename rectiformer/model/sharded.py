"""Sources that no device holds: their positions are shared by ranks, from embedding to the decoder's attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from rectiformer.errors import ArgumentError
from rectiformer.model.transformer import Transformer
from rectiformer.ops.distributed import ContextGroup, require_rectified


@contextmanager
def sharded_source(model: Transformer, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Inside, every rank of `group` runs the same model on the same batches and holds a part of each source only.

    `encode` takes whole sources and gives this rank's positions of them, which `decode`, `begin` and `step` take; the
    decoder runs on every rank and gives the same there. Partial results of attention to the source are summed: so
    encoder and cross attention must be rectified. Lengths must be given, and dropout of attention be 0 in training.

    Gradients are those of the sum of all ranks' losses: with the same loss on each, their mean over ranks, as
    DistributedDataParallel takes it, is the gradient of that loss. Other dropout must draw the same on every rank.
    """
    ranks = ContextGroup.of(group)
    sites = [site for site in model.sites() if site.kind != "decoder"]
    for site in sites:
        try:
            require_rectified(site.attention.variant)
        except ArgumentError as error:
            raise ArgumentError(f"{site.kind} attention cannot read a source shared by ranks: {error}") from error
    model.source_ranks = ranks
    for site in sites:
        site.attention.ranks = ranks
    try:
        yield
    finally:
        model.source_ranks = None
        for site in sites:
            site.attention.ranks = None
