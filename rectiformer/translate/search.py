"""From encoded sources to the best target ids: the one entry, and the driver that runs anywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rectiformer.errors import ArgumentError
from rectiformer.model.transformer import Transformer
from rectiformer.translate.beam import BeamState, begin_beams
from rectiformer.translate.cuda_graphs import capturable, search_static
from rectiformer.translate.options import ABANDONED, Hypothesis, SearchBatch, SearchOptions, Specials


def search(
    model: Transformer,
    sources: Sequence[Sequence[int]],
    options: SearchOptions,
    specials: Specials,
    *,
    prefixes: Sequence[Sequence[int]] | None = None,
    keys: Sequence[int] | None = None,
    separator_counts: Sequence[int] | None = None,
    precision: torch.dtype | None = None,
    is_wanted: Callable[[int], bool] | None = None,
) -> list[list[Hypothesis]]:
    """Translate one batch: for each source up to `nbest` hypotheses, ended ones first, best first among each.

    Args:
        model: in evaluation mode; decoding runs on its device.
        sources: ids, each ending with eos.
        specials: ids that are treated apart; pad, bos and unk are never generated.
        prefixes: ids that each translation must begin with, [] for none; they may hold unk and may end with eos. A
            prefix that the length limit does not admit raises the limit to one token more than the prefix.
        keys: a number for each sentence that decides its samples; default: its index in the batch.
        separator_counts: how many of `specials.separator` each translation holds, none of them right after another,
            first or last; default: as many as the model generates. A prefix is taken as it is.
        precision: of matrix products, torch.bfloat16 for instance; float32 and None leave them to the model.
        is_wanted: whether the translation of the n-th source is still wanted, asked again and again: after each token,
            or every few where steps are captured. One that is not is given up and has `ABANDONED` as its only
            hypothesis; the others go on.
    """
    assert not model.training, "search needs model.eval()"
    if not sources:
        return []
    narrower = None if precision == torch.float32 else precision
    batch = SearchBatch(sources, options, specials, prefixes, keys, separator_counts, narrower, is_wanted)
    check_batch(batch, model)
    if not any(map(batch.wants, range(len(sources)))):
        return [[ABANDONED] for _ in sources]
    with torch.inference_mode():
        if model.output.device.type == "cuda" and not options.sample and capturable(model):
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


class DecodingState(Protocol):
    """The decoder's side of beam search: what moves with the hypotheses."""

    def reorder(self, rows: Tensor) -> None: ...

    def keep(self, sources: Tensor, beam: int) -> None: ...


def search_eager(model: Transformer, batch: SearchBatch) -> list[list[Hypothesis]]:
    """Beam search or sampling step by step, dropping each sentence as soon as it is done."""
    beams = begin_beams(model, batch)
    with batch.autocast(model.output.device):
        state = model.begin(batch.encode(model))
        return drive(lambda last: model.step(last, state), state, beams, batch.wants)


def drive(
    step: Callable[[Tensor], Tensor], state: DecodingState, beams: BeamState, is_wanted: Callable[[int], bool]
) -> list[list[Hypothesis]]:
    """Alternate between the decoder and the choice of tokens until every sentence is done or given up.

    Args:
        step: takes the latest tokens [B * K] and gives the logits [B * K, V] of the next.
    """
    found: dict[int, list[Hypothesis]] = {}
    count, beam = beams.last.shape
    left = list(range(count))  # the sentences that are still decoded, by their index in the batch
    while True:
        rows = beams.advance(step(beams.last.flatten()))
        done = beams.done.tolist()
        ready = [index for index, over in enumerate(done) if over]
        going = [index for index, over in enumerate(done) if not over and is_wanted(left[index])]
        if ready:
            found |= zip((left[index] for index in ready), beams.hypotheses(ready), strict=True)
        if not going:
            return [found.get(index, [ABANDONED]) for index in range(count)]
        if not torch.equal(rows, torch.arange(len(rows), device=rows.device)):
            state.reorder(rows)
        if len(going) < len(done):
            kept = torch.tensor(going, device=rows.device)
            beams.keep(kept)
            state.keep(kept, beam)
            left = [left[index] for index in going]
