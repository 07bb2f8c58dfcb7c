"""From encoded sources to the best target ids: the one entry, and the driver that runs anywhere."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from rectiformer.errors import ArgumentError
from rectiformer.model.transformer import Transformer
from rectiformer.translate.beam import begin_beams
from rectiformer.translate.cuda_graphs import capturable, search_static
from rectiformer.translate.options import ABANDONED, Hypothesis, SearchBatch


def search(model: Transformer, batch: SearchBatch) -> list[list[Hypothesis]]:
    """Translate one batch: for each source up to `nbest` hypotheses, ended ones first, best first among each.

    The model must be in evaluation mode; decoding runs on its device.
    """
    assert not model.training, "search needs model.eval()"
    if not batch.sources:
        return []
    if batch.precision == torch.float32:
        batch = replace(batch, precision=None)
    check_batch(batch, model)
    if not any(map(batch.wants, range(len(batch.sources)))):
        return [[ABANDONED] for _ in batch.sources]
    with torch.inference_mode():
        if model.output.device.type == "cuda" and not batch.options.sample and capturable(model):
            return search_static(model, batch)
        return search_eager(model, batch)


def check_batch(batch: SearchBatch, model: Transformer) -> None:
    """Refuse ids and lists that do not fit the model or each other, before they fail inside of it."""
    for name in ("prefixes", "keys", "separator_counts"):
        given = getattr(batch, name)
        if given is not None and len(given) != len(batch.sources):
            raise ArgumentError(f"{name} has {len(given)} entries, but there are {len(batch.sources)} sources")
    if batch.separator_counts is not None and batch.specials.separator is None:
        raise ArgumentError("separator_counts are given, but specials.separator is None: there is nothing to count")
    check_ids("sources", batch.sources, model.source_embedding.table.shape[0])
    for index, source in enumerate(batch.sources):
        if not source:
            raise ArgumentError(f"sources[{index}] is empty; it must at least hold eos")
    if batch.prefixes is not None:
        check_ids("prefixes", batch.prefixes, model.output.shape[0])
        for index, prefix in enumerate(batch.prefixes):
            if batch.specials.pad in prefix or batch.specials.bos in prefix or batch.specials.eos in prefix[:-1]:
                raise ArgumentError(f"prefixes[{index}] holds pad or bos, or eos before its end: {list(prefix)}")


def check_ids(name: str, rows: Sequence[Sequence[int]], size: int) -> None:
    for index, row in enumerate(rows):
        if row and not (min(row) >= 0 and max(row) < size):
            wrong = next(token for token in row if not 0 <= token < size)
            raise ArgumentError(f"{name}[{index}] holds id {wrong}, but the vocabulary has {size} entries")


def search_eager(model: Transformer, batch: SearchBatch) -> list[list[Hypothesis]]:
    """Beam search or sampling step by step, dropping each sentence as soon as it is done or given up."""
    device = model.output.device
    beams = begin_beams(model, batch)
    found: dict[int, list[Hypothesis]] = {}
    count, beam = beams.last.shape
    left = list(range(count))  # the sentences that are still decoded, by their index in the batch
    with batch.autocast(device):
        state = model.begin(model.encode(*(part.to(device) for part in batch.padded())))
        while True:
            rows = beams.advance(model.step(beams.last.flatten(), state))
            done = beams.done.tolist()
            ready = [index for index, over in enumerate(done) if over]
            going = [index for index, over in enumerate(done) if not over and batch.wants(left[index])]
            if ready:
                found |= zip((left[index] for index in ready), beams.hypotheses(ready), strict=True)
            if not going:
                return [found.get(index, [ABANDONED]) for index in range(count)]
            if not torch.equal(rows, torch.arange(len(rows), device=device)):
                state.reorder(rows)
            if len(going) < len(done):
                kept = torch.tensor(going, device=device)
                beams.keep(kept)
                state.keep(kept, beam)
                left = [left[index] for index in going]
